"""`verify_quantized`: checks that the files are as they were saved, and hold the weights of a model."""

import copy
import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ..errors import MoQError, listed
from ..lora import is_merged
from ..model.convert import dequantize_model
from ..model.inventory import is_packed
from ..model.sizes import covered, percent
from ..names import adapters, pretrained
from ..schedule import FLOAT_BITS
from ..seams.transformers import never_saved, original_format, tied_parameters
from ..text import megabytes, table
from ..training.samples import Examples
from ..weight_matrix import parameter_of
from ..weight_spec import WeightSpec
from .differences import differences
from .files import ADAPTER, size_of
from .load_check import Proof, has_failed, reference_to, used_tensors
from .reading import read_parts
from .state import proof_in, read_layers


@dataclass(frozen=True, repr=False)
class Verification:
    """A packed checkpoint that is whole; `str` gives a table of it.

    Attributes:
        layers: Each quantized layer by name.
        file_bytes: Size of the weight files together, with those of adapters beside them.
        state: The content of `moq_state.json`.
        proof: How the folder's outputs compared with the model's when it was saved, or
            now if `inputs` are given; None if nothing was compared.
        adapter_bytes: Size of the adapters' files, which stay in float.
    """

    layers: dict[str, WeightSpec]
    file_bytes: int
    state: dict[str, Any]
    proof: Proof | None = None
    adapter_bytes: int = 0

    @property
    def float_bytes(self) -> int:
        """Size of the same tensors in float."""
        return cast(int, self.state["float_bytes"]) + self.adapter_bytes

    @property
    def loads_by_hand(self) -> bool:
        """True if `from_pretrained` does not make the model that was evaluated."""
        return has_failed(self.proof) or cast(bool, self.state["by_hand"])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Verification: {self.summary()}>"

    def table(self) -> str:
        """A line per layer and the totals, for a terminal."""
        return "\n".join([table(self.rows(), left=(0, 2)), "", *self.totals()])

    def rows(self) -> Sequence[tuple[str, ...]]:
        """The heads of the columns, and a row for each layer."""
        rows = [("module", "bits", "stored", "scales", "bytes", "before")]
        for name, layer in self.layers.items():
            bits = "float" if layer.bits == FLOAT_BITS else str(layer.bits)
            bits = bits if layer.format == "int" else layer.format
            scales = str(math.prod(layer.scales) or "-")
            sizes = (f"{layer.bytes:,}", f"{layer.bytes_before:,}")
            rows.append((name, bits, layer.stored, scales, *sizes))
        return rows

    def totals(self) -> list[str]:
        """The sizes of the quantized layers and of all weights, and how much of the model is quantized."""
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        return [
            f"{len(self.layers)} quantized layers: {after:,} bytes, {before:,} before "
            f"({percent(after / before)} of float); {8 * after / weights:.3f} bits a weight",
            f"all weights: {self.file_bytes:,} bytes, {self.float_bytes:,} before "
            f"({percent(self.file_bytes / self.float_bytes)} of float)",
            f"quantized: {self.coverage()}; mean {self.mean_bits:.2f} bits over the whole model",
        ]

    def summary(self) -> str:
        """The form of the folder, how it was proven, and its size, in sentences."""
        form = ""
        proof = f"{self.proof or 'Not verified: nothing was compared'}"
        if self.state["layout"] == "floats":
            form = "Rounded floats, not packed. "
        if self.state["by_hand"]:
            proof = "Not verified: load_state_dict alone loads it"
        elif has_failed(self.proof):
            proof = "NOT what was evaluated, as the warning above says"
        before = megabytes(self.float_bytes).removesuffix(" MB")
        return f"{form}{proof}. {megabytes(self.file_bytes)}, float {before}."

    def verdict(self) -> str:
        """Two lines for a terminal: the files are intact, and how they compared with the model when they were saved."""
        summary = f"{self.proof}." if has_failed(self.proof) else self.summary()
        version = self.state["versions"].get("transformers")
        return (
            "Intact: every tensor is as it was saved, and every weight is one that its bits and scale allow.\n"
            f"Saved with transformers {version}. {summary}"
        )

    def _repr_html_(self) -> str:
        """The summary, and a table that unfolds, for a notebook."""
        layers = f"<details><summary>Layers</summary><pre>{html.escape(self.table())}</pre></details>"
        return f"<p>{html.escape(self.summary())}</p>{layers}"

    def coverage(self) -> str:
        """The share of the model's parameters that is quantized, in words."""
        return covered(*self.parameters)

    @property
    def parameters(self) -> tuple[int, int]:
        """The number of quantized parameters, and that of all parameters of the model, each counted once."""
        counted = self.state["parameters"]
        return counted["quantized"], counted["total"]

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model; parameters that are not quantized count with their dtype."""
        return cast(float, self.state["parameters"]["mean_bits"])

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the quantized layers' weights, now and in float."""
        layers = self.layers.values()
        return sum(layer.bytes for layer in layers), sum(
            layer.bytes_before for layer in layers
        )


def verify_quantized(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    inputs: Examples | None = None,
) -> Verification:
    """Read a packed checkpoint back and prove that each weight is on the grid that it declares.

    Every tensor is compared with the digest taken when it was saved, every code with
    the range of its grid.

    Args:
        directory: What `save_quantized` wrote.
        model: The model that was saved: its weights, as its forward pass uses them,
            must be those in the files.
        inputs: Examples as `save_quantized` takes them: plain `from_pretrained` loads
            the folder, and must give the same outputs.

    Returns:
        The layers with their sizes.

    Raises:
        MoQError: Something is damaged, missing or different, and the text names the
            file and the tensor; or the model cannot answer `inputs`.

    >>> from pathlib import Path
    >>> verify_quantized(Path("a folder that is not there"))
    Traceback (most recent call last):
    moq_hf.errors.MoQError: a folder that is not there is not a directory
    """
    if inputs is not None and model is None:
        raise MoQError("inputs are for the comparison with a model: give the model too")
    saved = recorded(directory)
    folder = Path(directory)
    if model is None:
        for _ in read_parts(folder):
            pass
        return saved
    _compare(folder, model, saved)
    if inputs is None:
        return saved
    proof = reference_to(model, inputs).prove(folder, saved.state["rounds_inputs"])
    if not proof.agrees:
        raise MoQError(f"{folder}: {proof}")
    return replace(saved, proof=proof)


def recorded(directory: str | os.PathLike[str]) -> Verification:
    """A packed checkpoint as `moq_state.json` describes it, without reading its weights.

    Args:
        directory: What `save_quantized` wrote.

    Returns:
        As from `verify_quantized`; `file_bytes` is 0 if there are no files.

    Raises:
        MoQError: The state is missing or damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    beside = sum(
        path.stat().st_size for path in (folder / ADAPTER).rglob("*.safetensors")
    )
    return Verification(
        layers, size_of(folder) + beside, state, proof_in(state), beside
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    scales: dict[str, Tensor] = {}
    if is_packed(model):
        # A plain model does not round inputs.
        packed = pretrained(model).state_dict().items()
        endings = (".input_scale", ".input_zero_point")
        scales = {n: t for n, t in packed if n.endswith(endings)}
        model = dequantize_model(copy.deepcopy(model))
    model = pretrained(model)
    tensors = scales | used_tensors(model, adapters(model, is_merged(model)))
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _compare(folder: Path, model: nn.Module, saved: Verification) -> None:
    """Compare the tensors in the files with those of a model; tensors that loading makes or ties may be missing.

    Raises:
        MoQError: They differ; names the first tensor, or all that are missing.
    """
    expected = weights_of(model)
    if saved.state["names"] is not None:
        # Weights that saving would split have the names of their modules in the files.
        expected |= original_format(pretrained(model), expected)
    parts = ((part.parameter, part.tensor) for part in read_parts(folder))
    missing = []
    for name, what, largest in differences(parts, expected):
        if what != "missing":
            by = f" by up to {largest:.3g}" if what == "value" else ""
            raise MoQError(f"{folder}: {name} differs from the model's{by}")
        missing.append(name)
    # A tensor may be there under another name, or in parts.
    there = {_memory_of(expected[name]) for name in expected.keys() - missing}
    base = pretrained(model)
    wanted = base.state_dict().keys() - tied_parameters(base).keys() - never_saved(base)
    # The files may hold experts matrix by matrix.
    wanted -= {parameter_of(name, layer.kind) for name, layer in saved.layers.items()}
    lacking = [
        name
        for name in missing
        if name in wanted and _memory_of(expected[name]) not in there
    ]
    if lacking:
        raise MoQError(f"{folder} lacks tensors of the model: {listed(lacking)}")


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
