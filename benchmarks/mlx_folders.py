"""What mlx-lm answers with the folders of `moq-hf export --to mlx`, beside plain transformers with the delivered ones.

    python benchmarks/mlx_folders.py [--gguf smollm2.gguf] [--only TEXT]

It needs moq_hf, mlx[cpu] and mlx-lm in one environment, and gguf for a real model that is read from a GGUF file. The
others are tiny, with random weights. Nothing is trained. All compute in float32. Logits are compared on 24 tokens, and
the 32 tokens that follow greedily, with the cache of each library.
"""

import argparse
import inspect
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from environment import environment, write
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from moq_hf import quantize_model, save_quantized
from moq_hf.export.mlx import export_mlx

PROMPT, TOKENS = 24, 32
TEXT = (
    "The sea was calm that morning, and the old man had already been out on the water for three hours when he saw the"
)
# A config takes those keys that it has.
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8},
    "Gemma2ForCausalLM": {"head_dim": 16},
    "GemmaForCausalLM": {"head_dim": 16},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Qwen3MoeForCausalLM": {"head_dim": 16},
}
CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Ernie4_5ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)
EXACT: dict[str, Any] = {"serve": ["mlx"]}
W4: dict[str, Any] = {"bits": 4, "group_size": 32, **EXACT}
# Of a Llama.
GRIDS: dict[str, dict[str, Any]] = {
    "4 bits in groups of 64, tables of 8": {**W4, "group_size": 64, "embeddings": 8},
    "4 bits, asymmetric": {**W4, "q_type": "asymmetric"},
    "4 bits per channel": {"bits": 4, **EXACT},
    "8 bits per channel, tables of 8": {"bits": 8, "embeddings": 8, **EXACT},
    "3 bits in groups of 32": {**W4, "bits": 3},
    "2 bits in groups of 32": {**W4, "bits": 2},
    "4 bits, down_proj 6": {**W4, "overrides": {"*.down_proj": {"bits": 6}}},
    "4 bits, scales in float32": {"bits": 4, "group_size": 32},
}


def tiny(name: str) -> Any:
    """A tiny model of a class, the same each time."""
    cls = getattr(transformers, name)
    legal = inspect.signature(cls.config_class).parameters
    sizes = {key: value for key, value in SHAPE.items() if key in legal}
    config = cls.config_class(**{**sizes, **OWN.get(name, {})})
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        # No default, so that a config that mlx-lm reads otherwise is found.
        rope["rope_theta"] = 500.0
    transformers.set_seed(1)
    model = cls(config)
    for parameter in model.parameters():
        # Norms of 1 and biases of 0 would hide what is missing.
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.1)
    return model


def from_gguf(where: dict[str, Any]) -> Any:
    """The model in a GGUF file, as an ordinary one."""
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    return model


def answers(logits_of: Callable[[list[int]], Any], prompt: Sequence[int]) -> tuple[Any, list[int]]:
    """The logits of a prompt `[tokens, vocabulary]`, and the tokens that follow, from a model with a cache."""
    first = np.asarray(logits_of([*prompt]))
    tokens = [int(first[-1].argmax())]
    while len(tokens) < TOKENS:
        tokens.append(int(np.asarray(logits_of(tokens[-1:]))[-1].argmax()))
    return first, tokens


def of_transformers(folder: Path, prompt: Sequence[int]) -> tuple[Any, list[int]]:
    """The answers of plain transformers with a delivered folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cache = transformers.DynamicCache(config=model.config)

    def logits_of(tokens: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].float()

    return answers(logits_of, prompt)


def of_mlx(folder: Path, prompt: Sequence[int]) -> tuple[Any, list[int]]:
    """The answers of mlx-lm with an exported folder."""
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    return answers(lambda tokens: model(mx.array([tokens]), cache=cache)[0].astype(mx.float32), prompt)


def compared(make: Callable[[], Any], config: dict[str, Any], prompt: Sequence[int]) -> dict[str, Any]:
    """Deliver a model, export it exactly and in half precision, and compare the answers of both libraries."""
    found: dict[str, Any] = {"config": config}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make().float().eval()
        save_quantized(quantize_model(model, config), folder / "quantized")
        expected, tokens = of_transformers(folder / "quantized", prompt)
        found["largest_logit"] = float(np.abs(expected).max())
        for name in ("float32", "half"):
            export = export_mlx(folder / "quantized", folder / name, half=name == "half")
            logits, others = of_mlx(export.path, prompt)
            same = [one == other for one, other in zip(tokens, others, strict=True)]
            found[name] = {
                "bytes": export.bytes,
                "weights_that_differ": round(export.different, 4),
                "largest_in_steps": export.weight_error,
                "largest_difference": float(np.abs(logits - expected).max()),
                "equal_tokens": TOKENS if all(same) else same.index(False),
            }
    return found


def main() -> None:
    """Compare all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="SmolLM2, or another causal language model that transformers reads")
    parser.add_argument(
        "--only", default="", help="measure models with this in their names, and keep the others' results"
    )
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    transformers.logging.disable_progress_bar()
    document = environment("compressed_tensors", "mlx_lm")
    document["versions"]["mlx"] = mx.__version__
    prompt = torch.randint(3, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any], Sequence[int]]] = {}
    for name in CLASSES:
        cases[name] = (lambda name=name: tiny(name), W4, prompt)
    for name, config in GRIDS.items():
        cases[f"Llama, {name}"] = (lambda: tiny("LlamaForCausalLM"), config, prompt)
    if args.gguf is not None:
        where = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
        words = AutoTokenizer.from_pretrained(**where)(TEXT)["input_ids"]
        for name, config in (("4 bits, tables of 8", {**W4, "embeddings": 8}), ("8 bits", {**W4, "bits": 8})):
            cases[f"{args.gguf.stem}, {name}"] = (lambda: from_gguf(where), config, words)
    document["prompt"], document["tokens"] = PROMPT, TOKENS
    path = Path(__file__).parent / "results" / "mlx_folders.json"
    for name, case in cases.items():
        if args.only in name:
            found = compared(*case)
            print(name, found, flush=True)
            known = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
            write({**document, "models": {**known, name: found}}, path)


if __name__ == "__main__":
    main()
