"""Mixtures of experts at 4 bits: how much of them is quantized, their bytes, who loads them, and who serves them.

    python benchmarks/experts.py --vllm /path/of/an/environment/bin/python

Five families with random weights, in groups of 32 and per channel. Each folder is proven with plain `from_pretrained`
in a process without moq_hf, by logits. With `--vllm`, the Python of an environment with vLLM, those in groups of 32
generate 8 tokens: as it is, and where its CPU kernel of experts (which needs AMX) does not run, with plain PyTorch in
that kernel's place. That shows that names and shapes fit, not that a stock vLLM serves it on such a CPU. vLLM
computes in bfloat16, so that tokens of a random model differ soon.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as t
from environment import environment, write

from moq_hf import quantize_model, save_quantized, verify_quantized

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
PAIR = {"num_experts_per_tok": 2}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES: dict[str, Any] = {
    "Mixtral": lambda: t.MixtralConfig(**SHAPE, intermediate_size=512, num_local_experts=8),
    "Qwen3-MoE": lambda: t.Qwen3MoeConfig(
        **SHAPE, **PAIR, head_dim=64, intermediate_size=512, moe_intermediate_size=256, num_experts=8
    ),
    "OLMoE": lambda: t.OlmoeConfig(**SHAPE, **PAIR, intermediate_size=256, num_experts=8),
    "DeepSeek-V3": lambda: t.DeepseekV3Config(
        **{**SHAPE, **PAIR, **LATENT, "num_key_value_heads": 4}, intermediate_size=512, moe_intermediate_size=256,
        n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
    "GPT-OSS": lambda: t.GptOssConfig(**SHAPE, **PAIR, head_dim=64, intermediate_size=256, num_local_experts=8),
}  # fmt: skip
GROUPS = {"groups of 32": {"quantize_group_size": 32}, "per channel": {"quantize_groups": "per_channel"}}
PROMPT = [1, 5, 17, 99, 230, 411, 8, 64]
# Loads a folder without moq_hf, and compares its logits with those in a file.
STRANGER = """
import sys, torch, transformers
folder, expected = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
kept = torch.load(expected)
with torch.no_grad():
    print(torch.equal(model(kept["ids"]).logits, kept["logits"]))
"""


def made(name: str) -> t.PreTrainedModel:
    """A model whose answers differ: random weights of transformers' own size give nearly the same for every token."""
    t.set_seed(0)
    model = t.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def last_line(command: list[str]) -> str:
    """The last line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else done.stderr.strip().splitlines()[-1]


def measure(name: str, grouping: str, vllm: str | None, folder: Path) -> dict[str, Any]:
    """Quantize, save, load elsewhere, and serve."""
    model = made(name)
    model.save_pretrained(folder / "float")
    before = sum(path.stat().st_size for path in (folder / "float").glob("*.safetensors"))
    bits = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
    quantize_model(model, {**bits, **GROUPS[grouping]})
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
    torch.save({"ids": ids, "logits": logits}, folder / "expected.pt")
    save_quantized(model, folder / "packed", inputs={"input_ids": ids})
    found = verify_quantized(folder / "packed", model)
    quantized, total = found.parameters
    experts = [layer for layer in found.layers.values() if layer.kind.startswith("experts")]
    result = {
        "model": name,
        "grouping": grouping,
        "parameters": total,
        "share": quantized / total,
        "experts_stored": sorted({layer.stored for layer in experts}),
        "layout": found.state["layout"],
        "file_bytes": found.file_bytes,
        "float_file_bytes": before,
        "ratio": found.file_bytes / before,
        "logits_equal": last_line([sys.executable, "-c", STRANGER, str(folder / "packed"), str(folder / "expected.pt")])
        == "True",
    }
    # Servers look at the format, which both groupings share.
    if vllm is not None and grouping == "groups of 32":
        program = str(Path(__file__).with_name("experts_vllm.py"))
        for key, more in {"vllm": [], "vllm_stand_in": ["--stand_in"]}.items():
            answer = json.loads(last_line([vllm, program, str(folder / "packed"), json.dumps(PROMPT), *more]))
            if "tokens" in answer:
                answer["same_tokens"] = sum(a == b for a, b in zip(answer.pop("tokens"), tokens, strict=True))
            result[key] = answer
            if answer["served"]:
                break
    return result


def main() -> None:
    """Measure, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/experts.json"))
    args = parser.parse_args()
    results = []
    for name in args.only:
        for grouping in GROUPS:
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(name, grouping, args.vllm, Path(folder)))
            print(json.dumps(results[-1]), flush=True)
    write({**environment("compressed_tensors"), "results": results}, args.out)


if __name__ == "__main__":
    main()
