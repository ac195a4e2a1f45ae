"""What llama.cpp computes with a packed checkpoint: our GGUF file against the road by llama-quantize.

    python benchmarks/llamacpp.py --llama_cpp FOLDER

FOLDER holds llama.cpp's `convert_hf_to_gguf.py`; `benchmarks/requirements-llama.txt` is the environment. Small models
with random weights are quantized, saved packed and brought to llama.cpp: as floats by the converter, from these by
llama-quantize, and by `moq-hf export --to gguf`. The reference is plain transformers on the packed folder: 16 tokens
that it chooses after 48, and the probabilities at all 64 places.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import sentencepiece
import torch
from environment import environment, write
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

from moq_hf import quantize_model, save_quantized
from moq_hf.export.floats import export_floats
from moq_hf.export.gguf import export_gguf

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, Any, bool]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, False),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, False),
    # llama.cpp knows Gemma with a tied head alone.
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, True),
}


def config_of(bits: int, size: int, **more: Any) -> dict[str, Any]:
    """A config that sets every layer to these bits at once."""
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_group_size": size, **more}


GRIDS: dict[str, dict[str, Any] | None] = {
    "float": None,
    "4 bits, groups of 32": config_of(4, 32),
    "4 bits, full range, scales in float16, groups of 32": config_of(
        4, 32, quantize_algo={"range": "full", "scale_dtype": "float16"}
    ),
    "4 bits, groups of 128": config_of(4, 128),
    "4 bits asymmetric, groups of 32": config_of(4, 32, quantize_algo={"q_type": "asymmetric"}),
    "3 bits, groups of 32": config_of(3, 32),
    "2 bits, groups of 32": config_of(2, 32),
    "8 bits, groups of 32": config_of(8, 32),
    "4 bits, groups of 32, table 8 bits": config_of(4, 32, quantize_embeddings=8),
}
# What llama-quantize is asked for.
TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
PROMPT, CHOSEN = 48, 16


def make(family: str) -> Any:
    """A model with random weights, large enough that its logits differ clearly."""
    set_seed(0)
    architecture, config, tied = FAMILIES[family]
    # llama.cpp takes the heads' size, whatever Gemma's config says.
    more = {"query_pre_attn_scalar": SHAPE["head_dim"]} if family == "gemma3" else {}
    model = architecture(config(**SHAPE, **more, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """A sentencepiece model of the documentation, since the converter wants one."""
    lines = [line for page in sorted((ROOT / "docs").glob("**/*.md")) for line in page.read_text().splitlines() if line]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=SHAPE["vocab_size"],
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.99,
            minloglevel=2,
        )


def convert(llama: Path, folder: Path, out: Path, kind: str) -> Path:
    """llama.cpp's converter."""
    command = [sys.executable, llama / "convert_hf_to_gguf.py", folder, "--outtype", kind, "--outfile", out]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return out


def requantize(source: Path, out: Path, kind: str) -> Path:
    """llama-quantize --pure, the table of words and the head in float16."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread, parameters.pure = TYPES[kind], 1, True
    parameters.token_embedding_type = parameters.output_tensor_type = llama_cpp.GGML_TYPE_F16
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters)):
        raise SystemExit(f"llama-quantize failed on {source}")
    return out


class Reference:
    """What plain transformers answers.

    Args:
        folder: A folder that `from_pretrained` loads.

    Attributes:
        ids: The prompt and the chosen tokens.
        log_probabilities: float64 `[tokens, words]` of what follows each of them.
    """

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, SHAPE["vocab_size"], (1, PROMPT), generator=generator)
        with torch.no_grad():
            model(prompt)
            made = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=CHOSEN,
                do_sample=False,
                eos_token_id=None,
            )
            self.ids = made[0].tolist()
            self.log_probabilities = normal(model(made).logits[0].double().numpy())

    def compare(self, path: Path) -> dict[str, Any]:
        """llama.cpp's answers with a file against the reference."""
        model = llama_cpp.Llama(
            str(path), n_ctx=128, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, n_gpu_layers=0,
            type_k=0, type_v=0, flash_attn=False,
        )  # fmt: skip
        model.eval(self.ids)
        found = normal(np.array(model.scores[: len(self.ids)], dtype=np.float64))
        model.reset()
        model.eval(self.ids[:PROMPT])
        chosen: list[int] = []
        for _ in range(CHOSEN):
            chosen.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(chosen[-1:])
        model.close()
        expected, places = self.log_probabilities, np.arange(PROMPT - 1, len(self.ids) - 1)
        own = self.ids[PROMPT:]
        same = next((i for i, (one, other) in enumerate(zip(chosen, own, strict=True)) if one != other), CHOSEN)
        return {
            "bytes": path.stat().st_size,
            "kl": float((np.exp(expected) * (expected - found)).sum(-1).mean()),
            "top1": float((expected.argmax(-1) == found.argmax(-1)).mean()),
            "same_tokens": same,
            "log_probability": float(np.abs(expected[places, own] - found[places, own]).max()),
        }


def normal(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of probabilities."""
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def measure(family: str, grid: str, llama: Path, folder: Path) -> dict[str, Any]:
    """One model at one grid: every road to llama.cpp."""
    config, model, packed = GRIDS[grid], make(family), folder / "packed"
    floats, case = folder / "floats", {"family": family, "grid": grid}
    if config is None:
        model.save_pretrained(packed)
        write_tokenizer(packed)
        floats, kind = packed, "Q4_0"
    else:
        quantize_model(model, config)
        save_quantized(model, packed)
        write_tokenizer(packed)
        export_floats(packed, floats)
        symmetric = "asymmetric" not in grid
        kind = "Q8_0" if config["quantize_bits"]["target_bits"] > 4 else "Q4_0" if symmetric else "Q4_1"
    reference = Reference(packed)
    f32 = convert(llama, floats, folder / "f32.gguf", "f32")
    # What the converter makes with --outtype f16, in less time.
    f16 = requantize(f32, folder / "f16.gguf", "F16")
    files = {"float32": f32, "float16": f16, f"llama-quantize {kind}": requantize(f16, folder / "theirs.gguf", kind)}
    if config is not None:
        made = export_gguf(packed, folder / "ours.gguf", f16)
        case |= {"types": dict(made.types), "weight_error": made.weight_error}
        files["moq-hf export"] = made.path
    return case | {"ways": {name: reference.compare(path) for name, path in files.items()}}


def main() -> None:
    """Run and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_cpp", type=Path, required=True, metavar="FOLDER", help="with convert_hf_to_gguf.py")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "llamacpp.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = llama_cpp.llama_model_default_params

    def without_extra_buffers() -> Any:
        # Repacking for AMX is an illegal instruction on some virtual machines.
        parameters = before()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = without_extra_buffers
    # Those of a run before, but for what is measured now.
    old = json.loads(args.out.read_text(encoding="utf-8"))["cases"] if args.out.exists() else []
    cases = [case for case in old if case["family"] not in args.families or case["grid"] not in args.grids]
    for family in args.families:
        for grid in args.grids:
            # A tied table is not quantized.
            if "table" in grid and FAMILIES[family][2]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                cases.append(found := measure(family, grid, args.llama_cpp, Path(folder)))
            print(family, grid, {k: f"{v['kl']:.1e} {v['same_tokens']}" for k, v in found["ways"].items()}, flush=True)
            order = [(family, grid) for family in FAMILIES for grid in GRIDS]
            cases.sort(key=lambda case: order.index((case["family"], case["grid"])))
            made_with = environment("compressed_tensors", "llama_cpp")
            made_with["versions"]["gguf"] = version("gguf")
            write({**made_with, "shape": SHAPE, "prompt": PROMPT, "chosen": CHOSEN, "cases": cases}, args.out)


if __name__ == "__main__":
    main()
