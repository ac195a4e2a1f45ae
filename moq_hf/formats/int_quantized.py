"""A byte for each weight: compressed-tensors' `int-quantized`, for embedding tables and layers with int8 inputs.

transformers initializes tables, and ties weights, by the name `weight`, which the codes
keep. Modules that are tied to the table have the same codes, which are stored once, and
their own scales.
"""

from torch import Tensor, nn

from ..quantizer import Quantized
from ..weight_spec import MAX_PACKED_BITS, WeightSpec
from . import compressed
from .stored import EncodedWeight, Form


def fits(spec: WeightSpec) -> bool:
    """True for tables of 2 to 8 bits, and for layers whose weights and inputs both have 8."""
    return (
        (spec.is_table or spec.multiplies_bytes)
        and 2 <= spec.bits <= MAX_PACKED_BITS
        and spec.kind in ("linear", "embedding")
    )


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode codes in int8, scales and zero points."""
    return compressed.write(values, spec, "int-quantized")


def unsaved_buffers(name: str, table: nn.Module) -> dict[str, Tensor]:
    """The buffers of an embedding table that `save_pretrained` leaves out, such as the scale of Gemma's, by name.

    compressed-tensors turns them into parameters, which transformers then misses in the files.
    """
    saved = table.state_dict()
    return {
        f"{name}.{buffer}": tensor.cpu()
        for buffer, tensor in table.named_buffers(recurse=False)
        if buffer not in saved
    }


FORM = Form("int8", fits, write, compressed.read)
