"""`LayoutSpec`: how a folder holds its weights, and what loads them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..schedule import FLOAT_BITS
from ..weight_matrix import is_experts
from ..weight_spec import DENSE, FLOAT, MAX_PACKED_BITS, SharedScheme, WeightSpec
from .stored import Form


@dataclass(frozen=True)
class LayoutSpec:
    """How a folder holds its weights. The methods are those of compressed-tensors; other layouts override them.

    Attributes:
        name: The layout's name for users and in `moq_state.json`.
        forms: The forms that it may contain, of which a layer takes the first that fits;
            the last one fits every layer.
        needs: The least versions that load every folder as it was evaluated. They were
            tried, and so were the versions before them (`benchmarks/versions.py`);
            "gemma" and "mxfp4" only with 5.23.0. Older ones load some models all the
            same, and end with an error on others.
        method: The `quant_method` in `quantization_config`.
        unpacks: Whether all codes are unpacked while loading, which knows one scheme
            for all layers, with as many bits as the widest layer has.
        has_inputs: Whether the files can say how inputs are rounded, and keep scales in
            half precision.
        is_for_transformers_alone: Whether servers do not know the method, and older
            versions of transformers load other weights without an error.
        stays: Why it has no codes for a layer that could be packed.
        delivered: How a folder in it is delivered, in words.
    """

    name: str
    forms: tuple[Form, ...]
    needs: Mapping[str, str]
    method: str = "compressed-tensors"
    unpacks: bool = False
    has_inputs: bool = False
    is_for_transformers_alone: bool = False
    stays: str = ""
    delivered: str = "packed"

    @property
    def has_own_method(self) -> bool:
        """True if transformers loads it without compressed-tensors."""
        return self.method != "compressed-tensors"

    @property
    def is_left_packed(self) -> bool:
        """True if modules hold codes after loading, which the model's first call unpacks."""
        has_codes = self.forms[0].name != DENSE
        return has_codes and not (self.unpacks or self.has_own_method)

    def comes_first(self, model_type: str, specs: Collection[WeightSpec]) -> bool:
        """True if a model gets this layout when none is asked for."""
        return False

    def leaves_alone(
        self, model: nn.Module, spec: WeightSpec, layer: nn.Module
    ) -> bool:
        """True if loading leaves a module of the model as it is, whatever the files say."""
        return False

    def takes_inputs(self, spec: WeightSpec) -> bool:
        """True if the files can say how the inputs of a layer are rounded."""
        return spec.input_fault is None

    def misfit(self, placed: Collection[WeightSpec]) -> str | None:
        """Why a model cannot be delivered in this layout, in words; None if it can."""
        return None

    def form_of(self, spec: WeightSpec) -> Form:
        """The first form that fits a weight."""
        return next(form for form in self.forms if form.fits(spec))

    def placed(self, specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
        """Give weights the forms that they have in such a folder, and the scheme and width that they share."""
        shared = _shared_scheme(specs.values()) if self.unpacks and specs else None
        found = {}
        alike = []
        for name, spec in specs.items():
            spec = replace(spec, shared=shared)
            if spec.bits == FLOAT_BITS or spec.blended:
                found[name] = replace(spec, stored=FLOAT)
                continue
            form = self.form_of(spec)
            found[name] = replace(spec, stored=form.name)
            if form.stays_packed and (self.unpacks or is_experts(spec.kind)):
                alike.append(name)
        # All of these have codes of the most bits that any has; packed experts do in any layout.
        width = max([2, *(found[name].width for name in alike)])
        return found | {name: replace(found[name], pack_bits=width) for name in alike}

    def config(
        self,
        groups: Mapping[str, dict[str, Any]],
        targets: Mapping[str, Sequence[str]],
        ignore: Sequence[str],
        has_tables: bool,
    ) -> dict[str, Any]:
        """The `quantization_config` for `config.json`.

        Args:
            groups: The config groups of compressed-tensors by name, without targets.
            targets: Patterns for the layers of each group, or their names.
            ignore: Patterns for modules that stay as they are, or their names.
            has_tables: Whether tables have codes.
        """
        formats = {group["format"] for group in groups.values()}
        return {
            "config_groups": {
                name: {"targets": targets[name], **group}
                for name, group in groups.items()
            },
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ignore,
        }


def _shared_scheme(specs: Collection[WeightSpec]) -> SharedScheme:
    linears = [
        spec
        for spec in specs
        if not spec.is_table and (spec.kind == "linear" or is_experts(spec.kind))
    ]
    grids = [spec.grid for spec in linears or specs]
    # Layers with other groups, which `overrides` may give, repeat their scales.
    row_size = math.gcd(*(grid.grouping.row_size or 0 for grid in grids)) or None
    coded = [spec for spec in specs if spec.bits <= MAX_PACKED_BITS]
    others = [spec for spec in coded if not spec.is_table]
    widest = max((spec.bits for spec in coded), default=0)
    width = max((spec.bits for spec in others), default=0)
    # Tables stay floats if giving all other codes their bits would make the files grow.
    others_size = sum(spec.numbers for spec in others)
    table_size = sum(spec.numbers for spec in coded) - others_size
    growth = (widest - width) * others_size
    saved = (8 * torch.float32.itemsize - widest) * table_size
    formats = {spec.format for spec in linears or specs}
    format = formats.pop() if len(formats) == 1 else "int"
    return SharedScheme(row_size, grids[0].symmetric, growth <= saved, format)
