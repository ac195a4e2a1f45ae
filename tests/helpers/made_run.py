"""A finished run whose numbers are made up."""

import json
import random
from pathlib import Path
from typing import Any

from moq_hf.config import MoQConfig
from moq_hf.schedule import PrecisionSchedule
from moq_hf.training.resume import STATE_VERSION
from moq_hf.version import __version__

BLOCKS = [f"bert.encoder.layer.{index}" for index in range(12)] + ["bert.pooler.dense"]
CONFIG = {
    "quantize_bits": {"start_bits": 12, "target_bits": 4},
    "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 10, "deadline": 0.5},
    "eigenvalue": {"enabled": True},
}


def make_run(folder: Path, config: Any = CONFIG, steps: int = 345, evaluations: bool = True) -> dict[str, Any]:
    """Write the files of a finished run whose losses and eigenvalues are made up; give its state."""
    config = MoQConfig.from_dict(config)
    rng = random.Random(0)
    schedule = PrecisionSchedule(config, BLOCKS, steps)
    log: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        measured = {name: min(1.0, 0.08 * k * rng.uniform(0.7, 1.3)) for k, name in enumerate(BLOCKS[:12])}
        switches = schedule.advance(measured if config.eigenvalue.enabled else {})
        bits = sum(schedule.bits.values()) / len(BLOCKS)
        entry = {"step": step, "loss": 0.7 / (1 + step / 60), "moq/mean_bits": bits, "moq/size_mb": 22.0 + 2.6 * bits}
        if switches:
            entry |= {f"moq/bits/{name}": value for name, value in schedule.bits.items()}
            entry |= {f"moq/eigenvalue/{s.block}": s.eigenvalue for s in switches if s.eigenvalue is not None}
        if switches or step % 5 == 0:
            log.append(entry)
        if evaluations and step % 69 == 0:
            log.append(
                {"step": step, "eval_loss": 0.6, "eval_f1": 0.8 + step / 5000, "eval_accuracy": 0.7 + step / 5000}
            )
    measures = {"eigenvalues": {}, "spent": 0.0, "products": 0.0, "rows": 0}
    saved = {
        "version": STATE_VERSION,
        "moq_hf": __version__,
        "config": config.to_dict(),
        "schedule": schedule.state_dict(),
        "ratios": {},
        "input_ranges": {},
        "history": [],
        "float_size_mb": 105.2,
        "sensitivity": measures if config.eigenvalue.enabled else None,
        "choice": None,
        "handed_dtype": None,
    }
    state = {
        "global_step": steps,
        "log_history": log,
        "stateful_callbacks": {"MoQCallback": {"args": {}, "attributes": {"saved": saved}}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return state
