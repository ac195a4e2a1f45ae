"""The layouts and forms of delivery, and the library versions that they need."""

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version

from packaging.version import Version

from ..errors import shortened
from ..weight_matrix import is_experts
from ..weight_spec import WeightSpec
from . import float_quantized, floats, gemma, int_quantized, mxfp4, pack_quantized
from .layout import LayoutSpec
from .stored import Form

# Servers take "packed": after loading, the modules hold packed weights, which the model's first forward pass unpacks.
# It does not fit models whose `_init_weights` reaches into other weights (T5), nor those whose parts are called
# separately (BART's encoder by `generate`, the towers of CLIP). Nor can transformers load packed zero points that way,
# which is how servers take asymmetric grids. These models are "unpacked". If neither computes what the model did, the
# layout is "floats": ordinary rounded weights. "gemma" is written only on request: plain transformers keeps such
# weights packed, and no server takes them. "mxfp4" is for GPT-OSS with experts in MXFP4.
_LAYOUTS = (
    LayoutSpec(
        "packed",
        forms=(
            float_quantized.FORM,
            pack_quantized.FORM,
            int_quantized.FORM,
            floats.FORM,
        ),
        needs={"transformers": "5.15.0", "compressed-tensors": "0.17.0"},
        has_inputs=True,
    ),
    LayoutSpec(
        "unpacked",
        forms=(float_quantized.FORM, pack_quantized.FORM, floats.FORM),
        needs={"transformers": "5.23.0", "compressed-tensors": "0.18.0"},
        unpacks=True,
        delivered="unpacked while loading",
    ),
    LayoutSpec(
        "floats",
        forms=(floats.FORM,),
        needs={"transformers": "5.0.0"},
        stays="the layout floats has no codes",
    ),
    gemma.LAYOUT,
    mxfp4.LAYOUT,
)
# A layout by its name.
Layout = str
LAYOUTS: dict[Layout, LayoutSpec] = {layout.name: layout for layout in _LAYOUTS}
# The forms by their names in `moq_state.json`.
FORMS: dict[str, Form] = {
    form.name: form for layout in _LAYOUTS for form in layout.forms
}
# Unusual endings of tensors' names, each with its part of a weight; see `Form`.
ENDINGS = {
    ending: part for form in FORMS.values() for ending, part in form.endings.items()
}

# The least versions for packed FP4, and for experts in FP8: no others were tried.
FP4_NEEDS = {"transformers": "5.23.0", "compressed-tensors": "0.20.0"}
# The least version that was tried with packed FP8.
_FP8_LEAST = "5.17.0"
# From this version on, compressed-tensors packs codes without gaps, and reads no others,
# if their width does not divide a word of 32 bits.
GAPLESS = "0.18.0"

# Why no layout with codes fits a model.
TAKEN_APART = "transformers takes the weights of this class apart while loading"


def needs_of(layout: LayoutSpec, placed: Collection[WeightSpec]) -> dict[str, str]:
    """The least versions of the libraries that load a folder.

    Args:
        layout: The folder's layout.
        placed: The weights in the folder.

    >>> packed = [WeightSpec("linear", (8, 8), bits, stored="packed") for bits in (4, 2, 3)]
    >>> [needs_of(LAYOUTS["packed"], packed[:count])["compressed-tensors"] for count in (2, 3)]
    ['0.17.0', '0.18.0']
    """
    if not any(spec.has_codes for spec in placed):
        layout = LAYOUTS["floats"]
    packed = [spec for spec in placed if spec.stored == pack_quantized.FORM.name]
    fp8 = [spec for spec in placed if spec.stored == float_quantized.FORM.name]
    has_experts = any(is_experts(spec.kind) for spec in fp8)
    if has_experts or any(spec.format != "int" for spec in packed):
        return FP4_NEEDS
    needs = dict(layout.needs)
    if fp8:
        needs["transformers"] = max(needs["transformers"], _FP8_LEAST, key=Version)
    library = "compressed-tensors"
    if library in needs and any(has_gaps(spec.width) for spec in packed):
        needs[library] = max(needs[library], GAPLESS, key=Version)
    return needs


def has_gaps(width: int) -> bool:
    """True if codes of this width do not fill words of 32 bits.

    >>> [width for width in range(2, 9) if has_gaps(width)]
    [3, 5, 6, 7]
    """
    return 32 % width != 0


def installed(library: str) -> str:
    """The version of a library that is installed here."""
    return version(library)


def lacking(needs: Mapping[str, str]) -> str:
    """Name the least versions that are newer than the installed ones; "" if there are none.

    >>> lacking({"transformers": "5.0.0"})
    ''
    """
    older = [
        f"{library} >= {least} ({installed(library)} is installed)"
        for library, least in needs.items()
        if Version(installed(library)) < Version(least)
    ]
    return " and ".join(older)


def first_layout(model_type: str, specs: Collection[WeightSpec]) -> LayoutSpec | None:
    """The layout that is the first choice for a special type of model; None for any other model."""
    found = (spec for spec in _LAYOUTS if spec.comes_first(model_type, specs))
    return next(found, None)


def at_full_size(reasons: Mapping[str, Sequence[str]], count: int) -> str:
    """Say which layers are saved as floats, and why.

    Args:
        reasons: Each reason with the layers to which it applies.
        count: The number of quantized layers.

    >>> at_full_size({"2 bits are the fewest that are packed": ["layer.0", "layer.1"]}, 2)
    'every quantized layer is saved as rounded floats, at full size: 2 bits are the fewest that are packed'
    >>> at_full_size({"transposed experts are not packed": ["experts.down"]}, 2)
    'these layers are saved as rounded floats, at full size: transposed experts are not packed (experts.down)'
    """
    is_all = sum(map(len, reasons.values())) == count
    who = "every quantized layer is" if is_all else "these layers are"
    told = (
        list(reasons)
        if is_all
        else [f"{why} ({shortened(names)})" for why, names in reasons.items()]
    )
    return f"{who} saved as rounded floats, at full size: {'; '.join(told)}"
