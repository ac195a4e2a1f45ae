"""Makes a folder for mlx-lm, on Macs: of a finished language model, rounded to 4 bits, or of what a run delivered.

    pip install .
    python examples/to_mlx.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python examples/to_mlx.py --folder runs/trl-sft/quantized
    python examples/to_mlx.py --small

The last line downloads nothing: it takes a tiny Llama with random weights. It all runs on any machine; on a Mac follows
`mlx_lm.generate --model runs/mlx/model-mlx --prompt Hello`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from moq_hf import quantize_model, save_quantized


def rounded(args: argparse.Namespace) -> Path:
    """Round a model to 4 bits in groups of 32, without training, and save it packed."""
    if args.small:
        sys.path.insert(0, str(Path(__file__).parent / "sft"))
        from train import new_model, new_tokenizer

        set_seed(1)
        tokenizer = new_tokenizer(["What color is the raven?", "The raven is black."])
        model = new_model(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
    # MLX computes q * scale + bias. With scales of half precision that is the saved weight, bit for bit.
    quantize_model(model, "lm-w4", scale_dtype="float16")
    example = tokenizer(["What color is the raven?"], return_tensors="pt", return_token_type_ids=False)
    return save_quantized(model.eval(), args.output_dir / "model", processing_class=tokenizer, inputs=example)


def main() -> None:
    """Round where there is something to round, and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--folder", type=Path, help="the packed folder of a run or of `save_quantized`")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/mlx"))
    parser.add_argument("--small", action="store_true", help="a tiny model, without a download")
    args = parser.parse_args()
    folder = args.folder or rounded(args)
    export = ["-m", "moq_hf", "export", str(folder), "--to", "mlx"]
    if subprocess.run([sys.executable, *export], check=False).returncode:
        parser.exit(1, f"No MLX folder was made, see above. The packed model is in {folder}.\n")


if __name__ == "__main__":
    main()
