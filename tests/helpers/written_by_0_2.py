"""What moq_hf 0.2.0 left of a run: `tests/golden/v0_2` is what its code wrote by this script.

    git worktree add /tmp/v0_2 bdda7d6e
    PYTHONPATH=/tmp/v0_2 python tests/helpers/written_by_0_2.py tests/golden/v0_2

The run falls from 6 to 4 bits with stochastic rounding in 12 steps; its checkpoint is of step 4, at 5 bits.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers as hf
from tiny_runs import arguments, new_model, rows
from torch import nn

from moq_hf import MoQCallback

CONFIG = {
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
    "quantize_algo": {"rounding": "stochastic", "scale_refresh": 3},
    "quantize_group_size": 8,
    "seed": 5,
}
STEPS, SAVED = 12, 4


def trainer(folder: Path, config: Any, **more: Any) -> hf.Trainer:
    """A stock Trainer, with the callback unless the config is None."""
    callbacks = [] if config is None else [MoQCallback(config)]
    settings = arguments(folder, max_steps=STEPS, **more)
    return hf.Trainer(new_model(), settings, train_dataset=rows(), callbacks=callbacks)


def digest(model: nn.Module) -> str:
    """SHA-256 of the parameters, in order."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    return found.hexdigest()


def in_float(folder: Path) -> str:
    """The digest of the same run without moq_hf: another one is of a machine that adds in another order."""
    run = trainer(folder, None)
    run.train()
    return digest(run.model)


def main() -> None:
    """Write the folder, the checkpoint, and the digests."""
    target = Path(sys.argv[1])
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = trainer(folder, CONFIG, save_strategy="steps", save_steps=SAVED)
        run.train()
        for source in ("quantized", f"checkpoint-{SAVED}"):
            shutil.copytree(folder / source, target / source, ignore=shutil.ignore_patterns("training_args.bin"))
        digests = {"quantized": digest(run.model), "in_float": in_float(folder / "float")}
    (target / "digests.json").write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
