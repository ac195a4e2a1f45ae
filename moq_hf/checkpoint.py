"""Packed checkpoints: how they are written, so that plain `from_pretrained` loads them, and how they are verified.

A packed checkpoint is an ordinary transformers folder. Layers of 1 to 8 bits are packed integers in the format of
compressed-tensors, written with that library, so that a process which never heard of moq_hf computes the same, bit for
bit. Layers above 8 bits are dense floats on their grid. `moq_state.json` beside them holds the config, the bits of each
layer, the history of switches, and a digest of every tensor.

How the grids of `quantizer` are told to compressed-tensors, (code - zero) * scale with codes from -2^(b-1):

| grid | strategy | zero point |
| --- | --- | --- |
| symmetric (ternary too), a scale per row | channel | none |
| symmetric, a scale per group in a row | group | none |
| symmetric, row blocks | block of whole rows: 4 bytes per block, not per row | none |
| asymmetric | block, whatever the groups: transformers cannot load packed zero points | int8, one per scale |
| binary | block; codes -1 and 0, twice the scale | -1/2 |

That is the layout "packed": the modules hold packed weights after loading, and the model's first forward pass unpacks
them. It does not fit models whose `_init_weights` reaches into other weights (T5), and those whose parts are called by
themselves (the encoder by `generate` of BART, the towers of CLIP). Theirs is "unpacked": unpacked while loading
(`dequantize`), which knows one scheme for all layers: strategy channel or group, and as many bits as the largest layer
has. Where neither computes what the model did, the layout is "floats": ordinary weights, on their grid.

Models with `Conv1D` layers (GPT-2), which compressed-tensors does not know as modules. Their weights lie in the
file as in the model, `[in_features, out_features]`, so that each scale is one of columns:

| grid | strategy | scales, and zero points in int8 |
| --- | --- | --- |
| a scale per row, or row blocks | tensor: loading multiplies with whatever can be broadcast | [1, out_features] |
| a scale per group in a row | block, a column wide | [in_features / size, out_features] |

An `nn.Linear` in such a model is packed in the first case and dense in the second, since its blocks lie across.
"""

import base64
import copy
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import quantizer
from .config import MoQError, __version__, show
from .controller import MoQController
from .processes import is_sharded, named_modules, uncompiled, without_fsdp
from .proof import ADAPTER, Answers, Proof, quiet
from .quant_linear import (
    QuantConv1D,
    QuantEmbedding,
    QuantLayer,
    check_finite,
    dequantize_model,
    is_packed,
    quant_embeddings,
    quant_layers,
)
from .reading import Entry, read_json
from .schedule import FLOAT_BITS
from .selection import adapters, is_linear, plain_name, shared_weights, without_peft
from .sizes import ModelSizes, covered

logger = logging.getLogger(__name__)

STATE_NAME = "moq_state.json"
MAX_PACKED_BITS = 8
_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
# What would make transformers load an older model, or put its adapters, into a new one.
_OF_ANOTHER = ("config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_Value = TypeVar("_Value")
Layout = Literal["packed", "unpacked", "floats"]
_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class StoredLayer:
    """How one quantized layer lies in a packed checkpoint.

    Attributes:
        kind: "linear", "conv1d" or "embedding".
        bits: 1 to 16, or 32 for a layer that was not quantized yet.
        stored: "packed" (bits per weight), "int8" (one byte per weight), "dense" (floats on the grid) or "float".
        shape: Rows and columns of the weight as it is quantized; a conv1d has its transpose in the file.
        scales: Rows and columns of the scale; [0, 0] for float.
        symmetric: Whether the grid is.
        bytes: What the weight takes in the file: codes, scales and zero points.
        bytes_before: What the float weight took.
        max_error: Largest distance of a float weight from its stored value, in quantization steps.
        group: Name in the config groups of compressed-tensors; None if dense or float.
        grid: Scales and zero points of a dense layer, base64 of float32 and int32, else None.
    """

    kind: str
    bits: int
    stored: str
    shape: tuple[int, int]
    scales: tuple[int, int]
    symmetric: bool
    bytes: int
    bytes_before: int
    max_error: float
    group: str | None = None
    grid: tuple[str, str | None] | None = None


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
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 3) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [head, *rows]
        ]
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        lines += [
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
    def parameters(self) -> tuple[int, int]:
        """How many parameters of the model are quantized, and how many there are, each counted once."""
        # Folders of earlier versions do not tell; their tensors do, but for buffers and PEFT's adapters.
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
        # Without the weight files nothing tells their dtype: float32 then.
        count, size = self.others if self.others[0] else (1, 4)
        return (bits + (total - quantized) * 8 * size / count) / total

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the quantized layers' weights, and what they took in float."""
        return (
            sum(layer.bytes for layer in self.layers.values()),
            sum(layer.bytes_before for layer in self.layers.values()),
        )


def write_packed(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Any] | Answers | None = None,
    layout: Layout | None = None,
    **saved: Any,
) -> "Verification":
    """What `save_quantized` does, but for the model card; same arguments and errors. Gives what was written."""
    answers = inputs if isinstance(inputs, Answers) or inputs is None else Answers(model, inputs)
    saving = _Saving(model, directory, **saved)
    saving.check()
    layouts = [layout] if layout is not None else saving.layouts()
    if answers is None:
        del layouts[1:]
    return saving.save(layouts, answers)


def write_floats(model: nn.Module, directory: str | os.PathLike[str], reason: str, **saved: Any) -> "Verification":
    """Write any model as floats on their grid: what is left to do for one that cannot be packed.

    The tensors lie in `model.safetensors` under their names in the state dict, for `load_state_dict`. A model of
    transformers has its `config.json` beside them; where its class allows it, `from_pretrained` loads the folder.

    Args:
        model: With quantized layers.
        directory: Where to.
        reason: Why it is not packed, for `moq_state.json`.
        **saved: What goes with the model: the keyword arguments that `save_quantized` has for it.

    Returns:
        What was written.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    return _Saving(model, directory, **saved).save(["floats"], None, reason=reason, by_hand=True)


class _Saving:
    """One model on its way into a folder."""

    def __init__(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        *,
        processing_class: Any = None,
        controller: MoQController | None = None,
        metrics: Mapping[str, Any] | None = None,
        float_metrics: Mapping[str, Any] | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
    ) -> None:
        self.target = Path(directory).resolve()
        self.whole_model = uncompiled(model)
        self.model: Any = without_peft(self.whole_model)
        self.added = adapters(self.model)
        self.quantized: dict[str, QuantLayer] = {**quant_layers(self.model), **quant_embeddings(self.model)}
        self.layers = _plain(self.quantized, self.added)
        self.processing_class, self.controller = processing_class, controller
        self.metrics = {"metrics": clean_metrics(metrics or {}), "float_metrics": clean_metrics(float_metrics or {})}
        self.state_dict, self.max_shard_size = state_dict, max_shard_size

    def check(self) -> None:
        _check_model(self.model, self.quantized, self.target, self.state_dict is None)

    def layouts(self) -> list[Layout]:
        """Those that transformers can load, the best one first; the last one is right for every model."""
        plan = _Plan(self.model, self.layers, "packed")
        packed = [name for name, layer in self.layers.items() if plan.is_packed(layer)]
        if plan.has_conv1d or _parts_are_called(self.model) or _init_reaches_into(self.model, packed):
            return ["unpacked", "floats"]
        return ["packed", "unpacked", "floats"]

    def save(
        self, layouts: list[Layout], answers: Answers | None, *, reason: str | None = None, by_hand: bool = False
    ) -> "Verification":
        """Write the first layout that agrees with the answers, if there are any, and else the last one."""
        target = self.target
        # Beside what does not exist yet, so that it appears whole; inside what does, perhaps a file system of its own.
        staging = target / ".saving" if target.exists() else target.parent / f".{target.name}.saving"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for layout in layouts:
                # Left by a save that was killed, or by the layout before.
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                plan = self._write(staging, layout, by_hand)
                proof = None if answers is None else answers.prove(staging)
                if proof is None or proof.agrees is not False:
                    break
                # What is wrong with every layout is said once.
                if reason is None:
                    reason = f"{layout}: {proof.reason}"
                elif str(proof.reason) not in reason:
                    reason = f"{reason}; {layout}: {proof.reason}"
            found = self._write_state(staging, layout, plan, proof, reason, by_hand)
            _publish(staging, target)
        except (OSError, SafetensorError) as error:
            raise MoQError(f"cannot write the packed model to {target}: {_text(error)}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if layout != "floats":
            _warn_of_dense(plan.stored)
        if proof is not None and proof.agrees is False:
            logger.warning("moq_hf: %s: what is written does not compute what was evaluated: %s", target, proof.reason)
        elif reason is not None:
            logger.warning(
                "moq_hf: %s holds %s: %s",
                target,
                "floats on the grid, not packed" if layout == "floats" else "weights that are unpacked while loading",
                reason,
            )
        return found

    def _tensors(self) -> dict[str, Tensor]:
        path = next(name for name, module in self.whole_model.named_modules() if module is self.model)
        given = {name.removeprefix(f"{path}."): tensor for name, tensor in (self.state_dict or {}).items()}
        return _plain(given or self.model.state_dict(), self.added)

    def _write(self, folder: Path, layout: Layout, by_hand: bool) -> "_Plan":
        tensors = self._tensors()
        plan = _Plan(self.model, self.layers, layout)
        for name, layer in self.layers.items():
            plan.stored[name] = plan.store(name, layer, tensors)
        with quiet():
            if by_hand:
                _write_by_hand(folder, self.whole_model, self.model, tensors, self.processing_class)
            else:
                _write(folder, self.model, tensors, plan, self.processing_class, self.max_shard_size)
                if self.whole_model is not self.model:
                    _write_adapter(folder / ADAPTER, self.whole_model, self.state_dict)
        return plan

    def _write_state(
        self, folder: Path, layout: Layout, plan: "_Plan", proof: Proof | None, reason: str | None, by_hand: bool
    ) -> "Verification":
        state = _state(self.layers, plan.stored, self.controller) | self.metrics
        if proof is not None and proof.reason is not None:
            proof = replace(proof, reason=_without_paths(proof.reason))
        state |= {"layout": layout, "reason": None if reason is None else _without_paths(reason)}
        state["proof"] = None if proof is None else proof.to_dict()
        # Nobody's `save_pretrained` wrote it.
        state["by_hand"] = by_hand
        sizes = ModelSizes(self.whole_model, self.quantized)
        state["parameters"] = {"total": sizes.total, "quantized": sizes.quantized}
        state["tensors"] = {name: _digest(tensor) for name, tensor in _tensors(folder)}
        config = folder / _CONFIG
        state["config_json"] = _sha256(config.read_bytes()) if config.exists() else None
        _write_state(folder, state)
        return verify_quantized(folder)


def verify_quantized(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Verification:
    """Read a packed checkpoint back and prove that each weight is on the grid that it declares.

    Every tensor is compared with the digest taken when it was saved, every code with the range of its grid.

    Args:
        directory: What `save_quantized` wrote.
        model: The model that was saved: its weights, as its forward pass uses them, must be those in the files.
        inputs: A batch as the model's forward pass takes it: plain `from_pretrained` loads the folder, and its answers
            must be the model's.

    Returns:
        The layers with their sizes.

    Raises:
        MoQError: Something is damaged, missing or different; names the file and the tensor.
    """
    folder = Path(directory)
    state, layers = _recorded(folder)
    # A model of a class of its own has none.
    path = folder / _CONFIG
    config = Entry({}, str(path)) if state["config_json"] is None else _read_json(path)
    if state["config_json"] is not None and _sha256(path.read_bytes()) != state["config_json"]:
        raise MoQError(f"{path} is not as it was saved")
    expected, found = dict(state["tensors"]), set()
    values: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    groups = _groups(config, layers)
    compared = _weights_of(model) if model is not None else {}
    float_bytes = sum(layer.bytes_before for layer in layers.values())
    others, others_bytes = 0, 0
    try:
        for name, tensor in _tensors(folder):
            if name not in expected:
                raise MoQError(f"{folder}: tensor {name} was not there when it was saved")
            if _digest(tensor) != expected[name]:
                raise MoQError(f"{folder}: tensor {name} is damaged")
            found.add(name)
            owner, _, part = name.rpartition(".")
            if part == "weight_packed" and owner not in layers:
                raise MoQError(f"{folder / STATE_NAME}: layers.{owner} is missing, whose packed weight there is")
            if owner in values and part.startswith("weight"):
                values[owner][part] = tensor
            else:
                float_bytes += tensor.nbytes
                if tensor.is_floating_point():
                    others, others_bytes = others + tensor.numel(), others_bytes + tensor.nbytes
                if model is not None and not _same(tensor, compared.get(name)):
                    raise MoQError(f"{folder}: tensor {name} differs from the model's")
            if owner not in values:
                continue
            layer = layers[owner]
            group = groups[layer.group] if layer.group is not None else {}
            if _is_complete(layer, values[owner], group.get("weights", {})):
                weight = _check_grid(f"{folder}: {owner}", layer, values.pop(owner), group)
                if model is not None and not _same(weight, compared.get(f"{owner}.weight")):
                    raise MoQError(f"{folder}: {owner}.weight differs from the model's")
    except MoQError:
        raise
    except _ERRORS as error:
        raise MoQError(f"{folder}: the weights cannot be read: {_text(error)}") from error
    missing = sorted(set(expected) - found)
    if missing or values:
        raise MoQError(f"{folder}: missing from the weights: {', '.join(missing or values)}")
    size = sum(path.stat().st_size for path in _weight_files(folder))
    saved = Entry(state, str(folder / STATE_NAME)).get("proof")
    proof = None if saved.is_null else _proof_of(saved)
    if inputs is not None:
        if model is None:
            raise MoQError("inputs are for the comparison with a model: give the model too")
        proof = Answers(model, inputs).prove(folder)
        if not proof.agrees:
            raise MoQError(f"{folder}: {proof}")
    return Verification(layers, size, float_bytes, state, (others, others_bytes), proof)


class _Plan:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up."""

    def __init__(self, model: nn.Module, layers: Mapping[str, QuantLayer], layout: Layout) -> None:
        self.layout = layout
        self.groups: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, StoredLayer] = {}
        self.modules = set(_plain(dict(named_modules(model)), adapters(model)))
        self.prefix = str(getattr(model, "base_model_prefix", ""))
        self.is_base = bool(self.prefix) and not hasattr(model, self.prefix)
        self.has_conv1d = any(isinstance(layer, QuantConv1D) for layer in layers.values())
        packed = {name: layer.moq.bits for name, layer in layers.items() if self.is_packed(layer)}
        self.at_load = layout == "unpacked"
        # Binary codes, -1 and 1, do not fit into one symmetric bit.
        self.container = max([2, *packed.values()])
        self.dtypes = {str(layer.weight.dtype) for name, layer in layers.items() if name in packed}

    def store(self, name: str, layer: QuantLayer, tensors: dict[str, Tensor]) -> StoredLayer:
        """Put what stands for the layer's weight in the file into the place of its float weight in `tensors`."""
        key, state = f"{name}.weight", layer.moq
        weight = _turned(tensors.pop(key).detach(), layer)
        rows, columns = weight.shape
        common: dict[str, Any] = {
            "kind": _kind(layer),
            "bits": state.bits,
            "shape": (rows, columns),
            "symmetric": state.options["symmetric"],
            "bytes_before": weight.nbytes,
        }
        arguments = {**state.options, "ratio": state.ratio, "step": state.step}
        if state.bits == FLOAT_BITS or state.blend:
            if state.bits != FLOAT_BITS:
                weight = quantizer.fake_quantize(weight, state.bits, blend=state.blend, **arguments)
            tensors[key] = _turned(weight, layer)
            return StoredLayer(**common, stored="float", scales=(0, 0), bytes=weight.nbytes, max_error=0.0)
        try:
            codes, scale, zero = quantizer.quantize(weight, state.bits, **arguments)
        except ValueError as error:
            raise MoQError(f"{key} cannot be quantized: {error}") from error
        values = quantizer.Quantized(codes.cpu(), scale.cpu(), None if zero is None else zero.cpu())
        common |= {"scales": tuple(values.scale.shape), "max_error": _max_error(weight.cpu(), values)}
        is_packed = self.is_packed(layer)
        if not is_packed and (self.layout != "packed" or not isinstance(layer, QuantEmbedding)):
            tensors[key] = _turned(quantizer.dequantize(*values, dtype=weight.dtype), layer)
            grid = (_text64(values.scale), None if values.zero_point is None else _text64(values.zero_point))
            return StoredLayer(**common, stored="dense", bytes=weight.nbytes, grid=grid)
        if is_packed:
            scheme, parts = self._pack(values, layer)
        else:
            scheme, parts = _bytes_of(values, state.bits)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return StoredLayer(
            **common,
            stored="packed" if is_packed else "int8",
            bytes=sum(tensor.nbytes for tensor in parts.values()),
            group=self._group(name, scheme, "pack-quantized" if is_packed else "int-quantized"),
        )

    def is_packed(self, layer: QuantLayer) -> bool:
        if self.layout == "floats" or isinstance(layer, QuantEmbedding):
            return False
        if layer.moq.bits > MAX_PACKED_BITS or layer.moq.blend:
            return False
        blocks_lie_across = self.has_conv1d and layer.moq.options["group_size"] is not None
        return isinstance(layer, QuantConv1D) or not blocks_lie_across

    def _pack(self, values: quantizer.Quantized, layer: QuantLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        codes, scale, zero = values
        rows, columns = codes.shape
        size = layer.moq.options["group_size"]
        width = self.container if self.at_load else layer.moq.bits
        scheme: dict[str, Any] = {"num_bits": width, "type": "int", "symmetric": zero is None, "dynamic": False}
        if zero is not None:
            codes, zero = codes - 2 ** (width - 1), (zero - 2 ** (width - 1)).to(torch.int8)
        if self.at_load and size is None:
            repeats = rows // scale.shape[0]
            scale = scale.repeat_interleave(repeats, 0)
            zero = None if zero is None else zero.repeat_interleave(repeats, 0)
        if self.at_load and not self.has_conv1d and zero is not None:
            zero = pack_to_int32(zero, width, packed_dim=0)
        if width == 1:
            codes, scale, zero = (codes - 1) // 2, scale * 2, torch.full_like(scale, -0.5)
            scheme |= {"symmetric": False, "zp_dtype": "torch.float32"}
        if self.has_conv1d:
            scheme |= {"strategy": "tensor"} if size is None else {"strategy": "block", "block_structure": [size, 1]}
        elif size is not None and (zero is None or self.at_load):
            scheme |= {"strategy": "group", "group_size": size}
        elif scale.shape[0] == rows and (zero is None or self.at_load):
            scheme |= {"strategy": "channel"}
        else:
            block = [rows // scale.shape[0], columns // scale.shape[1]]
            scheme |= {"strategy": "block", "block_structure": block}
        codes = _turned(codes, layer)
        parts = {
            "weight_packed": pack_to_int32(codes.to(torch.int8), width),
            "weight_scale": _turned(scale, layer),
            "weight_shape": torch.tensor(codes.shape, device="cpu"),
        }
        if zero is not None:
            parts["weight_zero_point"] = _turned(zero, layer)
        return scheme, parts

    def _group(self, name: str, scheme: dict[str, Any], layout: str) -> str:
        same = [g for g, c in self.groups.items() if c["weights"] == scheme and c["format"] == layout]
        group = same[0] if same else f"group_{len(self.groups)}"
        self.groups.setdefault(group, {"targets": [], "weights": scheme, "format": layout})
        self.groups[group]["targets"].append(self._target(name))
        return group

    def _target(self, name: str) -> str:
        """Matches the module in the model that was saved, and in its base model or one with another head."""
        prefix = f"{self.prefix}."
        bare = name.removeprefix(prefix)
        other = prefix + name if self.is_base else bare
        if not self.prefix or other == name or other in self.modules:
            return name
        return f"re:^(?:{re.escape(prefix)})?{re.escape(bare)}$"

    def config(self, ignore: list[str]) -> dict[str, Any] | None:
        """The quantization config for `config.json`; None if every layer is dense."""
        if not self.groups:
            return None
        formats = {group["format"] for group in self.groups.values()}
        return {
            "config_groups": self.groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ignore,
        }


def _kind(layer: QuantLayer) -> str:
    if isinstance(layer, QuantEmbedding):
        return "embedding"
    return "conv1d" if isinstance(layer, QuantConv1D) else "linear"


def _turned(tensor: Tensor, layer: QuantLayer | StoredLayer) -> Tensor:
    """From the layout in the file to that in which a layer is quantized, or back."""
    kind = layer.kind if isinstance(layer, StoredLayer) else _kind(layer)
    return tensor.t().contiguous() if kind == "conv1d" else tensor.contiguous()


def _bytes_of(values: quantizer.Quantized, bits: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An embedding table, a byte a weight: transformers cannot load a packed one."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    return scheme, {"weight": values.codes.to(torch.int8), "weight_scale": values.scale}


def _parts_are_called(model: Any) -> bool:
    """Whether users call parts of the model by themselves, past the first forward pass that would unpack all of it."""
    config = model.config
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None))


def _init_reaches_into(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether the model's class initializes modules through the weights of others, which packed ones do not have.

    Raises:
        MoQError: transformers cannot make a model of the class, as `from_pretrained` would have to.
    """
    cls, names = without_fsdp(type(model)), list(packed)
    try:
        with torch.device("meta"):
            shell = cast(Any, cls)(copy.deepcopy(cast(Any, model).config))
        for name in names:
            del shell.get_submodule(name).weight
    except Exception as error:
        raise MoQError(
            f"from_pretrained could not load it, since {cls.__name__}(config) does not make such a model: "
            f"{_text(error)}"
        ) from error
    for module in shell.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    try:
        shell.initialize_weights()
    except AttributeError:
        return True
    return False


def _check_model(model: nn.Module, layers: Mapping[str, QuantLayer], target: Path, has_weights: bool) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise MoQError(f"only models of transformers can be saved packed, got {type(model).__name__}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise MoQError("a model with add_adapter saves its adapters alone: use peft.get_peft_model to have it packed")
    if not layers:
        raise MoQError("the model has no quantized layer: call quantize_model first, or train it with MoQ")
    if target.exists() and not target.is_dir():
        raise MoQError(f"{target} is a file, not a directory")
    sharing = shared_weights(model, layers)
    if sharing:
        raise MoQError(f"{'; '.join(sharing)}: a shared weight cannot be packed; leave its layers in full precision")
    # FSDP2's tensors, and what ZeRO leaves of a weight.
    sharded = [n for n, layer in layers.items() if is_sharded(layer.weight) or not layer.weight.numel()]
    if sharded and has_weights:
        raise MoQError(
            f"the weights of {', '.join(sharded)} are spread over processes: save with MoQTrainer.save_model"
        )
    if not sharded:
        for layer in layers.values():
            layer.quantized_weight()
        check_finite(layers)


def _max_error(weight: Tensor, values: quantizer.Quantized) -> float:
    rows, columns = values.scale.shape
    error = (weight.float() - quantizer.dequantize(*values)).abs()
    tiles = error.view(rows, weight.shape[0] // rows, columns, -1).amax((1, 3))
    return float((tiles / values.scale).nan_to_num(0.0).max())


def _write(
    folder: Path, model: Any, tensors: dict[str, Tensor], plan: _Plan, processing_class: Any, shard: int | str
) -> None:
    # The names of the modules in the file: renaming rules for old checkpoints do not know packed tensors.
    model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=shard, save_original_format=False)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    modules = _plain(dict(named_modules(model)), adapters(model))
    linears = [name for name, module in modules.items() if is_linear(module)]
    packed = {key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")}
    config = plan.config([name for name in linears if name not in packed])
    if config is None:
        return
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig

    ModelCompressor(QuantizationConfig.model_validate(config)).update_config(str(folder))
    path = folder / _CONFIG
    document = json.loads(path.read_text(encoding="utf-8"))
    # Scales are made in the model's dtype: a narrower one would round them.
    document["dtype"] = "float32"
    if plan.at_load:
        document["quantization_config"]["dequantize"] = True
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plan.dtypes - {"torch.float32"}:
        logger.warning(
            "moq_hf: the weights are %s; the packed model is a float32 one, so its results differ by the rounding of "
            "that dtype",
            ", ".join(sorted(plan.dtypes)),
        )


def _write_by_hand(
    folder: Path, whole_model: nn.Module, model: Any, tensors: Mapping[str, Tensor], processing_class: Any
) -> None:
    """The state dict in a file, whatever the model is: each tensor by itself, as no two may share memory there."""
    apart = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items() if isinstance(t, Tensor)}
    save_file(apart, folder / _SINGLE, metadata={"format": "pt"})
    left = [f"{name} (no tensor)" for name in tensors.keys() - apart.keys()]
    if whole_model is not model:
        _write_adapter(folder / ADAPTER, whole_model, None)
    for part in (getattr(model, "config", None), processing_class):
        try:
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # The weights are what must not be lost.
        except Exception as error:
            left.append(f"{type(part).__name__} ({_text(error)})")
            if part is not processing_class:
                (folder / _CONFIG).unlink(missing_ok=True)
    if left:
        logger.warning("moq_hf: not saved beside the weights: %s", ", ".join(left))


def _write_adapter(folder: Path, model: Any, state_dict: Mapping[str, Tensor] | None) -> None:
    """PEFT's own files, but for a path on this machine and the card that has it."""
    model.save_pretrained(folder, state_dict=state_dict)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        document["base_model_name_or_path"] = hub_id(document.get("base_model_name_or_path"))
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _state(
    layers: Mapping[str, QuantLayer],
    stored: Mapping[str, StoredLayer],
    controller: MoQController | None,
) -> dict[str, Any]:
    import compressed_tensors
    import transformers

    versions = {
        "moq_hf": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "compressed_tensors": compressed_tensors.__version__,
        "python": platform.python_version(),
    }
    config = next(iter(layers.values())).moq.config
    return {
        "format": 1,
        "versions": versions,
        "config": None if config is None else shareable(config.to_dict()),
        "step": None if controller is None else controller.schedule.steps,
        "history": [] if controller is None else [switch._asdict() for switch in controller.history],
        "layers": {name: asdict(layer) for name, layer in stored.items()},
    }


def shareable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the path of a teacher on this machine; its Hub id stays."""
    return {**config, "distillation": {**config["distillation"], "teacher": hub_id(config["distillation"]["teacher"])}}


def _without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.:/])(/[^\s/'\",;:()]+){2,}/?", "...", text)


def hub_id(name: str | None) -> str | None:
    """The Hub id that a model was loaded from, or None: a path of one's machine is nobody else's business."""
    name = name or ""
    return name if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not Path(name).exists() else None


def record_metrics(
    directory: str | os.PathLike[str], metrics: Mapping[str, Any], float_metrics: Mapping[str, Any] | None = None
) -> None:
    """Put figures that came after saving into the `moq_state.json` of a packed checkpoint.

    Args:
        directory: What `save_quantized` wrote.
        metrics: As for `save_quantized`; takes the place of what is there.
        float_metrics: As for `save_quantized`; None leaves what is there.

    Raises:
        MoQError: There is no such file, or it is damaged or cannot be written.
    """
    folder = Path(directory)
    state = _read_state(folder)
    state["metrics"] = clean_metrics(metrics)
    if float_metrics is not None:
        state["float_metrics"] = clean_metrics(float_metrics)
    try:
        _write_state(folder, state)
    except OSError as error:
        raise MoQError(f"cannot write {folder / STATE_NAME}: {error}") from error


def clean_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON has them: finite numbers as they are, others as null, anything else as text."""
    clean: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, str)) or value is None:
            clean[name] = value
            continue
        try:
            clean[name] = float(value) if math.isfinite(float(value)) else None
        except (TypeError, ValueError):
            clean[name] = str(value)
    return clean


def _publish(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # Nothing loads without one of these, while a class of transformers makes do without a config. So they go first, and
    # that of the new model comes last.
    entries = (_SINGLE, _INDEX)
    for name in entries:
        (target / name).unlink(missing_ok=True)
    for path in list(target.iterdir()):
        if path.is_file() and (_WEIGHTS.fullmatch(path.name) or path.name in _OF_ANOTHER):
            path.unlink()
    shutil.rmtree(target / ADAPTER, ignore_errors=True)
    for path in sorted(staging.rglob("*"), key=lambda path: path.name in entries):
        if path.is_file():
            place = target / path.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def _warn_of_dense(stored: Mapping[str, StoredLayer]) -> None:
    dense = {name: layer for name, layer in stored.items() if layer.stored in ("dense", "float")}
    if dense:
        named = ", ".join(
            f"{name} ({'float' if layer.stored == 'float' else f'{layer.bits} bits'})" for name, layer in dense.items()
        )
        logger.warning(
            "moq_hf: these layers are saved as floats, at full size, since only 1 to %d bits can be packed: %s",
            MAX_PACKED_BITS,
            named,
        )


# Reading back.

_UNFINISHED = "no packed checkpoint, or one whose saving was interrupted"


def _weight_files(folder: Path) -> list[Path]:
    # As transformers looks for them.
    single = folder / _SINGLE
    if single.exists() or not (folder / _INDEX).exists():
        return [single]
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    files = _read_json(folder / _INDEX)["weight_map"].mapping()
    for entry in files.values():
        # A name with a path would have files read that are not the model's.
        if not _WEIGHTS.fullmatch(entry.text()):
            raise entry.fault("the name of a file of weights in this folder")
    return {name: entry.text() for name, entry in files.items()}


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = _weight_files(folder)
    index = _weight_map(folder) if files[0].name != _SINGLE else None
    for path in files:
        if not path.is_file():
            raise MoQError(f"{path} is missing: {_UNFINISHED}")
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if index is not None and names != {name for name, place in index.items() if place == path.name}:
                raise MoQError(f"{path}: its tensors are not those that {_INDEX} names")
            for name in sorted(names):
                yield name, file.get_tensor(name)


def _digest(tensor: Tensor) -> str:
    head = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _canonical(state: Mapping[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in state.items() if key != "digest"}, sort_keys=True).encode()


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    state["digest"] = _sha256(_canonical(state))
    temporary = folder / f".{STATE_NAME}"
    temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / STATE_NAME)


def _read_json(path: Path) -> Entry:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise MoQError(f"{path} is missing: {_UNFINISHED}") from None


def _read_state(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise MoQError(f"{folder} is no directory")
    path = folder / STATE_NAME
    state: dict[str, Any] = _read_json(path).value
    try:
        digest = _sha256(_canonical(state))
    except RecursionError:
        digest = None
    if digest is None or state.get("digest") != digest:
        raise MoQError(f"{path} is damaged: its digest does not fit its content")
    if state.get("format") != 1:
        versions = state.get("versions")
        writer = versions.get("moq_hf") if isinstance(versions, dict) else None
        raise MoQError(f"{path} is of format {show(state.get('format'))}, written by moq_hf {show(writer)}: update")
    return state


def _recorded(folder: Path) -> tuple[dict[str, Any], dict[str, StoredLayer]]:
    """The state of a packed checkpoint and its layers. The digest proves integrity against accident alone.

    Raises:
        MoQError: A value is not of the type or in the range of what is written; names the file and the key.
    """
    state = _read_state(folder)
    entry = Entry(state, str(folder / STATE_NAME))
    if not entry["config_json"].is_null:
        entry["config_json"].text()
    for digest in entry["tensors"].mapping().values():
        digest.text()
    for name in ("versions", "config", "metrics", "float_metrics"):
        if not entry.get(name).is_null:
            entry[name].mapping()
    if not entry["step"].is_null:
        entry["step"].whole()
    for switch in entry["history"].items():
        switch["step"].whole(1)
        switch["block"].text()
        for name in ("before", "bits"):
            switch[name].whole(1, FLOAT_BITS)
        if not switch["eigenvalue"].is_null:
            switch["eigenvalue"].number(0.0, 1.0)
    if not entry.get("proof").is_null:
        _proof_of(entry["proof"])
    if not entry.get("parameters").is_null:
        entry["parameters"]["total"].whole(entry["parameters"]["quantized"].whole(1))
    layers = entry["layers"].mapping()
    if not layers:
        raise entry["layers"].fault("the layers by name")
    return state, {name: _layer_of_json(layer) for name, layer in layers.items()}


def _proof_of(entry: Entry) -> Proof:
    agrees = None if entry["agrees"].is_null else entry["agrees"].flag()
    difference = None if entry["largest_difference"].is_null else entry["largest_difference"].number(0.0)
    tokens = None if entry["tokens"].is_null else entry["tokens"].whole()
    reason = None if entry["reason"].is_null else entry["reason"].text()
    return Proof(agrees, entry["examples"].whole(), difference, tokens, reason, entry["seconds"].number(0.0))


def recorded(directory: str | os.PathLike[str]) -> Verification:
    """What `moq_state.json` says of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Returns:
        As `verify_quantized`; both sizes are 0 where there are no weight files.

    Raises:
        MoQError: The state is missing, or it or a weight file is damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = _recorded(folder)
    files = [path for path in _weight_files(folder) if path.is_file()]
    if not files:
        return Verification(layers, 0, 0, state)
    saved = sum(layer.bytes_before - layer.bytes for layer in layers.values())
    size = sum(path.stat().st_size for path in files)
    found = [_head(path, layers) for path in files]
    others = (sum(count for _, count, _ in found), sum(size for _, _, size in found))
    return Verification(layers, size, size - sum(head for head, _, _ in found) + saved, state, others)


def _head(path: Path, layers: Mapping[str, StoredLayer]) -> tuple[int, int, int]:
    """What of a weight file is its table of contents, and count and bytes of the numbers beside quantized weights."""
    count = size = 0
    try:
        # Opening compares the size of the file with the table.
        with safe_open(path, "pt") as weights, path.open("rb") as file:
            for name in weights.keys():  # noqa: SIM118
                owner, _, part = name.rpartition(".")
                dtype = _FLOATS.get(weights.get_slice(name).get_dtype())
                if dtype is not None and not (owner in layers and part.startswith("weight")):
                    numbers = math.prod(weights.get_slice(name).get_shape())
                    count, size = count + numbers, size + numbers * dtype.itemsize
            return 8 + int.from_bytes(file.read(8), "little"), count, size
    except (OSError, SafetensorError) as error:
        raise MoQError(f"{path} cannot be read: {_text(error)}") from error


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What the weights of a layer that is stored so can have.
_BITS = {"packed": (1, MAX_PACKED_BITS), "int8": (2, MAX_PACKED_BITS), "dense": (1, 16)}


def _layer_of_json(entry: Entry) -> StoredLayer:
    values: dict[str, Any] = {}
    known = {field.name: field for field in fields(StoredLayer)}
    for name, value in entry.mapping().items():
        if name not in known:
            raise MoQError(f"{value.where}: {value.key} is unknown; legal are {', '.join(known)}")
        values[name] = tuple(value.value) if isinstance(value.value, list) else value.value
    for name, field in known.items():
        if field.default is MISSING:
            values[name] = values.get(name, entry[name].value)
    entry["kind"].word("linear", "conv1d", "embedding")
    stored = entry["stored"].word("float", *_BITS)
    entry["symmetric"].flag()
    entry["bytes"].whole()
    entry["bytes_before"].whole(1)
    entry["max_error"].number(0.0)
    shape = [size.whole(1, 2**31) for size in entry["shape"].items(2)]
    scales = [count.whole(0, 2**31) for count in entry["scales"].items(2)]
    if stored == "float":
        if entry["bits"].value != FLOAT_BITS:
            entry["bits"].whole(1, 16)
        return StoredLayer(**values)
    entry["bits"].whole(*_BITS[stored])
    if any(count == 0 or size % count for size, count in zip(shape, scales, strict=True)):
        raise entry["scales"].fault(f"divisors of the shape {shape}")
    if stored != "dense":
        entry["group"].text()
        return StoredLayer(**values)
    for part in entry["grid"].items(2)[: 1 if entry["symmetric"].flag() else 2]:
        # 4 bytes each, as text of 4 letters for 3 bytes.
        if (
            not re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", part.text())
            or len(part.text()) != -(-math.prod(scales) * 4 // 3) * 4
        ):
            raise part.fault(f"{math.prod(scales)} values of 4 bytes in base64")
    return StoredLayer(**values)


def _groups(config: Entry, layers: Mapping[str, StoredLayer]) -> dict[str, Any]:
    """The config groups, after each layer was found to have the bits that its group declares.

    Raises:
        MoQError: One has not, or a group is missing or not as it was written.
    """
    packed = {name: layer for name, layer in layers.items() if layer.group is not None}
    if not packed:
        return {}
    quantization = config["quantization_config"]
    groups = quantization["config_groups"]
    # Unpacked while loading, all layers have the container of the largest.
    at_load = quantization.get("dequantize").value is True
    for name, layer in packed.items():
        weights = groups[cast(str, layer.group)]["weights"]
        weights["symmetric"].flag()
        width = weights["num_bits"].whole(1, MAX_PACKED_BITS)
        if layer.bits > width or (layer.bits < width and not (at_load and layer.stored == "packed")):
            raise MoQError(
                f"{Path(config.where).with_name(STATE_NAME)}: layers.{name}.bits is {layer.bits}, but its codes have "
                f"{width} bits ({weights.key}.num_bits in {_CONFIG})"
            )
    found: dict[str, Any] = groups.value
    return found


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    if is_packed(model):
        model = dequantize_model(copy.deepcopy(model))
    model = without_peft(model)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        tensors[f"{name}.weight"] = layer.quantized_weight().detach().cpu()
    return _plain(tensors, adapters(model))


def _plain(named: Mapping[str, _Value], added: Iterable[str]) -> dict[str, _Value]:
    """By the names that modules and tensors had before PEFT came, without its adapters."""
    renamed = {plain_name(name, added): value for name, value in named.items()} if added else named
    return {name: value for name, value in renamed.items() if name is not None}


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one.to(other.dtype), other)


def _is_complete(layer: StoredLayer, parts: Mapping[str, Tensor], scheme: Mapping[str, Any]) -> bool:
    wanted = {"weight"}
    if layer.stored == "int8":
        wanted |= {"weight_scale"}
    elif layer.stored == "packed":
        wanted = {"weight_packed", "weight_scale", "weight_shape"}
        wanted |= set() if scheme["symmetric"] else {"weight_zero_point"}
    return wanted <= set(parts)


def _check_grid(where: str, layer: StoredLayer, parts: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """The layer's float weight, after every code, scale and zero point was found to be of the grid that it declares.

    Raises:
        MoQError: One is not.
    """
    if layer.stored == "float":
        return parts["weight"]
    if layer.stored == "dense":
        return _check_dense(where, layer, parts["weight"])
    scale, limit = parts["weight_scale"], 2 ** (layer.bits - 1) - 1
    if not bool(torch.isfinite(scale).all() and (scale >= 0 if layer.bits == 1 else scale > 0).all()):
        raise MoQError(f"{where}: a scale is not a positive number")
    if layer.stored == "int8":
        if parts["weight"].dtype != torch.int8 or bool((parts["weight"].int().abs() > limit).any()):
            raise MoQError(f"{where}: codes beyond {limit} at {layer.bits} bits")
        _check_reach(where, layer, parts["weight"].int())
        return quantizer.dequantize(parts["weight"], scale)

    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationScheme

    width, shape = group["weights"]["num_bits"], torch.Size(layer.shape)
    if layer.kind == "conv1d":
        shape = torch.Size(reversed(shape))
    packed = parts["weight_packed"]
    codes = unpack_from_int32(packed, width, shape)
    if not torch.equal(pack_to_int32(codes, width), packed) or parts["weight_shape"].tolist() != list(shape):
        raise MoQError(f"{where}: the packed codes are not those of a weight {list(shape)} at {width} bits")
    codes = reaching = codes.int()
    if not layer.symmetric:
        zero = parts["weight_zero_point"]
        if zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, width, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        for what, values in (("codes", codes), ("zero points", zero.int())):
            values = values + 2 ** (width - 1)
            if bool(((values < 0) | (values >= 2**layer.bits)).any()):
                raise MoQError(f"{where}: {what} beyond {2**layer.bits - 1} at {layer.bits} bits")
        reaching = torch.cat([codes.flatten(), zero.int().flatten()]) + 2 ** (width - 1)
    elif layer.bits == 1:
        if width == 1 and not bool((parts["weight_zero_point"] == -0.5).all()):
            raise MoQError(f"{where}: the zero points of binary codes must be -1/2")
        if width > 1 and bool((codes.abs() != 1).any()):
            raise MoQError(f"{where}: binary codes must be -1 and 1")
    elif bool((codes.abs() > limit).any()):
        raise MoQError(f"{where}: codes beyond {limit} at {layer.bits} bits")
    _check_reach(where, layer, reaching)
    scheme = QuantizationScheme.model_validate({**group, "targets": []})
    return cast(Tensor, PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"])


def _check_reach(where: str, layer: StoredLayer, codes: Tensor) -> None:
    """Whether some code needs the bits that the layer declares, as that of a group's largest weight does.

    Stochastic rounding may leave it one short, an asymmetric grid two. Ternary and binary grids have other codes.

    Args:
        where: For the error.
        layer: As it is declared.
        codes: Of a symmetric grid; codes and zero points from 0 of an asymmetric one.

    Raises:
        MoQError: All codes, some of which are not 0, are of a grid with fewer bits.
    """
    largest, fewer = int(codes.abs().max()), 2 ** (layer.bits - 1) // (2 if layer.symmetric else 1)
    if layer.bits > 2 and 0 < largest < fewer:
        raise MoQError(f"{where}: no code is beyond {fewer - 1}, so they are of fewer than {layer.bits} bits")


def _check_dense(where: str, layer: StoredLayer, weight: Tensor) -> Tensor:
    scale_text, zero_text = cast(tuple[str, str | None], layer.grid)
    scale = _tensor64(scale_text, torch.float32).view(layer.scales)
    zero = None if zero_text is None else _tensor64(zero_text, torch.int32).view(layer.scales)
    rows, columns = layer.scales
    weight = _turned(weight, layer)
    tiles = weight.float().view(rows, layer.shape[0] // rows, columns, -1)
    codes = (tiles / scale[:, None, :, None]).round().nan_to_num(0.0).view(weight.shape)
    if layer.bits == 1:
        codes = weight.sign().where(weight != 0, torch.ones_like(weight))
    elif zero is None:
        limit = 2 ** (layer.bits - 1) - 1
        codes = codes.clamp(-limit, limit)
    else:
        tiles = codes.view(tiles.shape) + zero[:, None, :, None]
        codes = tiles.clamp(0, 2**layer.bits - 1).view(weight.shape)
    _check_reach(where, layer, codes if zero is None else torch.cat([codes.flatten(), zero.float().flatten()]))
    if not torch.equal(quantizer.dequantize(codes, scale, zero, dtype=weight.dtype), weight):
        raise MoQError(f"{where}: a weight is not on the grid of {layer.bits} bits")
    return _turned(weight, layer)


def _text64(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _tensor64(text: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def stored_weights(directory: str | os.PathLike[str]) -> dict[str, quantizer.Quantized]:
    """The codes, scales and zero points of the layers that a packed checkpoint holds as integers, by layer.

    Codes and zero points are signed: asymmetric ones are less by 2^(bits-1) than those of `quantizer`.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: Something is damaged or missing; names the file and the tensor.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    folder = Path(directory)
    layers = verify_quantized(folder).layers
    groups = _groups(_read_json(folder / _CONFIG), layers)
    parts: dict[str, dict[str, Tensor]] = {name: {} for name, layer in layers.items() if layer.group is not None}
    for name, tensor in _tensors(folder):
        owner, _, part = name.rpartition(".")
        if owner in parts:
            parts[owner][part] = tensor
    found = {}
    for name, tensors in parts.items():
        layer, scale = layers[name], tensors["weight_scale"]
        if layer.stored == "int8":
            found[name] = quantizer.Quantized(tensors["weight"].int(), scale, None)
            continue
        width, shape = groups[cast(str, layer.group)]["weights"]["num_bits"], torch.Size(layer.shape)
        in_file = torch.Size(reversed(shape)) if layer.kind == "conv1d" else shape
        codes = _turned(unpack_from_int32(tensors["weight_packed"], width, in_file).int(), layer)
        scale = _turned(scale, layer)
        zero = tensors.get("weight_zero_point")
        if zero is not None and zero.is_floating_point():
            # Binary: codes -1 and 0 around -1/2.
            codes, scale, zero = 2 * codes + 1, scale / 2, None
        elif zero is not None and zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, width, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        found[name] = quantizer.Quantized(codes, scale, None if zero is None else _turned(zero.int(), layer))
    return found
