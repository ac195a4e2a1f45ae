"""The file that llama.cpp's own converter makes of a delivered GPT-OSS with experts in MXFP4, against transformers.

    python benchmarks/gpt_oss_gguf.py llama.cpp

The argument is the folder of llama.cpp's source. The model has random weights and no tokenizer.
"""

import argparse
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import environment, write

from moq_hf import quantize_model, save_quantized


def deliver(folder: Path) -> Any:
    """Deliver a small model to `folder`; what plain transformers loads from there."""
    config = transformers.GptOssConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.set_seed(1)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16).eval()
    save_quantized(quantize_model(model, {"quantize_format": "mxfp4"}), folder)
    return transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32)


def convert(source: Path, folder: Path, out: Path) -> None:
    """Run llama.cpp's converter in this process, without a vocabulary."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel
    from conversion.gpt_oss import GptOssModel

    GptOssModel.set_vocab = TextModel._set_vocab_none
    script = source / "convert_hf_to_gguf.py"
    sys.argv[:] = [str(script), str(folder), "--outtype", "f16", "--outfile", str(out)]
    runpy.run_path(str(script), run_name="__main__")


def compare(model: Any, path: Path) -> dict[str, Any]:
    """Type, and the largest difference of a weight, of each tensor of experts."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found = {}
    for block, layer in enumerate(model.model.layers):
        gate_up = layer.mlp.experts.gate_up_proj.detach().mT
        parts = {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": layer.mlp.experts.down_proj.detach().mT}
        for part, expected in parts.items():
            name = f"blk.{block}.ffn_{part}_exps.weight"
            values = torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type))
            difference = float((values - expected).abs().max())
            found[name] = {"type": tensors[name].tensor_type.name, "largest_difference": difference}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    args = parser.parse_args()
    document = environment("compressed_tensors")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        model = deliver(Path(folder) / "quantized")
        convert(args.llama_cpp, Path(folder) / "quantized", path)
        document["tensors"] = compare(model, path)
    write(document, Path(__file__).parent / "results" / "gpt_oss_gguf.json")
