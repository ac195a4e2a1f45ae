"""Which servers can serve a model, before training and for a delivered folder.

A server's row in `servers` is compared with a description of the model, which comes
from its inventory before training, and from a folder's files afterwards.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import either, shortened
from .formats.table import LAYOUTS, installed
from .schedule import FLOAT_BITS
from .servers import TRANSFORMERS, WITHOUT, Server, fused_units
from .text import table
from .weight_spec import WeightSpec


@dataclass(frozen=True)
class Description:
    """A model as a server meets it.

    Attributes:
        architecture: The name of the model's class.
        weights: Quantized weights by the name of their module.
        floats: Names of other modules with weights.
        is_encoder_decoder: Whether there is an encoder beside the decoder.
        unserved: Why plain transformers does not compute what was evaluated; None if it
            does, or nobody tried.
        scales: Dtype of the scales in the file.
        layout: How the files hold the weights; see `formats.table`.
        has_adapters: Whether adapters of PEFT stay beside it.
    """

    architecture: str
    weights: Mapping[str, WeightSpec]
    floats: Collection[str] = ()
    is_encoder_decoder: bool = False
    unserved: str | None = None
    scales: str = "float32"
    layout: str = "packed"
    has_adapters: bool = False


# Experts in one tensor, as only checkpoints of GPT-OSS and Llama 4 should have them.
WHOLE_EXPERTS = re.compile(r"^(?!GptOss|Llama4).*\.experts\.(gate_up_proj|down_proj)$")
Answer = Literal["yes", "no", "not tried"]


@dataclass(frozen=True)
class Verdict:
    """The answer to whether a server takes a model, with reasons.

    Attributes:
        server: The server.
        answer: Whether it takes the model; "not tried" if the model fits but its class
            was never tried.
        reasons: Why it does not take the model: a text for each reason, with the layers
            concerned and what would be served.
        notes: What to know if it does.
    """

    server: Server
    answer: Answer
    reasons: list[str]
    notes: tuple[str, ...] = ()


def verdict(model: Description, server: Server) -> Verdict:
    """Decide whether a server takes a model.

    >>> from moq_hf.servers import SGLANG
    >>> weight = WeightSpec("linear", (64, 128), 3, stored="packed")
    >>> model = Description("LlamaForCausalLM", {"model.layers.0.mlp.down_proj": weight})
    >>> print(verdict(model, SGLANG).reasons[0])
    its kernels take 4 or 8 bits, not 3 (model.layers.0.mlp.down_proj); 4 or 8 bits are served
    """
    reasons = _reasons(model, server)
    notes = []
    is_tried = server is TRANSFORMERS or model.architecture in server.tried.split()
    if not is_tried:
        notes.append(f"no {model.architecture} was tried with it")
    layout = LAYOUTS[model.layout]
    if layout.is_for_transformers_alone and server is TRANSFORMERS:
        least = layout.needs["transformers"].removesuffix(".0")
        notes.append(
            f"from {least} on: older versions do not know quant_method {layout.method}"
        )
    if model.has_adapters and server.takes_adapters and server is not TRANSFORMERS:
        notes.append(
            "adapters beside the folder need its own options for them, which were not tried"
        )
    has_half_scales = server.half_scales and any(
        weight.is_served_as_codes and not _multiplies(server, weight)
        for weight in model.weights.values()
    )
    if has_half_scales and model.scales == "float32":
        notes.append("scales are rounded to half precision there")
    rounded = [weight for weight in model.weights.values() if weight.inputs]
    grids = {
        weight.inputs for weight in rounded if weight.inputs and weight.format == "int"
    }
    per_token = {grid.symmetric for grid in grids if grid.scale == "per_token"}
    if server.inputs and not all(_multiplies(server, weight) for weight in rounded):
        notes.append(server.inputs)
    elif server.has_bytes and True in per_token:
        notes.append(
            "its scale for a token is the largest magnitude over 127, not over 127.5"
        )
    elif server.has_bytes and per_token:
        notes.append("inputs with a zero point for each token were not tried with it")
    answer: Answer = "no"
    if not reasons:
        answer = "yes" if is_tried else "not tried"
    if server is TRANSFORMERS:
        # The installed version loads and proves the delivered model.
        server = replace(server, version=installed("transformers"))
    return Verdict(server, answer, reasons, tuple(notes))


def _multiplies(server: Server, weight: WeightSpec) -> bool:
    """True if a kernel of the server multiplies the codes of a weight with those of its inputs."""
    has_kernel = server.has_bytes
    if weight.format == "fp8":
        has_kernel |= "fp8" in server.formats
    return has_kernel and weight.multiplies_bytes


def _reasons(model: Description, server: Server) -> list[str]:
    architecture = model.architecture
    reasons = [
        why for why, classes in server.refused if architecture in classes.split()
    ]

    if server.classes and (
        model.is_encoder_decoder or not re.search(server.classes, architecture)
    ):
        reasons.append(f"{architecture} is not exported; {server.instead}")
    if reasons:
        # No grid helps a class that is not served at all.
        return reasons
    if model.has_adapters and not server.takes_adapters:
        reasons.append(
            'it takes one model, without adapters beside it; LoRA with lora "merged" is served'
        )
    layout = LAYOUTS[model.layout]
    if server is not TRANSFORMERS and layout.is_for_transformers_alone:
        reasons.append(
            f"it does not know transformers' quant_method {layout.method}; any other layout is served"
        )
    if server is TRANSFORMERS and model.unserved is not None:
        reasons.append(
            f"it does not answer as the model did: {model.unserved}; see the proof in moq_state.json"
        )
    if server.scale_dtype not in ("", model.scales):
        reasons.append(
            f'its scales are {server.scale_dtype}, not {model.scales}; scale_dtype "{server.scale_dtype}" is served'
        )
    # Fault -> {layer: offending value}.
    faults: dict[tuple[str, str], dict[str, Any]] = {}
    for text, instead, names in _unlike_siblings(model) if server.fuses else ():
        faults[text, instead] = dict.fromkeys(names)
    for name, weight in model.weights.items():
        for text, value, instead in _faults(f"{architecture} {name}", weight, server):
            faults.setdefault((text, instead), {})[name] = value
    for (text, instead), layers in faults.items():
        values = [value for value in layers.values() if value is not None]
        told = f"{text}, not {either(values)}" if values else text
        reasons.append(f"{told} ({shortened(layers)}); {instead}")
    return reasons


def _faults(
    name: str, weight: WeightSpec, server: Server
) -> Iterator[tuple[str, int | None, str]]:
    """Yield why a server does not take a weight, the number that does not fit (if any), and what would be served.

    Args:
        name: The model's class and the layer's name, with a space in between.
        weight: The layer's weight.
        server: The server.
    """
    if weight.bits != FLOAT_BITS:
        for kind in server.without:
            is_matrix = kind == "experts" and ".experts." in name
            is_packed = is_matrix and weight.is_served_as_codes
            if weight.kind.startswith(kind) or is_packed:
                text, instead = WITHOUT[kind]
                yield text, None, instead
    if weight.is_served_as_codes and re.search(server.in_float, name):
        yield (
            "it takes these layers in float, whatever the checkpoint holds",
            None,
            "name them in modules_to_not_convert, beside the output heads",
        )
    is_packed = weight.has_codes and weight.kind != "embedding"
    has_codes = weight.bits != FLOAT_BITS if server.repacks else is_packed
    if not has_codes or _multiplies(server, weight):
        return
    if weight.format not in server.formats:
        # What it says of other numbers would be about codes that it does take.
        yield f"it does not take {weight.format}", None, 'format "int" is served'
        return
    yield from _kernel_faults(name, weight, server)
    yield from _number_faults(weight, server)


def _number_faults(
    weight: WeightSpec, server: Server
) -> Iterator[tuple[str, int | None, str]]:
    """Yield which of a weight's numbers a server's kernels do not take, as `_faults` does."""
    legal = server.symmetric if weight.symmetric else server.asymmetric
    bits = weight.bits if server.repacks else weight.width
    if bits not in legal:
        taken = f"{either(legal)} bits" + " with zero points" * (not weight.symmetric)
        if not legal:
            taken = f"{either(server.symmetric)} bits without zero points"
        yield f"its kernels take {taken}", bits, f"{taken} are served"
    size = weight.row_size if weight.format == "int" else None
    if size and (size % server.multiple or size not in (server.groups or [size])):
        groups = either(server.groups) or f"a multiple of {server.multiple}"
        instead = f"group_size {groups}, or per channel, is served"
        if weight.kind == "embedding":
            instead = "embeddings 8 is served"
        yield f"its groups are {groups}", size, instead
    rows, columns = weight.shape
    # A block of NVFP4 in llama.cpp is four groups.
    is_in_fours = server.repacks and weight.format == "nvfp4"
    multiple = 64 if is_in_fours else server.columns
    if columns % multiple:
        yield _sizes("columns (in_features)", multiple, columns)
    if rows % server.rows:
        yield _sizes("rows (out_features)", server.rows, rows)


def _kernel_faults(
    name: str, weight: WeightSpec, server: Server
) -> Iterator[tuple[str, None, str]]:
    """Yield why the arithmetic of a server's kernels is not that of a weight, as `_faults` does."""
    if server.fuses and weight.format == "fp8" and ".experts." in name:
        text = "it takes experts in fp8 only with rounded inputs, which experts do not have"
        yield text, None, 'format "int" is served'
    inputs = server.input_grid
    if inputs not in (None, weight.inputs):
        yield (
            f"it rounds inputs to {inputs.bits} bits ({inputs.in_words}), which the folder does not",
            None,
            f'activations {{"bits": {inputs.bits}, "scale": "{inputs.scale}", "symmetric": '
            f"{str(inputs.symmetric).lower()}}} are served",
        )
    if server.positive_scales and weight.full:
        yield (
            "its kernels take positive scales, and a full range has negative ones",
            None,
            'range "narrow" is served',
        )


def _sizes(what: str, multiple: int, count: int) -> tuple[str, int, str]:
    text = f"its kernels take a multiple of {multiple} {what}"
    return text, count, "name these in modules_to_not_convert"


def _unlike_siblings(model: Description) -> Iterator[tuple[str, str, list[str]]]:
    """Yield layers that a server fuses and that do not go together: why, what would be served, and their names."""
    grids = dict.fromkeys(model.floats, "floats")
    grids |= {name: weight.as_served for name, weight in model.weights.items()}
    # In a model without codes the files name each expert.
    whole = [
        name
        for name, grid in grids.items()
        if grid == "floats" and WHOLE_EXPERTS.search(f"{model.architecture} {name}")
    ]
    if whole and {*grids.values()} != {"floats"}:
        instead = "symmetric experts of up to 8 bits are served"
        yield "it looks for each expert by its own name", instead, whole
    unlike: dict[str, list[str]] = {}
    for unit, names in fused_units(grids).items():
        different = sorted({grids[name] for name in names})
        if len(different) > 1:
            what = unit.rpartition(".")[2].replace("-", ", ")
            what = "all experts of a block" if what == "experts" else what
            unlike.setdefault(f"{what} ({' and '.join(different)})", []).extend(names)
    instead = "all of them quantized alike, or all of them in float, are served"
    for what, names in unlike.items():
        yield f"it makes one layer of {what}", instead, names


def served_table(verdicts: Sequence[Verdict]) -> str:
    """A line per server, and a line for each reason, for a terminal."""
    rows: list[tuple[str, str, str]] = []
    for verdict in verdicts:
        first, *others = verdict.reasons or verdict.notes or [""]
        rows.append((verdict.server.name, verdict.answer, first))
        rows += [("", "", text) for text in others]
    return "\n".join(["served by", table(rows, left=(0, 1, 2))])
