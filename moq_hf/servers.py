"""The servers: a row for each says what it takes, as tried or read in its source. A new one is a row in `SERVERS`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .grid import Format, InputGrid, ScaleDtype

# Layers that vLLM and SGLang fuse into one, and the name of that one.
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
class Server:
    """A server, and the models that it takes.

    Attributes:
        key: Its name in results, and in `serve` if it can be named there.
        title: Its name for people.
        version: The version for which this row was checked.
        symmetric: Bits of a symmetric grid.
        asymmetric: Bits of a grid with zero points.
        groups: Legal sizes of groups; empty for all.
        multiple: The size of groups must be a multiple of this.
        columns: The columns of a weight must be a multiple of this.
        rows: The rows of a layer must be a multiple of this; those of a fused layer
            together.
        fuses: Whether it makes one layer from those in `FUSED`, and from the experts of
            a block, which must then have one grid.
        without: Kinds of layers, from `WITHOUT`, that it takes only as floats.
        repacks: Whether moq_hf writes its file, in which everything on a grid becomes
            codes.
        has_bytes: Whether one of its kernels multiplies 8 bits by 8 bits, per channel,
            integers as well as floats, whatever the other fields say.
        inputs: What it does with rounded inputs if it does not multiply like that.
        formats: Kinds of codes.
        classes: A pattern for the names of classes, in which there may then be no
            decoder beside an encoder; empty for all models.
        instead: Which classes these are, in words.
        in_float: A pattern for layers that it takes only as floats: the name of the
            model's class, a space, and the layer's name.
        scale_dtype: The dtype in which it computes with scales; empty if it is none, or that
            of the model.
        positive_scales: Whether its kernels refuse negative scales, which a full range has.
        input_grid: How its kernels round inputs, whatever was trained; None if they follow
            the files, or leave them alone.
        half_scales: Whether it computes with scales in half precision.
        tried: Classes of which a model was served, or one whose weights are loaded by
            the same code.
        refused: Reasons why classes are refused whatever their grid, and those classes.
        takes_adapters: Whether it loads adapters of PEFT beside the model.
        is_named: Whether `serve` may name it.
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
    formats: tuple[Format, ...] = ("int", "mxfp4", "nvfp4", "fp8")
    classes: str = ""
    instead: str = ""
    in_float: str = "$^"
    scale_dtype: ScaleDtype | Literal[""] = ""
    positive_scales: bool = False
    input_grid: InputGrid | None = None
    half_scales: bool = True
    tried: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    takes_adapters: bool = False
    is_named: bool = True

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}"


# Kinds of layers that some servers do not take, with the reason and what is served.
WITHOUT = {
    "conv1d": ("it takes no quantized Conv1D layers", "models of nn.Linear are served"),
    "experts": (
        "it takes no packed experts",
        "name them in modules_to_not_convert",
    ),
    # In the packed layout each matrix of an expert is a separate tensor.
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
# Servers do not load the pooler of a base model at all.
_HEADS = (
    r"(?<!Model) (.*\.)?(pooler\.dense|classifier|classifier\.(dense|out_proj)|head\.dense|lm_head\.dense|"
    r"predictions\.transform\.dense|pre_classifier)$"
)
# vLLM creates these without a name, so that no target matches, or loads their rows in
# another order.
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
    takes_adapters=True,
)
# Groups other than 32, 64 and 128, and bits other than 4 and 8, run on its Humming
# kernels. MXFP4, NVFP4 and FP8 follow its source: none was run, but for FP8 on a CPU.
VLLM = Server(
    "vllm",
    "vLLM, CUDA",
    "0.32.0",
    range(2, 9),
    range(2, 9),
    multiple=16,
    fuses=True,
    # The files hold Conv1D layers as floats.
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
    takes_adapters=True,
)
VLLM_CPU = replace(
    VLLM,
    key="vllm-cpu",
    is_named=False,
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
# What its Marlin kernels take according to its source: nothing was run.
SGLANG = replace(
    VLLM,
    key="sglang",
    title="SGLang",
    version="0.5.23",
    has_bytes=False,
    formats=("int", "fp8"),
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
# Q4_0, Q4_1 and Q8_0 have blocks of 32. llama.cpp's converter drops BERT's pooler.
GGUF = Server(
    "llama.cpp",
    "llama.cpp by moq-hf export",
    "gguf 0.19.0",
    range(1, 9),
    range(2, 5),
    multiple=32,
    columns=32,
    repacks=True,
    formats=("int", "mxfp4", "nvfp4"),
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
    formats=("int", "mxfp4", "nvfp4"),
    without=("conv1d", "experts"),
    # torch.onnx.export cannot trace some, and others take more than texts or pictures.
    classes=r"^(?!.*Head|XLNet|.*Mamba|Jamba|CLIP|Wav2Vec2|WavLM|Whisper).*(For(Sequence|Token|Image)Classification|ForCausalLM|Model)$",
    instead="classifiers of texts, tokens and images, decoders, and base models of one stack are served",
    half_scales=False,
    # The tests of the export.
    tried=f"{_ENCODERS} {_CAUSAL} DebertaV2ForSequenceClassification DistilBertForSequenceClassification "
    "RobertaForSequenceClassification T5EncoderModel ViTModel ViTForImageClassification ResNetForImageClassification "
    "ConvNextForImageClassification",
)
# XNNPACK's kernel for 4 bits in groups, whose files hold scales in bfloat16.
EXECUTORCH = Server(
    "executorch",
    "ExecuTorch by examples/executorch",
    "1.5.1",
    range(2, 5),
    (),
    multiple=32,
    columns=32,
    without=("conv1d", "experts"),
    formats=("int",),
    scale_dtype="bfloat16",
    positive_scales=True,
    input_grid=InputGrid(8, "per_token", symmetric=False),
    half_scales=False,
    # benchmarks/results/executorch.json.
    tried="BertForSequenceClassification LlamaForCausalLM Qwen3ForCausalLM",
)
# The decoders that both mlx-lm and transformers have, but those whose weights mlx-lm
# rearranges while loading, or computes with otherwise.
_MLX = (
    "Afmoe Apertus Cohere Cohere2 DeepseekV2 DeepseekV3 DeepseekV32 Dots1 Ernie4_5 Exaone4 ExaoneMoe Gemma Gemma2 "
    "Gemma3 Gemma4 Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPTBigCode GPTNeoX GPTJ Granite Helium HunYuanDenseV1 "
    "Lfm2 Lfm2Moe Llama Mamba Mamba2 Mellum MiniCPM3 MiniMax MiniMaxM2 Ministral3 Mistral Mixtral NanoChat Nemotron "
    "Olmo Olmo2 Olmo3 Olmoe Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 SolarOpen StableLm "
    "Starcoder2"
)
MLX = Server(
    "mlx",
    "mlx-lm by moq-hf export",
    "0.32.2",
    range(1, 9),
    range(2, 9),
    multiple=32,
    columns=32,
    repacks=True,
    without=("conv1d",),
    inputs="it leaves inputs in float",
    formats=("int",),
    classes=rf"^({'|'.join(_MLX.split())})ForCausalLM$",
    instead="decoders that mlx-lm has, such as Llama, Mistral, Qwen and Gemma, are served",
    half_scales=False,
    # benchmarks/results/mlx_folders.json.
    tried="CohereForCausalLM Cohere2ForCausalLM Ernie4_5ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
    "GemmaForCausalLM GraniteForCausalLM LlamaForCausalLM MistralForCausalLM MixtralForCausalLM "
    "Olmo2ForCausalLM OlmoeForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM "
    "Qwen3ForCausalLM Qwen3MoeForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM",
)
SERVERS = (TRANSFORMERS, VLLM, VLLM_CPU, SGLANG, GGUF, ONNX, EXECUTORCH, MLX)
# The servers that `serve` may name.
NAMED = {server.key: server for server in SERVERS if server.is_named}
