"""The layers of one model on their way into the files: the form that each is stored in, and the config groups.

A config group names its modules by patterns that hold in transformers and in servers,
which rename and fuse layers. A server puts other prefixes before a name, other modules
between a block and its layer, and several layers into one: vLLM looks for
`model.layers.0.self_attn.q_proj` in a model that has `qkv_proj`, and for BERT's `query`
in the module `output`. So a pattern has the list of blocks, the numbers of the blocks,
and the last part of the layer's name.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError, shortened
from ..formats import gemma, int_quantized, mxfp4, pack_quantized
from ..formats.stored import (
    MAX_PACKED_BITS,
    EncodedWeight,
    EncodeSpec,
    Form,
    SharedScheme,
    StoredLayer,
)
from ..formats.table import (
    FORMS,
    LAYOUTS,
    TAKEN_APART,
    Layout,
    form_of,
    has_codes,
    needs_of,
)
from ..grid import Format
from ..model.convert import beyond
from ..model.inventory import FUSED, LINEARS, Inventory
from ..names import plain_name
from ..processes import device_of, shape_of
from ..quantized_weight import QuantizedWeight
from ..schedule import FLOAT_BITS
from ..seams.transformers import (
    matrices_in_files,
    original_format,
    stays_float,
    takes_apart,
)
from ..text import dtype_name
from ..weight_matrix import from_rows, is_experts, parameter_of, to_rows

_Value = TypeVar("_Value")
# The config group of packed experts.
_EXPERTS = "experts"
# Whatever stands before, and between two parts of a name.
_ANY = r"(?:.*\.)?"
# What the files call the matrix of an expert.
_MATRIX = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")


class Encoder:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up.

    `store` each layer first, then `rename` the tensors, then ask for `config`.

    Args:
        inventory: The inventory of the model.
        layers: The layers whose weights go into the files, by name.
        layout: Which forms they may have.
        tied: Layer to the layers that share its weight and that `from_pretrained` ties
            to it.

    Attributes:
        forms: Each layer's form: one of `FORMS`, or "float" for one that is not
            quantized yet.
        packed: The layers whose modules hold packed weights after loading.
        groups: The config groups so far, without the layers that they are for.
        stored: What `moq_state.json` says of each layer that was stored.
        names: What layers are called in the files, where that is not their own name.
        dtypes: The dtypes of the float weights of layers that are stored as codes.
        model_dtypes: The dtypes of all parameters, without PEFT's adapters.
        dtype: The dtype that the packed model will have.
        rounds_inputs: Whether the files say how inputs are rounded, and with which
            static scales, as training did; else plain loading leaves inputs alone.
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
        self.stored: dict[str, StoredLayer] = {}
        self.names: dict[str, str] | None = None
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
        self.tables = {
            name
            for name, layer in layers.items()
            if layer.kind == "embedding" or self.tied.get(name)
        }
        shared = self._shared_scheme() if layout == "unpacked" else None
        self._specs = {
            name: self._spec(model, name, layer, shared)
            for name, layer in layers.items()
        }
        self.rounds_inputs = LAYOUTS[layout].has_inputs and self._round_inputs()
        self.forms = {name: self._form(name) for name in layers}
        specs = self._specs
        unfit = [
            n for n, f in self.forms.items() if f == "dense" and not specs[n].in_float
        ]
        if layout == "gemma" and unfit:
            raise MoQError(
                f"layout gemma has no place for {shortened(unfit)}: it {gemma.LEGAL}"
            )
        if layout == "mxfp4" and layout not in self.forms.values():
            raise MoQError(
                "layout mxfp4 is that of GPT-OSS, whose experts must be in MXFP4 (format); without it a "
                "layout is found for any model"
            )
        packed = [n for n, form in self.forms.items() if form in ("packed", "gemma")]
        self._matrices = {
            name: self._specs[name].matrices or ()
            for name in packed
            if is_experts(layers[name].kind)
        }
        self.packed = [name for name in packed if name not in self._matrices]
        # Layers that are unpacked while loading all have codes as wide as the widest
        # one's. So have packed experts in any layout.
        same_width = list(self._matrices) if shared is None else packed
        width = max([2, *(self._specs[name].width for name in same_width)])
        for name in same_width:
            self._specs[name] = replace(self._specs[name], width=width)
        coded = [self._specs[n] for n, form in self.forms.items() if has_codes(form)]
        self.dtypes = {dtype_name(spec.dtype) for spec in coded}
        scales = {
            dtype_name(spec.scale_dtype) for spec in coded if spec.format == "int"
        }
        # Packed modules load their scales in the model's dtype: a narrower one than
        # theirs would round them. What is unpacked while loading is cast once, after it.
        self.model_dtypes = {
            dtype_name(parameter.dtype)
            for name, parameter in inventory.parameters()
            if parameter.is_floating_point() and not inventory.is_added(name)
        }
        dtypes = self.dtypes | scales
        if layout == "unpacked":
            dtypes = self.model_dtypes
        self.dtype = dtypes.pop() if len(dtypes) == 1 else "float32"

    @property
    def is_asymmetric(self) -> bool:
        """Whether packed layers have zero points."""
        return any(not self.layers[name].moq.grid.symmetric for name in self.packed)

    @property
    def widths(self) -> set[int]:
        """The bits that codes have in the files."""
        return {
            self._specs[name].width or self.layers[name].moq.bits
            for name, form in self.forms.items()
            if has_codes(form)
        }

    @property
    def needs_bfloat16(self) -> bool:
        """Whether packed layers have floats for codes, which are unpacked in bfloat16 and in no other dtype."""
        return any(self._specs[name].format != "int" for name in self.packed)

    @property
    def needs(self) -> dict[str, str]:
        """The least versions of the libraries that load the folder."""
        packed = [self._specs[n] for n, form in self.forms.items() if form == "packed"]
        layout = self.layout if any(map(has_codes, self.forms.values())) else "floats"
        widths = {spec.width for spec in packed}
        return needs_of(layout, widths, any(spec.format != "int" for spec in packed))

    @property
    def misleads_older(self) -> bool:
        """Whether versions of transformers before the least one load other weights without an error.

        They do not unpack experts, and look for packed layers under the names that the
        modules have today.
        """
        return bool(self._matrices or self.names or self.layout == "gemma")

    def _shared_scheme(self) -> SharedScheme:
        linears = [
            layer
            for n, layer in self.layers.items()
            if n not in self.tables
            and (layer.kind == "linear" or is_experts(layer.kind))
        ] or list(self.layers.values())
        grids = [layer.moq.grid for layer in linears]
        # Layers of other groups repeat their scales: `overrides` may say any.
        row_size = math.gcd(*(grid.grouping.row_size or 0 for grid in grids)) or None
        width = widest = table_size = others_size = 0
        for name, layer in self.layers.items():
            if layer.moq.bits <= MAX_PACKED_BITS:
                size = shape_of(layer.float_weight).numel()
                widest = max(widest, layer.moq.bits)
                if name in self.tables:
                    table_size += size
                else:
                    others_size += size
                    width = max(width, layer.moq.bits)
        # Tables stay floats where the files would grow by giving all other codes their
        # bits.
        growth = (widest - width) * others_size
        saved = (8 * torch.float32.itemsize - widest) * table_size
        format, *others = _formats_of(linears)
        format = "int" if others else format
        return SharedScheme(row_size, grids[0].symmetric, growth <= saved, format)

    def _spec(
        self,
        model: nn.Module,
        name: str,
        layer: QuantizedWeight,
        shared: SharedScheme | None,
    ) -> EncodeSpec:
        matrices = None
        if layer.kind == "experts":
            same = [each for each in self.layers.values() if each.kind == "experts"]
            # They have one scheme in the files.
            if len(_formats_of(same)) == 1:
                matrices = matrix_names(model, name, shape_of(layer.float_weight))
        in_float = self.layout == "gemma" and (
            layer.kind not in ("linear", "conv1d", "embedding")
            or name in self.tied
            or stays_float(model, name, layer.module)
        )
        return replace(
            EncodeSpec.of(layer, name in self.tables, matrices),
            shared=shared,
            in_float=in_float,
        )

    def _round_inputs(self) -> bool:
        """Give the specs what the layers' inputs are rounded with, if all of them can be delivered so."""
        specs = {}
        for name, layer in self.layers.items():
            inputs = layer.moq.inputs
            if inputs is None:
                continue
            scale = None if inputs.scale is None else inputs.scale.float().cpu()
            spec = replace(self._specs[name], inputs=inputs.grid, input_scale=scale)
            has_scale = scale is not None or inputs.grid.scale == "per_token"
            is_trained = inputs.active and has_scale and not layer.moq.blend
            is_taken = spec.input_fault is None
            if self.layout == "gemma":
                is_taken = gemma.takes_inputs(spec, inputs.grid)
            if not is_trained or not is_taken:
                return False
            specs[name] = spec
        self._specs |= specs
        return bool(specs)

    def _form(self, name: str) -> Form:
        state = self.layers[name].moq
        return (
            "float"
            if state.bits == FLOAT_BITS or state.blend
            else form_of(self._specs[name], self.layout)
        )

    def why_in_float(self, name: str) -> str:
        """Why the files have no codes for a layer, in words."""
        if self.forms[name] == "float":
            return "training ended before they were at their bits"
        spec = self._specs[name]
        fault = None if spec.in_float else pack_quantized.misfit(spec)
        if fault is None and self.layout == "floats" and takes_apart(self._model, ()):
            return TAKEN_APART
        return fault or LAYOUTS[self.layout].stays

    def store(self, name: str, saved: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The tensors that the files hold of a layer's weight, by name.

        Args:
            name: The layer's name.
            saved: Gives the values of a parameter of the model, on any device.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        layer = self.layers[name]
        state = layer.moq
        spec = self._specs[name]
        form = self.forms[name]
        tied = self.tied.get(name, ())

        def handed(values: Tensor) -> Tensor:
            if state.lora and not layer.float_weight.is_meta:
                # Another device may sum in another order than the one that has trained.
                values = values.to(device_of(layer.float_weight))
            # An engine may have handed the weight over in a narrower dtype, so that the
            # evaluated model had a weight that was rounded to it first.
            return values.to(state.handed_dtype or values.dtype)

        source = saved(layer.float_weight)
        merged = state.merged(handed(source), lambda part: handed(saved(part)))
        parameter = merged.to(source.dtype)
        weight = to_rows(parameter, spec.kind).contiguous()
        spec = replace(spec, shape=parameter.shape, dtype=weight.dtype)
        ratio = None if state.ratio is None else state.ratio.to(weight.device)
        scales = (0, 0)
        if form == "float":
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
            try:
                values = quantizer.quantize(
                    weight, state.bits, state.grid, ratio=ratio, seed=state.seed
                )
            except ValueError as error:
                raise MoQError(
                    f"{parameter_of(name, spec.kind)} cannot be quantized: {error}"
                ) from error
            # Only so large a scale needs a second look.
            farthest = values.scale.abs().amax() * state.precision.reach
            if farthest > torch.finfo(weight.dtype).max:
                dense = quantizer.dequantize(*values, dtype=weight.dtype)
                if not dense.isfinite().all():
                    raise MoQError(beyond(parameter_of(name, spec.kind), weight.dtype))
            scales = state.grid.shape(*spec.matrix_shape)
            on_cpu: list[Any] = [
                None if part is None else part.cpu() for part in values
            ]
            encoded = FORMS[form].write(quantizer.Quantized(*on_cpu), spec)
        matrices = self._matrices.get(name)
        # Those of experts have their whole names.
        parts = encoded.parts if matrices else encoded.named(name, spec.kind, tied)
        if form == "mxfp4":
            parts = {
                name + mxfp4.ENDINGS[part]: tensor
                for part, tensor in encoded.parts.items()
            }
        self.stored[name] = StoredLayer(
            kind=spec.kind,
            bits=state.bits,
            stored=form,
            shape=spec.matrix_shape,
            scales=scales,
            symmetric=state.grid.symmetric,
            full=state.precision.is_full,
            format=spec.format,
            bytes=sum(tensor.nbytes for tensor in parts.values()),
            bytes_before=weight.nbytes,
            group=None if encoded.scheme is None else self._group(name, encoded.scheme),
            grid=encoded.grid,
            tied=tuple(tied),
            matrices=matrices,
        )
        if form == "int8" and layer.kind == "embedding":
            parts |= int_quantized.unsaved_buffers(name, layer.module)
        return parts

    def _group(self, name: str, scheme: dict[str, Any]) -> str:
        """Add a layer to the config group with its scheme, and return the name of the group."""
        if name in self._matrices:
            # Experts have a group of their own, which stands first, because loaders
            # take the first group that names experts.
            self.groups = {_EXPERTS: scheme, **self.groups}
            return _EXPERTS
        others = [group for group in self.groups if group != _EXPERTS]
        same = (group for group in others if self.groups[group] == scheme)
        group = next(same, f"group_{len(others)}")
        self.groups[group] = scheme
        self._members.setdefault(group, []).extend([name, *self.tied.get(name, ())])
        return group

    def rename(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the tensors their names in the files, and note in `names` which layers are called otherwise there.

        If transformers merges or splits weights of these layers, all tensors keep the
        names of the modules. Other weights that it would split also keep their names
        where some weights are packed: loading merges only packed pieces then.
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
            # Experts are a parameter, any other layer is a module.
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
        if self.layout == "mxfp4":
            return mxfp4.CONFIG
        formats = {group["format"] for group in self.groups.values()}
        grouped = set().union(*self._members.values())
        has_tables = not self.tables.isdisjoint(self.packed)
        named = self._patterns.names if has_tables else self._linears
        ungrouped = [name for name in named if name not in grouped]
        targets, ignore = self._patterns.of(self._members, ungrouped)
        if self.layout == "gemma":
            widths = {
                self.groups[name]["weights"]["num_bits"]: patterns
                for name, patterns in targets.items()
            }
            return gemma.config(widths, ignore, has_tables)
        if _EXPERTS in self.groups:
            matrices = set().union(*self._matrices.values())
            targets[_EXPERTS] = [matrix_pattern(matrices)]
        return {
            "config_groups": {
                name: {"targets": targets[name], **group}
                for name, group in self.groups.items()
            },
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ignore,
        }


def _formats_of(layers: Iterable[QuantizedWeight]) -> set[Format]:
    return {layer.moq.precision.format for layer in layers}


def matrix_names(
    model: nn.Module, parameter: str, shape: Sequence[int]
) -> tuple[str, ...] | None:
    """The names in the files of the matrices in a parameter of experts, in the order of its rows.

    One parameter is many matrices in the files, and servers know each by its own name.
    In the parameter of a gated layer, matrices of the gate alternate with those of the
    other half. They must all have the same number of rows, and lie in one piece each;
    where they do not, the files have no place for them.

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
    """Name modules or tensors as they were before PEFT came, without its adapters."""
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
        prefix: Name of the base model, which a model with another head may have or not.

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
        # The name of a layer in a block: list, number and the rest.
        any_list = "|".join(map(re.escape, lists))
        self._in_list = re.compile(rf"({any_list})\.(\d+)\.(.+)")
        self.lists = {
            path: (_own_end(path.split("."), paths), count)
            for path, count in lists.items()
        }

    def of(
        self, groups: Mapping[str, Sequence[str]], ungrouped: Sequence[str]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """The targets of each group, and what is to be ignored.

        Args:
            groups: Names of the modules of each group.
            ungrouped: Names of linear layers that are in no group.

        Returns:
            Patterns after "re:", which match the names as `re.match` does. Where they
            would not tell the groups apart, the names.
        """
        owners = {name: group for group, members in groups.items() for name in members}
        tails = self._tails({**dict.fromkeys(ungrouped), **owners})
        targets = {
            group: self._patterns(members, tails) for group, members in groups.items()
        }
        ignore = self._patterns(ungrouped, tails)
        for name in self.names:
            found = [group for group in targets if _matches(name, targets[group])]
            if _matches(name, ignore):
                found = []
            if found != ([owners[name]] if name in owners else []):
                names = {group: list(members) for group, members in groups.items()}
                return names, list(ungrouped)
        return targets, ignore

    def _tails(self, owners: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
        """Return a name's last part if only layers of its group have it in their block, else all parts.

        Before it stands the pattern of what may lie between the block and this part.
        """
        groups_with: dict[tuple[str, str, str], set[str | None]] = {}
        places: dict[str, tuple[str, str, str]] = {}
        rests: dict[str, str] = {}
        for name, owner in owners.items():
            match = self._in_list.fullmatch(name)
            if match is not None:
                path, index, rest = match.groups()
                rests[name] = rest
                places[name] = (path, index, rest.rpartition(".")[2])
                groups_with.setdefault(places[name], set()).add(owner)
        tails = {}
        for name, place in places.items():
            last = place[2]
            # The whole rest of a name has nothing between it and its block.
            is_whole = len(groups_with[place]) > 1 or rests[name] == last
            tails[name] = ("", rests[name]) if is_whole else (_ANY, last)
        return tails

    def _patterns(
        self, members: Sequence[str], tails: Mapping[str, tuple[str, str]]
    ) -> list[str]:
        places: dict[tuple[str, str, str], dict[str, None]] = {}
        patterns = []
        for name in members:
            match = self._in_list.fullmatch(name)
            if match is None:
                own = re.escape(name.removeprefix(self.prefix))
                patterns.append(f"re:{_ANY}{own}$")
            else:
                places.setdefault((match[1], *tails[name]), {})[match[2]] = None
        # Layers of the same blocks have one pattern.
        shared: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
        for (path, between, tail), numbers in places.items():
            key = (path, tuple(numbers), between)
            shared.setdefault(key, []).append(re.escape(tail))
        for (path, indices, between), ends in shared.items():
            # vLLM's StableLM and GPT-J and SGLang's BERT do not look them up by their parts.
            ends += [whole for parts, whole in FUSED.items() if set(parts) <= set(ends)]
            end, count = self.lists[path]
            number = r"\d+" if len(indices) == count else _either(indices)
            patterns.append(f"re:{_ANY}{end}\\.{number}\\.{between}{_either(ends)}$")
        return _needed(patterns, members)


def _needed(patterns: Sequence[str], members: Sequence[str]) -> list[str]:
    """Drop patterns whose layers other patterns match too; loading warns of them."""
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
    """Return a pattern for the shortest end of a list's name that no other list has."""
    for k in range(1, len(path) + 1):
        if sum(other[-k:] == path[-k:] for other in paths) == 1:
            return rf"\.{_ANY}".join(re.escape(part) for part in path[-k:])
    return re.escape(".".join(path))
