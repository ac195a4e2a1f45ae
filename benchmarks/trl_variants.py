"""TRL's trainers with `MoQCallback`, each in its own way: does it train, reach 4 bits, and load as it was?

    python benchmarks/trl_variants.py

Model, tokenizer and dialogues are those of `examples/sft`. A variant trains for 40 optimizer steps, 8 bits falling to 4
within the first 16. Its packed folder is loaded by a process that cannot import moq_hf: logits and 12 greedy tokens
must be equal. "resume" is killed after step 20 and goes on; its weights must be those of "full", bit for bit.
"""

import argparse
import copy
import json
import math
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sft"))

STEPS = 40
MOQ = {
    "quantize_bits": {"start_bits": 8, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
    "quantize_group_size": 32,
}
LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# Arguments of the trainer; "data" says in which form the dialogues are.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, gradient accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "full, activation checkpointing": {"activation_checkpointing": True},
    "full, bf16": {"bf16": True},
    "full, resumed": {"save_strategy": "steps", "save_steps": 20},
    "packing, best fit": {"packing": True, "max_length": 128},
    "packing, wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 128},
    "padding-free": {"padding_free": True, "max_length": None},
    "assistant-only loss": {"data": "messages", "assistant_only_loss": True},
    "prompt and completion": {"data": "prompt"},
    "LoRA": {"lora": {}},
    "LoRA, assistant-only loss": {"lora": {}, "data": "messages", "assistant_only_loss": True},
    "LoRA, packing": {"lora": {}, "packing": True, "max_length": 128},
    "LoRA, activation checkpointing": {"lora": {}, "activation_checkpointing": True},
    "LoRA, bf16": {"lora": {}, "bf16": True},
    "LoRA, resumed": {"lora": {}, "save_strategy": "steps", "save_steps": 20},
    "LoRA with trained head": {"lora": {"modules_to_save": ["lm_head"]}},
    "DoRA": {"lora": {"use_dora": True}},
    "DPO": {"data": "preference"},
    "DPO, LoRA": {"data": "preference", "lora": {}},
    "DPO, LoRA, resumed": {"data": "preference", "lora": {}, "save_strategy": "steps", "save_steps": 20},
}


class Killed(Exception):
    """Ends a run as a kill would: nothing after it is called."""


def rows_for(form: str) -> list[dict[str, Any]]:
    """The dialogues of the example in one of TRL's forms."""
    from dialogues import dialogues

    made = []
    found, _ = dialogues()
    for dialogue, other in zip(found, [*found[1:], found[0]], strict=True):
        user, assistant = (message["content"] for message in dialogue["messages"])
        answers = {"chosen": f" {assistant}", "rejected": f" {other['messages'][1]['content']}"}
        made.append(
            {
                "messages": dialogue,
                "prompt": {"prompt": user, "completion": f" {assistant}"},
                "preference": {"prompt": user, **answers},
                "text": {"text": f"{user} {assistant}"},
            }[form]
        )
    return made


def trainer_of(name: str, folder: Path, kill_at: int | None = None) -> Any:
    """The trainer of a variant, which writes to a folder."""
    from datasets import Dataset
    from dialogues import dialogues
    from peft import LoraConfig
    from train import new_model, new_tokenizer
    from transformers import TrainerCallback, set_seed
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from moq_hf import MoQCallback

    class Kill(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == kill_at:
                raise Killed

    given = dict(VARIANTS[name])
    form, lora = given.pop("data", "text"), given.pop("lora", None)
    settings = {"max_length": 64, "activation_checkpointing": False, "bf16": False, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 10, "seed": 1}
    settings |= {"max_steps": STEPS, "use_cpu": True, "report_to": [], "disable_tqdm": True, **given}
    kind, arguments = (DPOTrainer, DPOConfig) if form == "preference" else (SFTTrainer, SFTConfig)
    texts = [message["content"] for dialogue in dialogues()[0] for message in dialogue["messages"]]
    tokenizer = new_tokenizer(texts)
    set_seed(1)
    model = new_model(tokenizer)
    # Without adapters DPO would load its reference by the model's name, and this one has none.
    more = {"ref_model": copy.deepcopy(model)} if form == "preference" and lora is None else {}
    return kind(
        model,
        args=arguments(str(folder), **settings),
        train_dataset=Dataset.from_list(rows_for(form)),
        processing_class=tokenizer,
        peft_config=None if lora is None else LoraConfig(**LORA, **lora),
        callbacks=[MoQCallback(MOQ), Kill()],
        **more,
    )


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train a variant and have its packed folder loaded; what happened."""
    import torch
    from stranger_lm import answers_of

    from moq_hf import verify_quantized

    began = time.perf_counter()
    trainer = trainer_of(name, folder, 20 if name.endswith("resumed") else None)
    try:
        trainer.train()
    except Killed:
        trainer = trainer_of(name, folder)
        trainer.train(resume_from_checkpoint=True)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    model = trainer.accelerator.unwrap_model(trainer.model)
    packed = folder / "quantized"
    layers = verify_quantized(packed).layers
    question = torch.tensor([[1, 270, 280, 290, 300, 310]])
    half = trainer.args.bf16
    torch.save({"question": question, "half": half, **answers_of(model, question, half)}, folder / "expected.pt")
    state = json.loads((packed / "moq_state.json").read_text(encoding="utf-8"))
    return {
        "steps": trainer.state.global_step,
        "losses": losses,
        "losses_are_finite": all(map(math.isfinite, losses)),
        "bits": sorted({layer.bits for layer in layers.values()}),
        "layers": len(layers),
        "has_adapter": (packed / "adapter").is_dir(),
        "layout": state["layout"],
        "proof_agrees": state["proof"]["agrees"],
        "digest": digest(model),
        "seconds": round(time.perf_counter() - began, 1),
    }


def digest(model: Any) -> str:
    """12 characters of the weights that training changed and of those that it left."""
    import hashlib

    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.detach().float().numpy().tobytes())
    return total.hexdigest()[:12]


def table(document: Mapping[str, Any]) -> str:
    """A Markdown table of the results, a variant a line."""
    rows = ["| way | loss | bits | delivered | loaded by plain transformers |", "|" + " --- |" * 5]
    for name, result in document["variants"].items():
        if "error" in result or "loading_error" in result:
            error = result.get("error", result.get("loading_error"))
            rows.append(f"| {name} | | | | {textwrap.shorten(error, 100, placeholder=' ...')} |")
            continue
        equal = "equal bit for bit" if result["logits_are_equal"] else f"up to {result['largest_difference']:.1g} apart"
        loss = f"{result['losses'][0]:.2f} to {result['losses'][-1]:.2f}"
        bits = " ".join(map(str, result["bits"]))
        adapter = " and adapter" if result["has_adapter"] else ""
        rows.append(f"| {name} | {loss} | {bits} | {result['layout']}{adapter} | {equal} |")
    return "\n".join(rows)


def main() -> None:
    """Run what is asked for, and write the results."""
    from environment import environment, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trl.json")
    parser.add_argument("--report", action="store_true", help="print the table of what was written, and stop")
    args = parser.parse_args()
    if args.report:
        print(table(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    with tempfile.TemporaryDirectory(prefix="trl-") as place:
        folders = {name: Path(place, str(number)) for number, name in enumerate(args.variants)}
        results = {}
        for name, folder in folders.items():
            results[name] = attempt(lambda name=name, folder=folder: run(name, folder))
            print(name, json.dumps(results[name]), flush=True)
        loaded = [name for name in results if "error" not in results[name]]
        command = [sys.executable, str(Path(__file__).parent / "stranger_lm.py")]
        told = subprocess.run([*command, *(folders[name] for name in loaded)], stdout=subprocess.PIPE, text=True)
        lines = [line for line in told.stdout.splitlines() if line.startswith("{")]
        for name, line in zip(loaded, lines, strict=True):
            results[name] |= json.loads(line)
    before = json.loads(args.out.read_text(encoding="utf-8"))["variants"] if args.out.exists() else {}
    results = {name: {**before, **results}[name] for name in VARIANTS if name in {*before, *results}}
    document = {"variants": results, "steps": STEPS, "moq": MOQ, **environment("trl", "peft", "compressed_tensors")}
    write(document, args.out)


def attempt(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its result, or its error."""
    try:
        return what()
    except Exception as error:
        # Each of them is a result.
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


if __name__ == "__main__":
    main()
