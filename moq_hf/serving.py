"""Who can serve a model: what each server takes, asked before training and of a folder.

A server is a row of `SERVERS`. What it says is compared with a description of the
model, which is made of its inventory before training and of a folder's files after it.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import either, shortened
from .formats.table import LAYOUTS, installed
from .grid import Format
from .schedule import FLOAT_BITS
from .text import table
from .weight_spec import WeightSpec

# Layers that vLLM and SGLang fuse into one, and what they call it.
FUSED = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("query", "key", "value"): "qkv_proj",
}


def fused_units(layers: Iterable[str]) -> dict[str, list[str]]:
    """Group the layers that must have equal bits: those that servers fuse into one, and the experts of a layer.

    >>> fused_units(["q_proj", "k_proj", "o_proj", "v_proj"])
    {'q_proj-k_proj-v_proj': ['q_proj', 'k_proj', 'v_proj'], 'o_proj': ['o_proj']}
    """
    units: dict[str, list[str]] = {}
    for layer in layers:
        parent, _, last_part = layer.rpartition(".")
        around, among, _ = f"{layer}.".partition(".experts.")
        fused = next((names for names in FUSED if last_part in names), (last_part,))
        unit = f"{around}.experts" if among else f"{parent}.{'-'.join(fused)}"
        units.setdefault(unit.lstrip("."), []).append(layer)
    return units


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
        layout: How the weights lie there; see `formats.table`.
    """

    architecture: str
    weights: Mapping[str, WeightSpec]
    floats: Collection[str] = ()
    is_encoder_decoder: bool = False
    unserved: str | None = None
    scales: str = "float32"
    layout: str = "packed"


@dataclass(frozen=True)
class Server:
    """What a server takes.

    Attributes:
        key: Its name in results, and in `serve` if it can be named there.
        title: Its name for people.
        version: That for which this row was checked.
        symmetric: Bits of a symmetric grid.
        asymmetric: Bits of a grid with zero points.
        groups: Sizes of groups; empty for all.
        multiple: What a size of groups must be a multiple of.
        columns: What the columns of a weight must be a multiple of.
        rows: What the rows of a layer must be a multiple of, those of a fused layer
            together.
        fuses: Whether it makes one layer of those in `FUSED` and of the experts of a
            block, which need one grid then.
        without: Kinds of layers that it takes as floats alone, of `_WITHOUT`.
        repacks: Whether moq_hf writes its file, where all that is on a grid becomes
            codes.
        has_bytes: Whether a kernel of its multiplies 8 bits with 8 bits, per channel,
            whatever the other fields say.
        inputs: What it does with rounded inputs where it does not multiply so.
        formats: What codes of 4 bits may be.
        classes: What the name of a model's class must be like, and there may be no
            decoder beside an encoder then.
        in_float: Names of layers that it takes as floats alone, after the name of the
            model's class and a space.
        half_scales: Whether it computes with scales in half precision.
        tried: Classes of which a model was served, or one whose weights are loaded by
            the same code.
        refused: Why classes are refused whatever their grid is, and those classes.
    """

    key: str
    title: str
    version: str
    symmetric: Collection[int]
    asymmetric: Collection[int]
    groups: tuple[int, ...] = ()
    multiple: int = 1
    columns: int = 1
    rows: int = 1
    fuses: bool = False
    without: tuple[str, ...] = ()
    repacks: bool = False
    has_bytes: bool = False
    inputs: str = ""
    formats: tuple[Format, ...] = ("int", "mxfp4", "nvfp4")
    classes: str = ""
    in_float: str = "$^"
    half_scales: bool = True
    tried: str = ""
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}"


# Kinds of layers that some servers do not take, and what they take.
_WITHOUT = {
    "conv1d": ("it takes no Conv1D layers on a grid", "models of nn.Linear are served"),
    "experts": (
        "it takes no packed experts",
        "name them in modules_to_not_convert",
    ),
    # Not the matrices of experts, which the packed layout has each by itself.
    "expert": (
        "it has no place for experts that are one tensor in the files",
        "name them in modules_to_not_convert, but GPT-OSS in MXFP4 needs no export: llama.cpp's converter copies its "
        "codes from the folder",
    ),
    "embedding": (
        "embedding tables must be floats",
        "embeddings: null is served",
    ),
}
# A base model's pooler is not loaded at all.
_HEADS = (
    r"(?<!Model) (.*\.)?(pooler\.dense|classifier|classifier\.(dense|out_proj)|head\.dense|lm_head\.dense|"
    r"predictions\.transform\.dense|pre_classifier)$"
)
# These get no name when vLLM makes them, so that no target matches, or are loaded in
# another order of rows.
_UNNAMED = (
    r"MiniCPM3ForCausalLM .*\.q_a_proj$|BloomForCausalLM .*\.query_key_value$|"
    r"(Mamba|FalconMamba|Jamba|FalconH1)ForCausalLM .*\.(in|dt|out)_proj$"
)
_CAUSAL = "LlamaForCausalLM Qwen3ForCausalLM Gemma3ForCausalLM"
_ENCODERS = (
    "BertModel BertForSequenceClassification BertForTokenClassification "
    "ModernBertModel ModernBertForSequenceClassification"
)
TRANSFORMERS = Server(
    "transformers",
    "transformers",
    "5.23.0",
    range(1, 17),
    range(2, 17),
    half_scales=False,
)
# Groups other than 32, 64 and 128, and bits other than 4 and 8, run on its Humming
# kernels. Floats of four bits are as its source has them: none was run with it.
VLLM = Server(
    "vllm",
    "vLLM, CUDA",
    "0.32.0",
    range(2, 9),
    range(2, 9),
    multiple=16,
    fuses=True,
    # Conv1D is floats in the files.
    without=("embedding",),
    has_bytes=True,
    inputs="its kernels leave inputs beside packed weights in float, all but Humming's",
    in_float=f"{_HEADS}|{_UNNAMED}",
    # benchmarks/results/served.json.
    tried=f"{_CAUSAL} {_ENCODERS} "
    "ApertusForCausalLM ArceeForCausalLM BloomForCausalLM Cohere2ForCausalLM "
    "CohereForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM "
    "Gemma2ForCausalLM GemmaForCausalLM Glm4ForCausalLM GlmForCausalLM "
    "GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GraniteForCausalLM HeliumForCausalLM "
    "Mamba2ForCausalLM MiniCPM3ForCausalLM MistralForCausalLM MixtralForCausalLM "
    "NemotronForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM "
    "OlmoForCausalLM OPTForCausalLM Phi3ForCausalLM PhiForCausalLM "
    "Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM "
    "SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM "
    "LlamaForSequenceClassification ModernBertForTokenClassification "
    "Qwen2ForSequenceClassification Qwen3ForSequenceClassification "
    "RobertaForSequenceClassification RobertaModel "
    "XLMRobertaForSequenceClassification",
    refused=(
        (
            "it runs no model of this class, quantized or not",
            "BambaForCausalLM DistilBertForSequenceClassification Lfm2ForCausalLM MptForCausalLM XLMRobertaModel",
        ),
    ),
)
VLLM_CPU = replace(
    VLLM,
    key="vllm-cpu",
    title="vLLM, CPU",
    formats=("int",),
    inputs="its kernels leave inputs beside packed weights in float",
    symmetric=(4,),
    asymmetric=(4,),
    multiple=2,
    columns=32,
    rows=32,
    without=("experts", "embedding"),
)
# Its Marlin kernels, as its source has them: nothing was run with it.
SGLANG = replace(
    VLLM,
    key="sglang",
    title="SGLang",
    version="0.5.23",
    has_bytes=False,
    formats=("int",),
    inputs="",
    symmetric=(4, 8),
    asymmetric=(4,),
    groups=(32, 64, 128),
    multiple=1,
    columns=128,
    rows=64,
    in_float=_HEADS,
    tried="",
    refused=(),
)
# Blocks of 32 in Q4_0, Q4_1 and Q8_0; llama.cpp's converter, whose names the file has,
# drops BERT's pooler.
GGUF = Server(
    "llama.cpp",
    "llama.cpp by moq-hf export",
    "gguf 0.19.0",
    range(1, 9),
    range(2, 5),
    multiple=32,
    columns=32,
    repacks=True,
    without=("expert",),
    inputs="it rounds inputs in blocks of its own",
    in_float=r"(\.| )pooler\.dense$",
    # benchmarks/results/llamacpp.json.
    tried=_CAUSAL,
    refused=(
        (
            "llama.cpp's converter drops the pooler, which this class needs",
            "BertForSequenceClassification",
        ),
        (
            "llama.cpp's converter has the rows of query_key_value in another order",
            "BloomForCausalLM GPTNeoXForCausalLM",
        ),
    ),
)
ONNX = Server(
    "onnxruntime",
    "ONNX Runtime by moq-hf export",
    "1.31.1",
    range(1, 17),
    range(2, 17),
    without=("conv1d", "experts"),
    # What torch.onnx.export cannot trace, and what takes neither texts nor pictures alone.
    classes=r"^(?!.*Head|XLNet|.*Mamba|Jamba|CLIP|Wav2Vec2|WavLM|Whisper).*(For(Sequence|Token|Image)Classification|ForCausalLM|Model)$",
    half_scales=False,
    # The tests of the export.
    tried=f"{_ENCODERS} {_CAUSAL} DebertaV2ForSequenceClassification DistilBertForSequenceClassification "
    "RobertaForSequenceClassification T5EncoderModel ViTModel ViTForImageClassification ResNetForImageClassification "
    "ConvNextForImageClassification",
)
SERVERS = (TRANSFORMERS, VLLM, VLLM_CPU, SGLANG, GGUF, ONNX)
REQUIRED = {server.key: server for server in SERVERS}

# Experts in one tensor, which the checkpoints of GPT-OSS and Llama 4 always had.
WHOLE_EXPERTS = re.compile(r"^(?!GptOss|Llama4).*\.experts\.(gate_up_proj|down_proj)$")
Answer = Literal["yes", "no", "not tried"]


@dataclass(frozen=True)
class Verdict:
    """What a server makes of a model.

    Attributes:
        server: Which one.
        answer: Whether it takes the model; what fits but was never tried with this
            class is "not tried".
        reasons: Why it does not take it: a text for each, with the layers that it is
            about and what would be served.
        notes: What to know if it does.
    """

    server: Server
    answer: Answer
    reasons: list[str]
    notes: tuple[str, ...] = ()


def verdict(model: Description, server: Server) -> Verdict:
    """What a server makes of a model.

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
    has_half_scales = server.half_scales and not all(
        not weight.is_served_as_codes or (weight.multiplies_bytes and server.has_bytes)
        for weight in model.weights.values()
    )
    if has_half_scales and model.scales == "float32":
        notes.append("scales are rounded to half precision there")
    rounded = [weight for weight in model.weights.values() if weight.inputs]
    if server.inputs and not all(
        weight.multiplies_bytes and server.has_bytes for weight in rounded
    ):
        notes.append(server.inputs)
    elif server.has_bytes and any(
        weight.inputs and weight.inputs.scale == "per_token" for weight in rounded
    ):
        notes.append(
            "it takes the largest magnitude of a token over 127 for its scale, not over 127.5"
        )
    answer: Answer = "no"
    if not reasons:
        answer = "yes" if is_tried else "not tried"
    if server is TRANSFORMERS:
        # The one that is installed loads and proves what is delivered.
        server = replace(server, version=installed("transformers"))
    return Verdict(server, answer, reasons, tuple(notes))


def _reasons(model: Description, server: Server) -> list[str]:
    architecture = model.architecture
    reasons = [
        f"{why}; other classes are served"
        for why, classes in server.refused
        if architecture in classes.split()
    ]

    if server.classes and (
        model.is_encoder_decoder or not re.search(server.classes, architecture)
    ):
        instead = "classifiers of texts, tokens and images, decoders, and base models of one stack are served"
        reasons.append(f"{architecture} is not exported; {instead}")
    layout = LAYOUTS[model.layout]
    if server is not TRANSFORMERS and layout.is_for_transformers_alone:
        reasons.append(
            f"it does not know transformers' quant_method {layout.method}; any other layout is served"
        )
    if server is TRANSFORMERS and model.unserved is not None:
        reasons.append(
            f"it does not answer as the model did: {model.unserved}; see the proof in moq_state.json"
        )
    # Of each fault the layers, and what of them does not fit.
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
    """Yield why a server does not take a weight, the number that does not fit, if it is one, and what would be served.

    Args:
        name: Of the model's class and of the layer, with a space in between.
        weight: The layer's.
        server: The server.
    """
    if weight.bits != FLOAT_BITS:
        for kind in server.without:
            is_matrix = kind == "experts" and ".experts." in name
            is_packed = is_matrix and weight.is_served_as_codes
            if weight.kind.startswith(kind) or is_packed:
                text, instead = _WITHOUT[kind]
                yield text, None, instead
    if weight.is_served_as_codes and re.search(server.in_float, name):
        yield (
            "it takes these layers in float, whatever the checkpoint holds",
            None,
            "name them in modules_to_not_convert, beside the output heads",
        )
    is_packed = weight.has_codes and weight.kind != "embedding"
    has_codes = weight.bits != FLOAT_BITS if server.repacks else is_packed
    if not has_codes or (weight.multiplies_bytes and server.has_bytes):
        return
    if weight.format not in server.formats:
        yield (
            f"it does not take {weight.format}",
            None,
            'format "int" is served',
        )
    legal = server.symmetric if weight.symmetric else server.asymmetric
    bits = weight.bits if server.repacks else weight.width
    if bits not in legal:
        taken = f"{either(legal)} bits" + " with zero points" * (not weight.symmetric)
        yield f"its kernels take {taken}", bits, f"{taken} are served"
    size = weight.row_size if weight.format == "int" else None
    if size and (size % server.multiple or size not in (server.groups or [size])):
        groups = either(server.groups) or f"a multiple of {server.multiple}"
        instead = f"group_size {groups}, or per channel, is served"
        if weight.kind == "embedding":
            instead = "embeddings 8 is served"
        yield f"its groups are {groups}", size, instead
    # llama.cpp's blocks of NVFP4 are of four groups.
    four_groups = server.repacks and weight.format == "nvfp4"
    for what, multiple, count in (
        (
            "columns (in_features)",
            64 if four_groups else server.columns,
            weight.shape[1],
        ),
        ("rows (out_features)", server.rows, weight.shape[0]),
    ):
        if count % multiple:
            text = f"its kernels take a multiple of {multiple} {what}"
            yield text, count, "name these in modules_to_not_convert"


def _unlike_siblings(model: Description) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what a server that fuses layers does not take beside each other: why, what would be served, and names."""
    grids = dict.fromkeys(model.floats, "floats")
    grids |= {name: weight.as_served for name, weight in model.weights.items()}
    # Where no layer has codes the files have the names of each.
    whole = [
        name
        for name, grid in grids.items()
        if grid == "floats" and WHOLE_EXPERTS.search(f"{model.architecture} {name}")
    ]
    if whole and {*grids.values()} != {"floats"}:
        instead = "experts on symmetric grids of up to 8 bits are served"
        yield "it looks for each expert by its own name", instead, whole
    unlike: dict[str, list[str]] = {}
    for unit, names in fused_units(grids).items():
        different = sorted({grids[name] for name in names})
        if len(different) > 1:
            what = unit.rpartition(".")[2].replace("-", ", ")
            what = "all experts of a block" if what == "experts" else what
            unlike.setdefault(f"{what} ({' and '.join(different)})", []).extend(names)
    instead = "all of them on the same grid, or all of them in float, are served"
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
