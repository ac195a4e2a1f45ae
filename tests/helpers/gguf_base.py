"""What llama.cpp's converter would make of a folder of floats, as far as the tests need it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3, "gpt2": gguf.MODEL_ARCH.GPT2}


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_base(model: Any, path: Path, kind: Kind = Kind.F16, *, without: tuple[str, ...] = (), **more: Any) -> Path:
    """A GGUF file of a plain model's weights: q and k of Llama in llama.cpp's order, GPT-2's weights turned.

    Args:
        model: With float weights.
        path: The file.
        kind: Of matrices; the others are float32.
        without: Names of tensors of the file that are left out.
        **more: Further keys with values that are whole numbers.
    """
    config = model.config
    name = config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_token_list(["<a>", "<b>"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        module, _, part = key.rpartition(".")
        place, weight = f"{names.get_name(module)}.{part}", tensor.float().numpy()
        if place in without or (key == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            weight = permuted(weight, heads)
        if name == "gpt2" and module.endswith(("c_attn", "c_proj", "c_fc")) and weight.ndim == 2:
            weight = np.ascontiguousarray(weight.T)
        if weight.ndim == 1:
            writer.add_tensor(place, weight)
        else:
            writer.add_tensor(place, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
