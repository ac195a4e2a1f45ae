"""The folder of an export: what it holds, and that it appears whole or not at all."""

import copy
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import MoQError
from .loading import Checkpoint
from .proof import Proof

REPORT_NAME = "moq_export.json"


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        directory: Where.
        files: The file of each flavor.
        bytes: Of each flavor's files; "float checkpoint" is what the float weights take.
        layers: How each quantized layer is stored in each flavor: "int4", "int8", "uint8", "float".
        sentences: How many were compared; of a model of pictures, how many pictures.
        checkpoint_metrics: Of the checkpoint in PyTorch.
        proofs: By flavor.
        activation_bits: Of the int8 flavor.
        compared: What was: "sentences" or "pictures".
        activations: Of the flavors that round them: how, and for which CPUs.
    """

    directory: Path
    files: Mapping[str, str]
    bytes: Mapping[str, int]
    layers: Mapping[str, Mapping[str, str]]
    sentences: int
    checkpoint_metrics: Mapping[str, float]
    proofs: Mapping[str, Proof]
    activation_bits: int
    compared: str = "sentences"
    activations: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """A line per flavor, for a terminal."""
        before = self.bytes["float checkpoint"]
        names = list(self.checkpoint_metrics)
        rows = [("flavor", "file", "bytes", "of float", "largest difference", "agreement", *names)]
        rows += [("checkpoint", "", "", "", "", "", *(f"{self.checkpoint_metrics[name]:.4f}" for name in names))]
        for flavor, proof in self.proofs.items():
            size = self.bytes[flavor]
            agreement = "-" if proof.agreement is None else f"{proof.agreement:.4f}"
            head = (flavor, self.files[flavor], f"{size:,}", f"{size / before:.3f}")
            tail = (f"{proof.metrics[name]:.4f}" for name in names)
            rows += [(*head, f"{proof.largest_difference:.2e}", agreement, *tail)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", *(f"{flavor}: activations {words}" for flavor, words in self.activations.items())]
        return "\n".join([*lines, f"{self.sentences} {self.compared} compared; {self.directory}"])

    def report(self) -> dict[str, Any]:
        """What `moq_export.json` holds of it, in JSON types."""
        return {
            "activation_bits": self.activation_bits,
            "activations": self.activations,
            "sentences": self.sentences,
            "bytes": self.bytes,
            "checkpoint_metrics": self.checkpoint_metrics,
            "proofs": {flavor: asdict(proof) for flavor, proof in self.proofs.items()},
            "layers": self.layers,
        }


def target_of(directory: Path, out: str | os.PathLike[str], flavors: Collection[str]) -> Path:
    """The folder to write to, if an export into it can lose nobody else's file.

    Args:
        directory: The checkpoint.
        out: A new folder, an empty one, or that of an earlier export.
        flavors: All that an export of this kind may hold.

    Raises:
        MoQError: It is the checkpoint's, or holds something else.
    """
    target = Path(out).resolve()
    if target == directory.resolve() or target.is_file():
        raise MoQError(f"{out} must be another folder than the checkpoint's, or a new one")
    if not target.exists() or not any(target.iterdir()):
        return target
    try:
        report = json.loads((target / REPORT_NAME).read_text(encoding="utf-8"))
        found = set(report["proofs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = set()
    if not found or found - set(flavors):
        raise MoQError(
            f"{target} is not empty and has no {REPORT_NAME} of a finished export, so what it holds may not be ours to "
            "replace; give a new or an empty folder"
        )
    if any(target.glob("*.safetensors")):
        raise MoQError(f"{target} holds another model, whose config.json would be replaced; give a new folder")
    return target


@contextmanager
def staged(target: Path, names: Collection[str]) -> Iterator[Path]:
    """A folder beside `target` to write to; where nothing is raised, it becomes `target` at the end.

    Args:
        target: As `target_of` gave it.
        names: All files that an export of this kind may leave, to be removed first.

    Raises:
        MoQError: A file cannot be written.
    """
    staging = target.parent / f".{target.name}.exporting"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        publish(staging, target, names)
    except OSError as error:
        raise MoQError(f"cannot write the export to {target}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, target: Path, names: Collection[str]) -> None:
    """Make `staging` the target; into a folder that is there, the report is moved last."""
    if not target.exists():
        staging.rename(target)
        return
    # A folder without the report is one that was left in the middle of this.
    for name in (REPORT_NAME, *names):
        (target / name).unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == REPORT_NAME):
        path.replace(target / path.name)


def write_rest(folder: Path, checkpoint: Checkpoint, report: Mapping[str, Any]) -> None:
    """The model's config, without its quantization, its tokenizer or what prepares its pictures, and the report."""
    config = copy.deepcopy(checkpoint.model.config)
    config.__dict__.pop("quantization_config", None)
    config.save_pretrained(folder)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save_pretrained(folder)
    elif checkpoint.processor is not None:
        shutil.copy(checkpoint.processor, folder)
    (folder / REPORT_NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
