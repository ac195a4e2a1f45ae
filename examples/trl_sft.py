"""Fine-tunes a chat model to 4 bits with TRL's `SFTTrainer`, for vLLM, llama.cpp or plain transformers.

    pip install . trl datasets
    python examples/trl_sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset trl-lib/Capybara
    python examples/trl_sft.py --small

The last line downloads nothing: it trains a tiny Llama on the dialogues of examples/sft, in under a minute on a CPU.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from moq_hf import MoQCallback


def small() -> tuple[Any, Any, Dataset]:
    """A tiny Llama with random weights, its tokenizer and a few dialogues."""
    sys.path.insert(0, str(Path(__file__).parent / "sft"))
    from dialogues import dialogues
    from train import new_model, new_tokenizer

    rows, _ = dialogues()
    tokenizer = new_tokenizer([message["content"] for row in rows for message in row["messages"]])
    return new_model(tokenizer), tokenizer, Dataset.from_list(rows)


def main() -> None:
    """Train, load what was delivered, and ask it something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", default="trl-lib/Capybara", help="has a column `messages`")
    parser.add_argument("--output_dir", default="runs/trl-sft")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--serve", nargs="*", default=["vllm", "llama.cpp"], help="where it shall run")
    parser.add_argument("--question", default="What color is the raven?")
    parser.add_argument("--small", action="store_true", help="a tiny model, without a download")
    args = parser.parse_args()
    set_seed(1)
    if args.small:
        args.learning_rate = 3e-3
        model, tokenizer, rows = small()
    else:
        model, tokenizer = args.model, AutoTokenizer.from_pretrained(args.model)
        rows = load_dataset(args.dataset, split="train")

    gpu = torch.cuda.is_available()
    # In float for 0.9 of the run, then at 4 bits from GPTQ's rounding, with a scale for each 32 weights. A server in
    # `serve` that could not take the result ends the run before its first step.
    callback = MoQCallback("lm-w4", start_bits=4, offset=0.9, gptq=128, serve=args.serve)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=16,
            learning_rate=args.learning_rate,
            warmup_steps=0.1,
            max_length=512,
            logging_steps=max(1, args.max_steps // 10),
            activation_checkpointing=gpu,
            bf16=gpu,
            use_cpu=not gpu,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()

    # From here on nothing of moq_hf is needed.
    folder = callback.delivered.path
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": args.question}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{args.question} - {answer.strip()}")


if __name__ == "__main__":
    main()
