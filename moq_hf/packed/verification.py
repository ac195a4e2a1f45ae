"""What a packed checkpoint holds, in figures."""

import math
from dataclasses import dataclass
from typing import Any

from ..model.sizes import covered
from ..schedule import FLOAT_BITS
from ..text import table
from .load_check import Proof
from .state import StoredLayer


@dataclass(frozen=True)
class Verification:
    """What `verify_quantized` found in a directory without fault.

    Attributes:
        layers: Each quantized layer by name.
        file_bytes: Size of the weight files together.
        float_bytes: Size of the same tensors in float.
        state: The content of `moq_state.json`.
        others: Count and bytes of the floating-point numbers beside the quantized layers' weights.
        proof: How the folder answered beside the model, when it was saved or now, with `inputs`; None: not tried.
    """

    layers: dict[str, StoredLayer]
    file_bytes: int
    float_bytes: int
    state: dict[str, Any]
    others: tuple[int, int] = (0, 0)
    proof: Proof | None = None

    def table(self) -> str:
        """A line per layer and the totals, for a terminal."""
        head = ("module", "bits", "scales", "stored", "bytes", "before", "max error (steps)")
        rows = [
            (
                name,
                "float" if layer.bits == FLOAT_BITS else str(layer.bits),
                str(math.prod(layer.scales) or "-"),
                layer.stored,
                f"{layer.bytes:,}",
                f"{layer.bytes_before:,}",
                f"{layer.max_error:.3f}",
            )
            for name, layer in self.layers.items()
        ]
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        lines = [
            table([head, *rows], left=(0, 3)),
            "",
            f"{len(self.layers)} quantized layers: {after:,} bytes, {before:,} before ({after / before:.3f}); "
            f"{8 * after / weights:.3f} bits a weight",
            f"all weights: {self.file_bytes:,} bytes, {self.float_bytes:,} before "
            f"({self.file_bytes / self.float_bytes:.3f})",
            f"quantized: {self.coverage()}; mean {self.mean_bits:.2f} bits over the whole model",
        ]
        return "\n".join(lines)

    def coverage(self) -> str:
        """What share of the model's parameters is quantized, in words."""
        return covered(*self.parameters)

    @property
    def has_convolutions(self) -> bool:
        """Whether some of the quantized layers are convolutions, which are not packed."""
        return any(layer.kind == "conv" for layer in self.layers.values())

    @property
    def parameters(self) -> tuple[int, int]:
        """How many parameters of the model are quantized, and how many there are, each counted once."""
        # Folders of earlier versions do not say; their tensors do, but for buffers and PEFT's adapters.
        quantized = sum(math.prod(layer.shape) for layer in self.layers.values())
        counted = self.state.get("parameters") or {"quantized": quantized, "total": quantized + self.others[0]}
        return counted["quantized"], counted["total"]

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model; a parameter that is not quantized has those of its dtype."""
        quantized, total = self.parameters
        bits = sum(
            8 * layer.bytes_before if layer.stored == "float" else math.prod(layer.shape) * layer.bits
            for layer in self.layers.values()
        )
        # Without the weight files nothing says what their dtype is: float32 then.
        count, size = self.others if self.others[0] else (1, 4)
        return (bits + (total - quantized) * 8 * size / count) / total

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the quantized layers' weights, and what they took in float."""
        return (
            sum(layer.bytes for layer in self.layers.values()),
            sum(layer.bytes_before for layer in self.layers.values()),
        )
