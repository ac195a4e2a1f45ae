"""One engine of `moq-hf bench` in a process of its own; run as a file, so that onnxruntime is alone in its memory.

    python bench_worker.py ENGINE PATH THREADS CLOCK INPUTS OUTPUTS

It loads the model, then answers each line. "BATCH SEQUENCE": the seconds of one forward pass by CLOCK, "wall" or "cpu".
"memory": its resident bytes. "answer": the number of batches in INPUTS, whose first outputs it writes to OUTPUTS. Both
are `.npz` files: "0.input_ids", "0.attention_mask", "1.input_ids", ...; "0", "1", ...
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[np.int64]]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Engine(NamedTuple):
    """A loaded model: the names of its inputs, what runs it, and what takes the first output of what that gave."""

    names: list[str]
    run: Callable[[Inputs], Any]
    first: Callable[[Any], NDArray[np.float32]]


def load(engine: str, path: str, threads: int) -> Engine:
    """The model at `path` in "onnx" (Runtime), "openvino", or PyTorch: "torch", "bf16", "packed"."""
    if engine == "onnx":
        return _onnx(path, threads)
    if engine == "openvino":
        return _openvino(path, threads)
    return _torch(engine, path, threads)


def _onnx(path: str, threads: int) -> Engine:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return Engine(
        names, lambda inputs: session.run(None, {name: inputs[name] for name in names}), lambda outputs: outputs[0]
    )


def _openvino(path: str, threads: int) -> Engine:
    """Its defaults, but for the threads: where the CPU has AMX it computes in bf16."""
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": threads})
    names = [value.get_any_name() for value in compiled.inputs]
    return Engine(
        names, lambda inputs: compiled({name: inputs[name] for name in names}), lambda outputs: np.array(outputs[0])
    )


def _torch(engine: str, path: str, threads: int) -> Engine:
    import torch

    torch.set_num_threads(threads)
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(path)
    architecture = getattr(transformers, (config.architectures or [""])[0])
    dtype = torch.bfloat16 if engine == "bf16" else torch.float32
    model: Any = architecture.from_pretrained(path, dtype=dtype).eval()

    def run(inputs: Inputs) -> Any:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(value) for name, value in inputs.items()})

    return Engine(["input_ids", "attention_mask"], run, lambda outputs: outputs[0].float().numpy())


def _memory() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _answer(engine: Engine, source: str, target: str) -> int:
    """Write the first output for each batch of `source` to `target`; gives the number of batches."""
    batches: dict[str, Inputs] = {}
    with np.load(source) as stored:
        for key in stored.files:
            index, _, name = key.partition(".")
            batches.setdefault(index, {})[name] = stored[key]
    outputs: dict[str, Any] = {index: engine.first(engine.run(batch)) for index, batch in batches.items()}
    np.savez(target, **outputs)
    return len(batches)


def _seconds(engine: Engine, clock: Callable[[], float], batch: int, sequence: int) -> float:
    """Of a forward pass without padding."""
    ids = np.random.default_rng(0).integers(1, 10, (batch, sequence))
    inputs = {name: np.ones_like(ids) if name == "attention_mask" else np.zeros_like(ids) for name in engine.names}
    inputs["input_ids"] = ids
    start = clock()
    engine.run(inputs)
    return clock() - start


def main() -> None:
    """Serve the lines of stdin until it ends."""
    # What a library prints is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, path, threads, clock, source, target = sys.argv[1:]
    engine = load(name, path, int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = line.strip()
        if question == "memory":
            answer: float = _memory()
        elif question == "answer":
            answer = _answer(engine, source, target)
        else:
            answer = _seconds(engine, CLOCKS[clock], *map(int, question.split()))
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
