"""Answers the example's questions with the GGUF file that `train.py` wrote: llama.cpp, with its own tokenizer.

    python examples/sft/generate_gguf.py runs/sft/model-q4_0.gguf

It needs the package `llama-cpp-python`, and neither transformers nor moq_hf.
"""

import argparse
import sys

import llama_cpp
from dialogues import dialogues


def main() -> None:
    """Print how many of all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--plain_buffers", action="store_true", help="for machines that hide their matrix instructions")
    args = parser.parse_args()
    if args.plain_buffers:
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def without_extra() -> llama_cpp.llama_model_params:
            settings = defaults()
            settings.use_extra_bufts = False
            return settings

        llama_cpp.llama_cpp.llama_model_default_params = without_extra
    model = llama_cpp.Llama(args.file, n_ctx=128, n_threads=1, verbose=False)
    _, held_out = dialogues()
    right = 0
    for dialogue in held_out:
        user, assistant = (message["content"] for message in dialogue["messages"])
        # As in training, nothing stands before the first mark.
        prompt = model.tokenize(f"<|user|>{user}<|assistant|>".encode(), add_bos=False, special=True)
        made = model(prompt, max_tokens=16, temperature=0.0)
        right += made["choices"][0]["text"].strip() == assistant
    print(f"{right} of {len(held_out)} answers are right; moq_hf is imported: {'moq_hf' in sys.modules}")


if __name__ == "__main__":
    main()
