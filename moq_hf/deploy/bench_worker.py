"""One engine of `moq-hf bench` in a process of its own; run as a file, so that onnxruntime is alone in its memory.

    python bench_worker.py ENGINE PATH THREADS

It loads the model, then answers each line "BATCH SEQUENCE" with the seconds of one forward pass, and "memory" with its
resident bytes.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[np.int64]]


def load(engine: str, path: str, threads: int) -> tuple[list[str], Callable[[Inputs], Any]]:
    """The names of the inputs of the model at `path` and a function that runs it; "torch", "packed" or "onnx"."""
    if engine == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return [value.name for value in session.get_inputs()], lambda inputs: session.run(None, inputs)
    import torch

    torch.set_num_threads(threads)
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if engine == "packed":
        model: Any = importlib.import_module("moq_hf").load_packed(path, device="cpu", dtype=torch.float32)
    else:
        config = transformers.AutoConfig.from_pretrained(path)
        model = getattr(transformers, (config.architectures or [""])[0]).from_pretrained(path).eval()

    def run(inputs: Inputs) -> Any:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(value) for name, value in inputs.items()})

    return ["input_ids", "attention_mask"], run


def main() -> None:
    """Serve the lines of stdin until it ends."""
    engine, path, threads = sys.argv[1:]
    names, run = load(engine, path, int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            status = Path("/proc/self/status").read_text()
            print(int(status.split("VmRSS:")[1].split()[0]) * 1024, flush=True)
            continue
        batch, sequence = map(int, line.split())
        ids = np.random.default_rng(0).integers(1, 10, (batch, sequence))
        inputs = {name: np.ones_like(ids) if name == "attention_mask" else np.zeros_like(ids) for name in names}
        inputs["input_ids"] = ids
        start = time.perf_counter()
        run(inputs)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
