"""Answers the example's questions with a folder that `train.py` wrote: vLLM, and no moq_hf.

    python examples/sft/generate_vllm.py runs/sft/quantized

It needs vLLM; `benchmarks/requirements-vllm.txt` has the environment for a CPU. An answer is right if it is the
expected one to the letter.
"""

import argparse
import os
import sys
from pathlib import Path

from dialogues import dialogues

# vLLM's main process runs the model itself, with a small cache.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main() -> None:
    """Print how many of all answers are right."""
    import vllm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    model = vllm.LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=8)
    _, held_out = dialogues()
    settings = vllm.SamplingParams(temperature=0, max_tokens=16)
    made = model.chat([dialogue["messages"][:1] for dialogue in held_out], settings, use_tqdm=False)
    answers = [answer.outputs[0].text.strip() for answer in made]
    right = sum(
        answer == dialogue["messages"][1]["content"] for answer, dialogue in zip(answers, held_out, strict=True)
    )
    print(f"{right} of {len(held_out)} answers are right; moq_hf is imported: {'moq_hf' in sys.modules}")


if __name__ == "__main__":
    main()
