"""W8A8 folders in vLLM on a CPU: answers beside plain transformers', the kernel, and the time beside the float folder.

    python benchmarks/served_int8.py make FOLDER            # in moq_hf's environment: trains and asks transformers
    VLLM/bin/python benchmarks/served_int8.py serve FOLDER  # where requirements-vllm.txt is installed: real answers
    VLLM/bin/python benchmarks/served_int8.py speed FOLDER  # the same, with a Llama of 88 M parameters
    python benchmarks/served_int8.py report FOLDER          # in moq_hf's environment: results/served_int8.json

Models with random weights train a few steps, so that static scales are learned; "sft" is examples/sft's model in TRL's
SFTTrainer. Each folder computes in the dtype of its training in both. 16 tokens are greedy, and log-probabilities are
those of the tokens that transformers chose; "from_float32" is how far its own are from those that it has in float32.
For "speed", engines of one thread stand side by side and are asked in turn: the least of 15 times.
"""

import argparse
import copy
import json
import os
import re
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

PROMPT = [1, 5, 17, 99, 230, 411, 8, 64]
TOKENS = 16
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": {**LLAMA, "head_dim": 64},
    "Gemma3ForCausalLM": {**LLAMA, "head_dim": 64, "tie_word_embeddings": True},
}
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Nothing is compiled.
SETTINGS |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

SCALES = {"static": "static", "per_token": "token"}
DTYPES = ("float32", "bfloat16")
KINDS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "sft")
W8: dict[str, Any] = {"quantize_bits": {"target_bits": 8}, "quantize_groups": "per_channel"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{kind.removesuffix('ForCausalLM')} {scale} {dtype}": (kind, dtype, {**W8, "activation_quantization": scale})
    for kind, scale, dtype in product(KINDS, SCALES, DTYPES)
}
# Packed weights with rounded inputs, for which vLLM's kernels on CPUs are others or none.
CASES |= {
    f"Llama {bits} bits, {size or 'per channel'}, per_token": (
        KINDS[0],
        "bfloat16",
        {
            "quantize_bits": {"target_bits": bits},
            **({"quantize_group_size": size} if size else {"quantize_groups": "per_channel"}),
            "activation_quantization": "per_token",
        },
    )
    for bits, size in ((4, 0), (4, 32), (3, 0), (8, 128))
}
LARGE = {**MODELS[KINDS[0]], "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
LARGE |= {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 512}
SPEED = {"float": None, "static": {**W8, "activation_quantization": "static"}}
SPEED |= {"per_token": {**W8, "activation_quantization": "per_token"}}
# Sentences at once, tokens of a prompt, tokens to generate.
SHAPES = {
    "prompts of 8 x 128 tokens": (8, 128, 1),
    "one of 16, then 32 tokens": (1, 16, 32),
    "8 of 16, then 32": (8, 16, 32),
}


def _train(model: Any, config: dict[str, Any], out: Path, sft: bool = False, steps: int = 6) -> None:
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    from moq_hf import MoQCallback

    given = {**config, "activation_quantization": {"enabled": True, "scale": config["activation_quantization"]}}
    fixed = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    fixed |= {"save_strategy": "no", "logging_strategy": "no", "learning_rate": 1e-5 if not sft else 1e-3, "seed": 0}
    set_seed(0)
    callback = MoQCallback(given)
    if sft:
        from datasets import Dataset
        from dialogues import dialogues
        from trl import SFTConfig, SFTTrainer

        pairs = [[message["content"] for message in one["messages"]] for one in dialogues()[0]]
        rows = Dataset.from_list([{"text": f"{user} {assistant}"} for user, assistant in pairs])
        args = SFTConfig(str(out), max_length=64, bf16=False, **{**fixed, "max_steps": 40})
        trainer = SFTTrainer(model[0], args, train_dataset=rows, processing_class=model[1], callbacks=[callback])
    else:
        ids = torch.randint(3, 512, (16, 32))
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
        trainer = Trainer(model, TrainingArguments(str(out), **fixed), train_dataset=rows, callbacks=[callback])
    trainer.train()


def make(folder: Path, names: list[str]) -> None:
    """Train each case, and note what plain transformers answers with its folder."""
    import torch
    import transformers

    for name in names:
        kind, dtype, config = CASES[name]
        place = folder / name.replace(" ", "_")
        if (place / "reference.json").exists():
            continue
        transformers.set_seed(0)
        model: Any
        if kind == "sft":
            sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sft"))
            from dialogues import dialogues
            from train import new_model, new_tokenizer

            tokenizer = new_tokenizer([text["content"] for one in dialogues()[0] for text in one["messages"]])
            made = new_model(tokenizer).to(getattr(torch, dtype))
            model = made, tokenizer
        else:
            cls = getattr(transformers, kind)
            made = model = cls(cls.config_class(**MODELS[kind]))
            with torch.no_grad():
                for parameter in model.parameters():
                    # Larger weights make logits with clear differences.
                    parameter.mul_(3 if parameter.dim() > 1 else 1)
            model.to(getattr(torch, dtype))
        if not (place / "quantized").exists():
            _train(model, config, place, sft=kind == "sft")
        loaded = type(made).from_pretrained(place / "quantized").eval()
        prompt = torch.tensor([PROMPT])

        def along(text: Any, loaded: Any = loaded) -> Any:
            logprobs = loaded(text).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
            return logprobs.gather(1, text[0, len(PROMPT) :, None])[:, 0]

        with torch.no_grad():
            # The first call unpacks it, in float32; its own method refuses to change the dtype of quantized models.
            loaded(prompt)
            exact = copy.deepcopy(loaded)
            torch.nn.Module.to(loaded, getattr(torch, dtype))
            text = loaded.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            found = along(text)
            rounded = float((found - along(text, exact)).abs().max())
        state = json.loads((place / "quantized" / "moq_state.json").read_text(encoding="utf-8"))
        proof = {key: state["proof"][key] for key in ("agrees", "largest_difference", "inputs")}
        answer = {"dtype": dtype, "tokens": text[0, len(PROMPT) :].tolist(), "logprobs": found.tolist()}
        answer |= {"proof": proof, "from_float32": rounded}
        write_json(answer, place / "reference.json")
        print(name, proof, flush=True)


def make_large(folder: Path) -> None:
    """The folders of "speed"."""
    import torch
    import transformers

    for name, config in SPEED.items():
        if (folder / name).exists():
            continue
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).to(torch.bfloat16)
        if config is None:
            model.save_pretrained(folder / name)
        else:
            _train(model, config, folder / "run", steps=2)
            (folder / "run" / "quantized").rename(folder / name)


def write_json(document: Any, path: Path) -> None:
    """Write JSON."""
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def apart(folder: Path, ask: Any) -> dict[str, Any]:
    """What a function gives in a process of its own, whose output is in the folder's log; an error is a no."""
    path = folder / ".answer.json"
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            found = ask()
        except BaseException as error:
            found = {"serves": False, "why": f"{type(error).__name__}: {error}"}
        write_json(found, path)
        os._exit(0)
    os.waitpid(child, 0)
    if not path.exists():
        return {"serves": False, "why": "the process died"}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def serve(folder: Path, names: list[str]) -> None:
    """Ask vLLM for the same answers, each folder in a process of its own."""
    os.environ.update(SETTINGS, VLLM_LOGGING_LEVEL="INFO")
    for name in names:
        place = folder / name.replace(" ", "_")
        reference = json.loads((place / "reference.json").read_text(encoding="utf-8"))

        def ask(place: Path = place, reference: dict[str, Any] = reference) -> dict[str, Any]:
            from vllm import LLM, SamplingParams

            common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 2}
            llm = LLM(str(place / "quantized"), dtype=reference["dtype"], block_size=32, **common)
            fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
            asked = [
                SamplingParams(max_tokens=TOKENS, **fixed),
                SamplingParams(max_tokens=1, prompt_logprobs=0, **fixed),
            ]
            followed = PROMPT + reference["tokens"]
            prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": followed}]
            made, along = llm.generate(prompts, asked, use_tqdm=False)
            found = [
                entry[token].logprob for entry, token in zip(along.prompt_logprobs, followed, strict=True) if entry
            ]
            pairs = zip(found[-TOKENS:], reference["logprobs"], strict=True)
            same = sum(one == other for one, other in zip(made.outputs[0].token_ids, reference["tokens"], strict=True))
            return {"serves": True, "same_tokens": same, "largest_difference": max(abs(a - b) for a, b in pairs)}

        (place / "server.log").unlink(missing_ok=True)
        answer = apart(place, ask)
        log = (place / "server.log").read_text(encoding="utf-8", errors="replace")
        answer["kernels"] = sorted(set(re.findall(r"\w+LinearKernel for \w+", log)))
        write_json(answer, place / "served.json")
        print(name, answer, flush=True)


def serve_large(folder: Path, rounds: int = 15) -> None:
    """Engines side by side, asked in turn: the least seconds, since other processes run beside them."""
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    from vllm import LLM, SamplingParams

    common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "enable_prefix_caching": False}
    times: dict[str, Any] = {}
    for dtype in DTYPES:
        engines = {name: LLM(str(folder / name), dtype=dtype, max_num_seqs=8, **common) for name in SPEED}
        for (shape, (count, length, made)), turn in product(SHAPES.items(), range(rounds + 1)):
            prompts = [
                {"prompt_token_ids": [3 + (7 * turn + i * j) % 500 for j in range(length)]} for i in range(count)
            ]
            asked = SamplingParams(max_tokens=made, temperature=0, ignore_eos=True, detokenize=False)
            for name, engine in engines.items():
                began = time.perf_counter()
                engine.generate(prompts, asked, use_tqdm=False)
                seconds = time.perf_counter() - began
                # The first turn warms up.
                if turn:
                    times.setdefault(dtype, {}).setdefault(shape, {}).setdefault(name, []).append(seconds)
        del engines
    least = {
        dtype: {shape: {name: round(min(found), 4) for name, found in one.items()} for shape, one in shapes.items()}
        for dtype, shapes in times.items()
    }
    write_json(least, folder / "speed.json")
    print(json.dumps(least, indent=1))


def report(folder: Path, out: Path) -> None:
    """Put the answers into one document."""
    from environment import environment, write

    cases = {}
    for name, (_, _, config) in CASES.items():
        place = folder / name.replace(" ", "_")
        reference, served = (json.loads((place / f"{part}.json").read_text()) for part in ("reference", "served"))
        told = {key: reference[key] for key in ("proof", "from_float32")}
        cases[name] = {"config": config, **told, **served}
    speed = json.loads((folder / "large" / "speed.json").read_text(encoding="utf-8"))
    write(
        {**environment("compressed_tensors"), "vllm": "0.32.0", "tokens": TOKENS, "cases": cases, "seconds": speed}, out
    )


def main() -> None:
    """Read the command line and do one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "serve", "speed", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="NAME", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "served_int8.json")
    args = parser.parse_args()
    if args.step == "make":
        make(args.folder, args.cases)
        make_large(args.folder / "large")
    elif args.step == "serve":
        serve(args.folder, args.cases)
    elif args.step == "speed":
        serve_large(args.folder / "large")
    else:
        report(args.folder, args.out)


if __name__ == "__main__":
    main()
