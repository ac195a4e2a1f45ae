"""`Encoder`: writes each layer of a model in the form that fits it, and names the layers in config groups.

A config group names its modules by patterns that hold in transformers and in servers,
which rename and fuse layers. A server puts other prefixes before a name, other modules
between a block and its layer, and several layers into one: vLLM looks for
`model.layers.0.self_attn.q_proj` in a model that has `qkv_proj`, and for BERT's `query`
in the module `output`. So a pattern has the list of blocks, the numbers of the blocks,
and the last part of the layer's name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..formats import int_quantized, pack_quantized
from ..formats.stored import EncodedWeight
from ..formats.table import FORMS, LAYOUTS, TAKEN_APART, Layout, needs_of
from ..grid import FP4
from ..model.convert import beyond
from ..model.inventory import LINEARS, Inventory
from ..names import plain_name
from ..processes import device_of
from ..quantized_weight import QuantizedWeight
from ..schedule import FLOAT_BITS
from ..seams.transformers import (
    matrices_in_files,
    original_format,
    takes_apart,
)
from ..servers import FUSED
from ..text import dtype_name
from ..trained_scales import with_scale
from ..weight_matrix import from_rows, parameter_of, to_rows
from ..weight_spec import FLOAT, WeightSpec

_Value = TypeVar("_Value")
# The config group of packed experts.
_EXPERTS = "experts"
# Anything before a name, or between two parts of it.
_ANY = r"(?:.*\.)?"
# The place of a layer: its list of blocks, the number of its block, a pattern for what may
# come between that and the end of its name, and that end.
_Place = tuple[str, str, str, str]
# The name of an expert's matrix in the files.
_MATRIX = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")


class Encoder:
    """Stores the layers of one model, and collects the config groups of compressed-tensors on the way.

    `store` each layer first, then `rename` the tensors, then ask for `config`.

    Args:
        inventory: The inventory of the model.
        layers: The layers whose weights go into the files, by name.
        layout: The layout of the files, which decides the form of each weight.
        tied: Layer to the layers that share its weight and that `from_pretrained` ties
            to it.

    Attributes:
        has_codes: Whether any layer is stored as codes.
        widths: The bits that codes have in the files.
        packed: The layers whose modules hold packed weights after loading.
        groups: The config groups so far, without the names of their layers.
        stored: Each layer stored so far, as `moq_state.json` describes it.
        names: The names of layers in the files, where they differ from their own.
        dtypes: The dtypes of the float weights of layers that are stored as codes.
        model_dtypes: The dtypes of all parameters, without PEFT's adapters.
        dtype: The dtype that the packed model will have.
        rounds_inputs: Whether the files say how inputs are rounded, as in training and
            with its static scales; if not, plain loading leaves inputs alone.
        without_range: The layers whose inputs have no static scale yet.
    """

    def __init__(
        self,
        inventory: Inventory,
        layers: Mapping[str, QuantizedWeight],
        layout: Layout,
        tied: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.layout = layout
        self.layers = layers
        self.tied = tied or {}
        self.groups: dict[str, dict[str, Any]] = {}
        self._members: dict[str, list[str]] = {}
        self.stored: dict[str, WeightSpec] = {}
        self.names: dict[str, str] | None = None
        self._layout = LAYOUTS[layout]
        model = self._model = inventory.model
        modules = without_peft_names(inventory.modules, inventory.adapters)
        self._linears = [
            n for n, module in modules.items() if isinstance(module, LINEARS)
        ]
        matched = [
            name
            for name, module in modules.items()
            if isinstance(module, (*LINEARS, nn.Embedding))
        ]
        lists = {name: len(entries) for name, entries in inventory.lists.items()}
        self._patterns = Patterns(
            matched, lists, str(getattr(model, "base_model_prefix", ""))
        )
        specs = {name: self._spec(name, layer) for name, layer in layers.items()}
        self.tables = {name for name, spec in specs.items() if spec.is_table}
        self.without_range: list[str] = []
        rounded = self._with_inputs(specs) if self._layout.has_inputs else None
        self.rounds_inputs = bool(rounded)
        self._specs = self._layout.placed(specs | (rounded or {}))
        misfit = self._layout.misfit(self._specs.values())
        if misfit is not None:
            raise MoQError(f"layout {layout} {misfit}")
        coded = [spec for spec in self._specs.values() if spec.has_codes]
        packed = [spec for spec in coded if FORMS[spec.stored].stays_packed]
        self._matrices = {
            spec.name: spec.matrices for spec in coded if spec.matrices is not None
        }
        self.packed = [spec.name for spec in packed if spec.name not in self._matrices]
        self.has_codes = bool(coded)
        self.widths = {spec.width for spec in coded}
        self.dtypes = {dtype_name(spec.dtype) for spec in coded}
        scales = {
            dtype_name(spec.scale_dtype) for spec in coded if spec.format not in FP4
        }
        # Packed modules load their scales in the model's dtype, and a narrower one would
        # round them. Weights that are unpacked while loading are cast once, afterwards.
        self.model_dtypes = {
            dtype_name(parameter.dtype)
            for name, parameter in inventory.parameters()
            if parameter.is_floating_point() and not inventory.is_added(name)
        }
        dtypes = self.dtypes | scales
        if self._layout.unpacks:
            dtypes = self.model_dtypes
        self.dtype = dtypes.pop() if len(dtypes) == 1 else "float32"

    @property
    def is_asymmetric(self) -> bool:
        """True if packed layers have zero points."""
        return any(not self._specs[name].grid.symmetric for name in self.packed)

    @property
    def needs_bfloat16(self) -> bool:
        """True if packed codes are floats, which are unpacked in bfloat16 and in no other dtype."""
        return any(self._specs[name].format != "int" for name in self.packed)

    @property
    def needs(self) -> dict[str, str]:
        """The least versions of the libraries that load the folder."""
        return needs_of(self._layout, self._specs.values())

    @property
    def misleads_older(self) -> bool:
        """True if versions of transformers before the least one load other weights without an error.

        They do not unpack experts, and look for packed layers under the names that the
        modules have today.
        """
        is_known = not self._layout.is_for_transformers_alone
        return bool(self._matrices or self.names or not is_known)

    def _spec(self, name: str, layer: QuantizedWeight) -> WeightSpec:
        spec = WeightSpec.of(layer)
        if spec.kind == "experts":
            same = [each for each in self.layers.values() if each.kind == "experts"]
            formats = {each.moq.precision.format for each in same}
            matrices = matrix_names(self._model, name, spec.full_shape)
            # The files have one scheme for all of them.
            spec = replace(spec, matrices=matrices if len(formats) == 1 else None)
        tied = tuple(self.tied.get(name, ()))
        is_table = spec.kind == "embedding" or bool(tied)
        spec = replace(spec, name=name, tied=tied, is_table=is_table)
        left_alone = self._layout.leaves_alone(self._model, spec, layer.module)
        return replace(spec, left_alone=left_alone)

    def _with_inputs(self, specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
        """The layers whose inputs are rounded, with their grids; none if the files have no place for one of them.

        A static scale that is not known, of a layer that got no inputs or nothing but
        zeros, leaves that layer's inputs alone.
        """
        found = {}
        for name, layer in self.layers.items():
            inputs = layer.moq.inputs
            if inputs is None:
                continue
            scale, zero = inputs.stored
            spec = replace(
                specs[name],
                inputs=inputs.grid,
                input_scale=scale,
                input_zero_point=zero,
            )
            is_trained = inputs.active and not spec.blended
            if not is_trained or not self._layout.takes_inputs(spec):
                return {}
            if scale is not None or inputs.grid.scale == "per_token":
                found[name] = spec
            else:
                self.without_range.append(name)
        return found

    def why_in_float(self, name: str) -> str:
        """Why the files have no codes for a layer, in words."""
        spec = self._specs[name]
        if spec.stored == FLOAT:
            return "training ended before they were at their bits"
        fault = None if spec.left_alone else pack_quantized.misfit(spec)
        if fault is None and self.layout == "floats" and takes_apart(self._model, ()):
            return TAKEN_APART
        return fault or self._layout.stays

    def store(self, name: str, saved: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Encode a layer's weight into the tensors of the files, by name.

        Args:
            name: The layer's name.
            saved: Gives the values of a parameter of the model, on any device.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        layer = self.layers[name]
        state = layer.moq
        spec = self._specs[name]

        def handed(values: Tensor) -> Tensor:
            if state.lora and not layer.float_weight.is_meta:
                # Sums of adapters depend on the device, so use that of the training.
                values = values.to(device_of(layer.float_weight))
            # An engine may hand over weights in a narrower dtype: then the evaluated
            # model quantized weights that were rounded to it.
            return values.to(state.handed_dtype or values.dtype)

        source = saved(layer.float_weight)
        merged = state.merged(handed(source), lambda part: handed(saved(part)))
        parameter = merged.to(source.dtype)
        weight = to_rows(parameter, spec.kind).contiguous()
        spec = replace(spec, full_shape=tuple(parameter.shape), dtype=weight.dtype)
        ratio = None if state.ratio is None else state.ratio.to(weight.device)
        scales = None if state.found is None else state.found.on(weight.device).scales
        if spec.stored == FLOAT:
            if state.bits != FLOAT_BITS:
                weight = quantizer.fake_quantize(
                    weight,
                    state.bits,
                    state.grid,
                    ratio=ratio,
                    seed=state.seed,
                    blend=state.blend,
                )
            encoded = EncodedWeight(
                {"weight": from_rows(weight, spec.kind, parameter.shape).contiguous()}
            )
        else:
            trained = state.trained
            try:
                # Frozen codes are in use, whatever has become of the weight.
                values = (trained and trained.start) or quantizer.quantize(
                    weight,
                    state.bits,
                    state.grid,
                    ratio=ratio,
                    seed=state.seed,
                    scales=scales,
                )
            except ValueError as error:
                raise MoQError(
                    f"{parameter_of(name, spec.kind)} cannot be quantized: {error}"
                ) from error
            if trained is not None:
                scale = saved(trained.parameter).to(values.scale.device)
                values = with_scale(values, scale, state.precision)
                values = values._replace(codes=values.codes.int())
            # Only such a large scale can make a weight overflow.
            farthest = values.scale.abs().amax() * state.precision.reach
            if farthest > torch.finfo(weight.dtype).max:
                dense = quantizer.dequantize(*values, dtype=weight.dtype)
                if not dense.isfinite().all():
                    raise MoQError(beyond(parameter_of(name, spec.kind), weight.dtype))
            on_cpu: list[Any] = [
                None if part is None else part.cpu() for part in values
            ]
            write = FORMS[spec.stored].write
            encoded = write(quantizer.Quantized(*on_cpu), spec)
        spec = replace(spec, matrices=self._matrices.get(name))
        parts = encoded.named(spec)
        self.stored[name] = replace(
            spec,
            bytes=sum(tensor.nbytes for tensor in parts.values()),
            bytes_before=weight.nbytes,
            group=None if encoded.scheme is None else self._group(name, encoded.scheme),
            grid_text=encoded.grid,
        )
        is_table = spec.has_codes and spec.kind == "embedding"
        if is_table and not FORMS[spec.stored].stays_packed:
            parts |= int_quantized.unsaved_buffers(name, layer.module)
        return parts

    def _group(self, name: str, scheme: dict[str, Any]) -> str:
        """Add a layer to the config group with its scheme, and return the name of the group."""
        if name in self._matrices:
            # Loaders take the first group that names experts, so theirs comes first.
            self.groups = {_EXPERTS: scheme, **self.groups}
            return _EXPERTS
        others = [group for group in self.groups if group != _EXPERTS]
        same = (group for group in others if self.groups[group] == scheme)
        group = next(same, f"group_{len(others)}")
        self.groups[group] = scheme
        self._members.setdefault(group, []).extend([name, *self.tied.get(name, ())])
        return group

    def rename(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the tensors their names in the files, and note in `names` the layers whose names differ there.

        If transformers merges or splits weights of these layers, all tensors keep the
        names of the modules. If some weights are packed, other weights that it would
        split keep their names too, since loading then merges only packed pieces.
        """
        unchanged = {id(tensor) for tensor in original_format(model, tensors).values()}
        layers = set(self.stored).union(*self.tied.values())
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if id(tensor) not in unchanged
            and (self.groups or not layers.isdisjoint((name, name.rpartition(".")[0])))
        }
        others = {name: t for name, t in tensors.items() if name not in kept}
        renamed = original_format(model, others) | kept
        names_in_files = {id(tensor): name for name, tensor in renamed.items()}
        self.names = {}
        for name, tensor in tensors.items():
            layer = name
            name_in_files = names_in_files.get(id(tensor), name)
            # Experts are a parameter; any other layer is a module.
            if layer not in layers:
                layer = layer.rpartition(".")[0]
                name_in_files = name_in_files.rpartition(".")[0]
            if layer in layers and name_in_files != layer:
                self.names[layer] = name_in_files
        return renamed

    def config(self) -> dict[str, Any] | None:
        """The quantization config for `config.json`; None if every layer is dense."""
        if not self.groups:
            return None
        grouped = set().union(*self._members.values())
        has_tables = not self.tables.isdisjoint(self.packed)
        named = self._patterns.names if has_tables else self._linears
        ungrouped = [name for name in named if name not in grouped]
        targets, ignore = self._patterns.of(self._members, ungrouped)
        if _EXPERTS in self.groups:
            matrices = set().union(*self._matrices.values())
            targets[_EXPERTS] = [matrix_pattern(matrices)]
        return self._layout.config(self.groups, targets, ignore, has_tables)


def matrix_names(
    model: nn.Module, parameter: str, shape: Sequence[int]
) -> tuple[str, ...] | None:
    """The names in the files of the matrices in a parameter of experts, in the order of its rows.

    One parameter is many matrices in the files, and servers know each by its own name.
    In the parameter of a gated layer, matrices of the gate alternate with those of the
    other half. They must all have the same number of rows, and each must be in one
    piece; otherwise the files have no place for them.

    Args:
        model: Of transformers.
        parameter: The parameter's name.
        shape: Its shape `[experts, rows, columns]`.

    Returns:
        None if the files have no place for the parameter.
    """
    rows_of = matrices_in_files(model, parameter, shape[0], shape[1])
    names = sorted(rows_of, key=lambda name: int(rows_of[name].flatten()[0]))
    rows = torch.cat([rows_of[name].flatten() for name in names])
    in_order = torch.equal(rows, torch.arange(len(rows), device="cpu"))
    same_size = len({tuple(numbers.shape) for numbers in rows_of.values()}) == 1
    if not (in_order and same_size and all(map(_MATRIX.fullmatch, names))):
        return None
    return tuple(name.removesuffix(".weight") for name in names)


def matrix_pattern(names: Iterable[str]) -> str:
    r"""A pattern for matrices of experts, in any block and model around it.

    >>> matrix_pattern(["model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.experts.0.up_proj"])
    're:.*\\.experts\\.\\d+\\.(?:gate_proj|up_proj)$'
    """
    ends = sorted({name.rpartition(".")[2] for name in names})
    return rf"re:.*\.experts\.\d+\.(?:{'|'.join(ends)})$"


def without_peft_names(
    named: Mapping[str, _Value], added: Iterable[str]
) -> dict[str, _Value]:
    """Give modules or tensors the names that they had before PEFT, and leave out its adapters."""
    renamed = (
        {plain_name(name, added): value for name, value in named.items()}
        if added
        else named
    )
    return {name: value for name, value in renamed.items() if name is not None}


class Patterns:
    r"""Patterns for the layers of one model.

    Args:
        names: Every module that a pattern could match, by the name that it has in the
            files.
        lists: The name of each list of blocks, and how many blocks it has.
        prefix: Name of the base model, which another class may leave out of its names.

    >>> names = ["model.layers.0.q_proj", "model.layers.1.q_proj", "lm_head"]
    >>> Patterns(names, {"model.layers": 2}, "model").of({"group_0": names[:2]}, names[2:])
    ({'group_0': ['re:(?:.*\\.)?layers\\.\\d+\\.q_proj$']}, ['re:(?:.*\\.)?lm_head$'])
    """

    def __init__(
        self, names: Iterable[str], lists: Mapping[str, int], prefix: str
    ) -> None:
        self.names = list(names)
        self.prefix = f"{prefix}." if prefix else ""
        paths = [path.split(".") for path in lists]
        # The name of a layer in a block: the list, the number of the block, and the rest
        # with its last part.
        any_list = "|".join(map(re.escape, lists))
        self._in_list = re.compile(rf"({any_list})\.(\d+)\.((?:.+\.)?([^.]+))")
        self.lists = {
            path: (_own_end(path.split("."), paths), count)
            for path, count in lists.items()
        }

    def of(
        self, groups: Mapping[str, Sequence[str]], ungrouped: Sequence[str]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """The targets of each group, and the modules to ignore.

        Args:
            groups: Names of the modules of each group.
            ungrouped: Names of linear layers that are in no group.

        Returns:
            Patterns after "re:", which match the names as `re.match` does; or the names
            themselves, if patterns would not tell the groups apart.
        """
        owners = {name: group for group, members in groups.items() for name in members}
        places = self._places({**dict.fromkeys(ungrouped), **owners})
        targets = {
            group: self._patterns(members, places) for group, members in groups.items()
        }
        ignore = self._patterns(ungrouped, places)
        for name in self.names:
            found = [group for group in targets if _matches(name, targets[group])]
            if _matches(name, ignore):
                found = []
            if found != ([owners[name]] if name in owners else []):
                names = {group: list(members) for group, members in groups.items()}
                return names, list(ungrouped)
        return targets, ignore

    def _places(self, owners: Mapping[str, str | None]) -> dict[str, _Place]:
        """Find the place of each layer in its block: by the last part of its name if its group alone has it there."""
        matches = ((name, self._in_list.fullmatch(name)) for name in owners)
        parts = {name: match.groups() for name, match in matches if match}
        groups_with: dict[tuple[str, str, str], set[str | None]] = {}
        for name, (path, index, _, last) in parts.items():
            groups_with.setdefault((path, index, last), set()).add(owners[name])
        places = {}
        for name, (path, index, rest, last) in parts.items():
            # Nothing comes between the whole rest of a name and its block.
            is_whole = len(groups_with[path, index, last]) > 1 or rest == last
            between, tail = ("", rest) if is_whole else (_ANY, last)
            places[name] = path, index, between, tail
        return places

    def _patterns(
        self, members: Sequence[str], places: Mapping[str, _Place]
    ) -> list[str]:
        numbers_of: dict[tuple[str, str, str], dict[str, None]] = {}
        patterns = []
        for name in members:
            if name in places:
                path, index, between, tail = places[name]
                numbers_of.setdefault((path, between, tail), {})[index] = None
            else:
                own = re.escape(name.removeprefix(self.prefix))
                patterns.append(f"re:{_ANY}{own}$")
        # Layers of the same blocks have one pattern.
        shared: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
        for (path, between, tail), numbers in numbers_of.items():
            key = (path, tuple(numbers), between)
            shared.setdefault(key, []).append(re.escape(tail))
        for (path, indices, between), ends in shared.items():
            # vLLM's StableLM and GPT-J and SGLang's BERT look up fused layers by their own names.
            ends += [whole for parts, whole in FUSED.items() if set(parts) <= set(ends)]
            end, count = self.lists[path]
            number = r"\d+" if len(indices) == count else _either(indices)
            patterns.append(f"re:{_ANY}{end}\\.{number}\\.{between}{_either(ends)}$")
        return _needed(patterns, members)


def _needed(patterns: Sequence[str], members: Sequence[str]) -> list[str]:
    """Drop patterns whose layers other patterns match too, of which loading would warn."""
    kept = list(patterns)
    for pattern in patterns:
        others = [other for other in kept if other != pattern]
        if all(_matches(n, others) for n in members if _matches(n, [pattern])):
            kept = others
    return kept


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"(?:{'|'.join(words)})"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.match(pattern.removeprefix("re:"), name) for pattern in patterns)


def _own_end(path: list[str], paths: Sequence[list[str]]) -> str:
    """Return a pattern for the shortest end of a list's name that no other list shares."""
    for k in range(1, len(path) + 1):
        if sum(other[-k:] == path[-k:] for other in paths) == 1:
            return rf"\.{_ANY}".join(re.escape(part) for part in path[-k:])
    return re.escape(".".join(path))
