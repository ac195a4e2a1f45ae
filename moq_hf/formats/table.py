"""Which forms of delivery there are, and which may stand in one folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Literal

from packaging.version import Version

from ..errors import shortened
from . import floats, gemma, int_quantized, mxfp4, pack_quantized
from .stored import EncodeSpec, Form

Layout = Literal["packed", "unpacked", "floats", "gemma", "mxfp4"]


# Each form by the name that `moq_state.json` has for it.
FORMS: dict[Form, ModuleType] = {
    "packed": pack_quantized,
    "int8": int_quantized,
    "dense": floats,
    "gemma": gemma,
    "mxfp4": mxfp4,
}


@dataclass(frozen=True)
class LayoutSpec:
    """How the weights of a folder lie.

    Attributes:
        forms: Those that may stand in it, of which a layer takes the first that fits.
        needs: The least versions that load every folder as it was evaluated. They were
            tried, with the versions before them (`benchmarks/versions.py`); "gemma" and
            "mxfp4" with 5.23.0 alone. Older ones load some models all the same, and end
            with an error on others.
        method: What `quantization_config` calls its `quant_method`.
        has_inputs: Whether the files can say how inputs are rounded, and keep scales of
            half precision.
        stays: Why it has no codes for a layer that could be packed.
        delivered: How, in words, what comes in it is delivered.
    """

    forms: tuple[Form, ...]
    needs: Mapping[str, str]
    method: str = "compressed-tensors"
    has_inputs: bool = False
    stays: str = ""
    delivered: str = "packed"

    @property
    def has_own_method(self) -> bool:
        """Whether transformers loads it by another library than compressed-tensors."""
        return self.method != "compressed-tensors"


# "packed" is what servers take: the modules hold packed weights after
# loading, and the model's first forward pass unpacks them. It does not fit models whose `_init_weights` reaches into
# other weights (T5), nor those whose parts are called by themselves (the encoder by `generate` of BART, the towers of
# CLIP). Nor can transformers load packed zero points so, which is how servers take asymmetric grids. These models are
# "unpacked": unpacked while loading (`dequantize`), which knows one scheme for all layers, with as many bits as the
# largest layer has. Where neither computes what the model did, the layout is "floats": ordinary weights on their
# grid. "gemma" is written where it is asked for alone: plain transformers keeps such weights packed, and no server
# takes them. "mxfp4" is of GPT-OSS whose experts are all in MXFP4.
LAYOUTS: dict[Layout, LayoutSpec] = {
    "packed": LayoutSpec(
        forms=("packed", "int8", "dense"),
        needs={"transformers": "5.15.0", "compressed-tensors": "0.17.0"},
        has_inputs=True,
    ),
    "unpacked": LayoutSpec(
        forms=("packed", "dense"),
        needs={"transformers": "5.23.0", "compressed-tensors": "0.18.0"},
        delivered="unpacked while loading",
    ),
    "floats": LayoutSpec(
        forms=("dense",),
        needs={"transformers": "5.0.0"},
        stays="the layout floats has no codes",
    ),
    "gemma": LayoutSpec(
        forms=("gemma", "dense"),
        needs={"transformers": "5.23.0"},
        method="gemma",
        has_inputs=True,
        stays="the layout gemma has no codes for convolutions, experts, tied tables and what transformers keeps in "
        "float32",
    ),
    "mxfp4": LayoutSpec(
        forms=("mxfp4", "dense"),
        needs={"transformers": "5.23.0"},
        method="mxfp4",
        stays="the layout mxfp4 has codes for experts alone",
        delivered="as OpenAI's own checkpoints are",
    ),
}

# The same of folders whose codes are floats: no others were tried.
FP4_NEEDS = {"transformers": "5.23.0", "compressed-tensors": "0.20.0"}
# Widths that do not divide a word of 32 bits. compressed-tensors packs them without gaps
# from this version on, and reads no others than it packs.
GAPLESS = "0.18.0"

# Why no layout with codes fits a model.
TAKEN_APART = "transformers takes the weights of this class apart while loading"


def needs_of(
    layout: Layout, widths: Collection[int], is_fp4: bool = False
) -> dict[str, str]:
    """The least versions of the libraries that load a folder.

    Args:
        layout: Of the folder.
        widths: The bits that its packed codes take.
        is_fp4: Whether packed codes are floats.

    >>> needs_of("packed", {2, 4})["compressed-tensors"], needs_of("packed", {3, 4})["compressed-tensors"]
    ('0.17.0', '0.18.0')
    """
    if is_fp4 and layout != "mxfp4":
        return FP4_NEEDS
    needs = dict(LAYOUTS[layout].needs)
    library = "compressed-tensors"
    if library in needs and any(map(has_gaps, widths)):
        needs[library] = max(needs[library], GAPLESS, key=Version)
    return needs


def has_gaps(width: int) -> bool:
    """Whether words of 32 bits hold no whole number of codes.

    >>> [width for width in range(2, 9) if has_gaps(width)]
    [3, 5, 6, 7]
    """
    return 32 % width != 0


def installed(library: str) -> str:
    """The version of a library that is installed here."""
    return version(library)


def lacking(needs: Mapping[str, str]) -> str:
    """Which of the least versions are newer than what is installed, in words; "" if none is.

    >>> lacking({"transformers": "5.0.0"})
    ''
    """
    older = [
        f"{library} >= {least} ({installed(library)} is installed)"
        for library, least in needs.items()
        if Version(installed(library)) < Version(least)
    ]
    return " and ".join(older)


def form_of(spec: EncodeSpec, layout: Layout) -> Form:
    """The first form of a layout that fits a layer; floats fit every layer."""
    return next(name for name in LAYOUTS[layout].forms if FORMS[name].fits(spec))


def at_full_size(reasons: Mapping[str, Sequence[str]], count: int) -> str:
    """Say which layers are saved as floats, and why.

    Args:
        reasons: Why, and the layers of which that is true.
        count: How many quantized layers there are.

    >>> at_full_size({"2 bits are the fewest that are packed": ["layer.0", "layer.1"]}, 2)
    'every quantized layer is saved as floats on the grid, at full size: 2 bits are the fewest that are packed'
    >>> at_full_size({"transposed experts are not packed": ["experts.down"]}, 2)
    'these layers are saved as floats on the grid, at full size: transposed experts are not packed (experts.down)'
    """
    is_all = sum(map(len, reasons.values())) == count
    who = "every quantized layer is" if is_all else "these layers are"
    told = (
        list(reasons)
        if is_all
        else [f"{why} ({shortened(names)})" for why, names in reasons.items()]
    )
    return f"{who} saved as floats on the grid, at full size: {'; '.join(told)}"


def has_codes(form: Form) -> bool:
    """Whether the files hold codes for a layer of this form; otherwise they hold floats.

    >>> has_codes("packed"), has_codes("float")
    (True, False)
    """
    return form in FORMS and FORMS[form].FORMAT is not None
