"""Answers the example's questions with a folder that `train.py` wrote: plain transformers, and no moq_hf.

    python examples/sft/generate.py runs/sft/quantized

An answer is right if it is the expected one to the letter.
"""

import argparse
import sys
from pathlib import Path

import torch
from dialogues import dialogues
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print three dialogues, and how many of all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        # The first call unpacks the weights, which PEFT needs.
        model(torch.zeros(1, 1, dtype=torch.long))
        model = PeftModel.from_pretrained(model, folder / "adapter")
    model.eval()
    right, (_, held_out) = 0, dialogues()
    for number, dialogue in enumerate(held_out):
        user, assistant = dialogue["messages"]
        prompt = tokenizer.apply_chat_template(
            [user], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        right += answer == assistant["content"]
        if number < 3:
            print(f"{user['content']}\n  {answer}")
    print(f"{right} of {len(held_out)} answers are right; moq_hf is imported: {'moq_hf' in sys.modules}")


if __name__ == "__main__":
    main()
