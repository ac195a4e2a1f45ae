"""What mlx-lm computes with the folders of `moq-hf export --to mlx`, beside plain transformers with the delivered ones.

    python benchmarks/mlx_folders.py [NAME ...]

It needs mlx[cpu] and mlx-lm beside moq_hf. Models are tiny and have random weights, in float32; for each class of a
causal language model that mlx-lm has too, or for those that are named. Logits are compared on two rows of 24 tokens,
and 32 tokens that follow greedily, with mlx-lm's cache.
"""

import argparse
import inspect
import tempfile
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from environment import environment, write
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from moq_hf import quantize_model, save_quantized
from moq_hf.errors import one_line
from moq_hf.export.mlx import export_mlx

TOKENS = 32
# Each config takes what it knows of it.
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MORE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
GRIDS: dict[str, dict[str, Any]] = {
    "w4": {"bits": 4, "group_size": 32, "serve": ["mlx"]},
}


def tiny(name: str) -> Any:
    """A tiny model of a class, the same each time."""
    cls = getattr(transformers, name)
    legal = inspect.signature(cls.config_class).parameters
    sizes = SHAPE | MORE | OWN.get(name, {})
    config = cls.config_class(
        **{key: value for key, value in sizes.items() if key in legal or key in OWN.get(name, {})}
    )
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        # No default, so that a config that mlx-lm reads wrongly is found.
        rope["rope_theta"] = 500.0
    transformers.set_seed(1)
    model = cls(config).eval()
    for parameter in model.parameters():
        # Norms of 1 and biases of 0 would hide what is missing.
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.1)
    return model
