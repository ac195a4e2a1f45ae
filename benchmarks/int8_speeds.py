"""The speed of int8 files over ONNX Runtime's `quantize_dynamic`, on one thread; JSON.

    python benchmarks/int8_speeds.py --kernels VNNI

An encoder of MiniLM's shape with random weights of 8 bits. Files take turns; a speed is the median of the ratios of
processor time. `--kernels` names the instructions that ONNX Runtime chose its kernels by, where they are not all that
the processor has.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from environment import environment, write
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoTokenizer, BertConfig, BertModel, set_seed

from moq_hf import quantize_model, save_quantized
from moq_hf.export.onnx import export_onnx, onnx_runtime
from moq_hf.export.onnx_rewrite import target_here

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "int8_speeds.json"
SHAPES = {"1 x 16": (1, 16, 200), "1 x 128": (1, 128, 60), "8 x 128": (8, 128, 12)}
THEIRS = {"quantize_dynamic": QuantType.QInt8, "quantize_dynamic, QUInt8": QuantType.QUInt8}


def files(folder: Path, target: str) -> dict[str, Path]:
    """The files that are compared, by name."""
    set_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = quantize_model(BertModel(BertConfig(**sizes)).eval(), {"bits": 8, "embeddings": 8})
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    packed = save_quantized(model, folder / "packed", processing_class=tokenizer)
    found = {}
    for bits in (8, 7):
        out = folder / f"activations {bits}"
        export_onnx(packed, out, flavors=["float", "int8"], cpu=target, activation_bits=bits, tolerance=1.0)
        found[f"int8, activations of {bits} bits"] = out / "model_int8.onnx"
    for name, kind in THEIRS.items():
        found[name] = folder / f"{kind}.onnx"
        quantize_dynamic(out / "model_float.onnx", found[name], weight_type=kind)
    return found


def speeds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """How much faster each is than `quantize_dynamic`: the median of the ratios, one for each turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if turn >= 3:
                times[name].append(time.process_time() - begin)
    theirs = times["quantize_dynamic"]
    ratios = {name: [a / b for a, b in zip(theirs, each, strict=True)] for name, each in times.items()}
    return {name: round(statistics.median(each), 3) for name, each in ratios.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--cpu", choices=("vnni", "avx2"), default=target_here())
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {name: onnx_runtime(path, 1) for name, path in files(Path(folder), args.cpu).items()}
        for shape, (batch, sequence, repeats) in SHAPES.items():
            ids = torch.arange(batch * sequence).view(batch, sequence) % 10
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            measured[shape] = speeds({name: partial(run, inputs) for name, run in models.items()}, repeats)
    print(json.dumps(measured, indent=1))
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    speed = found.get("speed", {}) | {args.kernels: measured}
    write({"speed": speed, "clock": "processor time"} | environment("onnxruntime", kernels=args.kernels), args.out)


if __name__ == "__main__":
    main()
