"""Tiny mixtures of experts, of each way in which transformers keeps them."""

from typing import Any

import torch
import transformers as t

SHAPE: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
PAIR = {"num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "Mixtral": lambda: t.MixtralConfig(**SHAPE, intermediate_size=64, num_local_experts=4),
    "Qwen3-MoE": lambda: t.Qwen3MoeConfig(
        **SHAPE, **PAIR, head_dim=16, intermediate_size=64, moe_intermediate_size=32, num_experts=4
    ),
    "OLMoE": lambda: t.OlmoeConfig(**SHAPE, **PAIR, intermediate_size=32, num_experts=4),
    "DeepSeek-V3": lambda: t.DeepseekV3Config(
        **SHAPE, **PAIR, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "GPT-OSS": lambda: t.GptOssConfig(
        **SHAPE, **PAIR, head_dim=16, intermediate_size=32, num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
IDS = torch.tensor([[1, 5, 17, 9, 23, 41, 8, 14], [3, 30, 31, 7, 7, 19, 11, 40]])


def mixture(name: str = "Mixtral") -> Any:
    """A model in evaluation mode, the same each time; on the CPU whatever the machine has."""
    t.set_seed(0)
    return t.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def at_bits(bits: int, **more: Any) -> dict[str, Any]:
    """A config of one bit width."""
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, **more}
