"""`moq-hf bench` measures every engine at every shape, goes on where one fails, and says which file to deploy."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnxruntime import quantization
from packed_bert import SHAPE, VALIDATION, checkpoint, config_of
from transformers import BertConfig, BertForSequenceClassification

from moq_hf import MoQError
from moq_hf.cli import main
from moq_hf.export import bench
from moq_hf.export.bench import benchmark, draw
from moq_hf.export.bench_engines import ENGINES, Prepared, version_of
from moq_hf.export.bench_result import Benchmark, Timing
from moq_hf.export.data import read_data
from moq_hf.export.environment import instructions, machine
from moq_hf.export.proof import Proof

BF16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(machine()["instructions"].split())
LEFT_OUT = (set() if BF16 else {"PyTorch bf16"}) | (set() if version_of("openvino") else {"OpenVINO"})
MEASURED = [engine.name for engine in ENGINES if not {engine.name, engine.runtime} & LEFT_OUT]
SMALL: dict[str, Any] = {"batches": [1], "sequences": [8], "threads": 1, "repeats": 1}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    return checkpoint(tmp_path_factory.mktemp("bench") / "packed", model, config_of())


def test_every_engine_its_answers_and_the_file_to_deploy(
    packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(packed), "--batch", "1", "2", "--sequence", "8", "--threads", "1", "--repeats", "2"]
    words += ["--validation_file", str(VALIDATION), "--task_name", "sst2", "--max_loss", "1"]
    assert main([*words, "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert [t["engine"] for t in found["timings"]] == MEASURED * 2
    assert all(0 < t["p50"] <= t["p90"] for t in found["timings"])
    assert [t["speed"] for t in found["timings"] if t["engine"] == "PyTorch float"] == [1.0, 1.0]
    assert [t["speed_over_onnx"] for t in found["timings"] if t["engine"] == "ONNX float"] == [1.0, 1.0]
    for part in ("bytes", "memory", "proofs"):
        assert found[part].keys() == set(MEASURED), part
    assert found["missing"].keys() == LEFT_OUT
    # Without PyTorch in the process.
    assert found["memory"]["ONNX int8"] < found["memory"]["PyTorch float"] / 2
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")

    rows = len(VALIDATION.read_text().splitlines())
    assert found["compared"] == rows and found["checkpoint_metrics"].keys() == {"accuracy"}
    for engine, proof in found["proofs"].items():
        assert proof["metrics"].keys() == {"accuracy"}, engine
        # OpenVINO computes in bf16 where it can.
        exact = engine in ("PyTorch float", "ONNX float", "ONNX weight-only")
        assert (proof["largest_difference"] < 1e-5) == exact or "OpenVINO" in engine, engine
    assert found["proofs"]["ONNX weight-only"]["metrics"] == found["checkpoint_metrics"]
    assert found["recommendation"]["refused"] == {}
    assert found["recommendation"]["by_shape"].keys() == {"1 x 8", "2 x 8"}

    table = capfd.readouterr().out
    assert f"instructions: {machine()['instructions'] or 'unknown'}" in table and "threads: 1" in table
    assert "| 1 x 8" in table and "| 2 x 8" in table
    assert table.count("\nDeploy here: ") == 1 and "The checkpoint in PyTorch: accuracy 0." in table
    lines = [line for name in LEFT_OUT for line in table.splitlines() if line.startswith(f"| {name} | left out: ")]
    assert len(lines) == len(LEFT_OUT)


def test_engines_that_fail_are_lines_of_the_table(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cannot be made, one not be loaded, one ends in the middle, and one gives no numbers."""

    def refuse(*args: Any, **more: Any) -> None:
        raise ValueError("no such\nmodel")

    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, signal, sys\n"
        f"sys.path[:0] = [{str(Path(bench.__file__).parent)!r}]\n"
        "import bench_worker\n"
        "load, passes = bench_worker.load, []\n"
        "def broken(engine, path, threads):\n"
        "    print('not an answer')\n"
        "    name = os.path.basename(path)\n"
        "    if engine in ('torch', 'bf16'):\n"
        "        raise RuntimeError('cannot load it')\n"
        "    loaded = load(engine, path, threads)\n"
        "    def run(inputs):\n"
        "        passes.append(1)\n"
        "        if name == 'model.onnx' and len(passes) == 3:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return loaded.run(inputs)\n"
        "    first = loaded.first if name != 'model_int8.onnx' else lambda outputs: outputs[0] * float('nan')\n"
        "    return loaded._replace(run=run, first=first)\n"
        "bench_worker.load = broken\n"
        "bench_worker.main()\n"
    )
    search = os.pathsep.join(filter(None, (str(Path(bench.__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", search)
    monkeypatch.setattr(bench, "_WORKER", worker)
    monkeypatch.setattr(quantization, "quantize_dynamic", refuse)
    found = benchmark(packed, **SMALL | {"repeats": 3, "clock": "cpu"})
    failed = {name: reason for name, reason in found.missing.items() if name not in LEFT_OUT}
    left = [name for name in ("ONNX float", "OpenVINO float", "OpenVINO dequantize-linear") if name in MEASURED]
    assert failed.keys() == set(MEASURED) - set(left)
    assert failed["PyTorch float"] == "failed: RuntimeError: cannot load it"
    assert failed["ONNX quantize_dynamic"] == "failed: ValueError: no such model"
    assert failed["ONNX weight-only"] == "failed: ended with status -9"
    assert failed["ONNX int8"] == "failed: some of its answers are not finite"
    assert "| PyTorch float | failed: RuntimeError: cannot load it |" in found.table()
    assert [timing.engine for timing in found.timings] == left == list(found.bytes) == list(found.memory)
    # There is nothing to compare with, and still a fastest file.
    assert {timing.speed for timing in found.timings} == {None}
    assert found.recommendation().overall == ("OpenVINO dequantize-linear" if len(left) > 1 else None)
    with pytest.raises(MoQError, match="no speeds to draw: PyTorch float failed: RuntimeError"):
        draw(found, tmp_path / "b.png")


def test_nothing_is_left_when_all_fail(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text("raise SystemExit('out of order')")
    monkeypatch.setattr(bench, "_WORKER", tmp_path / "worker.py")
    paths = {"PyTorch float": packed, "ONNX int8": tmp_path / "model_int8.onnx"}
    monkeypatch.setattr(bench, "prepare", lambda *args: Prepared(paths, {}, 8))
    says = "every engine failed: PyTorch float failed: out of order, ONNX int8 failed: out of order"
    with pytest.raises(MoQError, match=says):
        benchmark(packed, **SMALL)


def test_wrong_arguments(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoQError, match="longer than the 64 positions"):
        benchmark(packed, sequences=[65])
    for wrong in ({"clock": "cpu", "threads": 2}, {"clock": "sun", "threads": 1}):
        with pytest.raises(MoQError, match="legal are wall, and cpu with one thread"):
            benchmark(packed, **wrong)  # type: ignore[arg-type]
    with pytest.raises(MoQError, match="does not fit a model with 2 outputs"):
        benchmark(packed, **SMALL, data=read_data(VALIDATION, "stsb"))
    for words, says in (
        (["--task_name", "sst2"], "--task_name goes with --validation_file"),
        (["--max_loss", "-1"], "invalid number from 0 value: '-1'"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", str(packed), *words])
        assert says in capsys.readouterr().err


def found_of(speeds: dict[str, list[float]], metrics: dict[str, dict[str, float]], **more: Any) -> Benchmark:
    """A result with these speeds at the shapes 1 x 16 and 8 x 16, and these metrics, "checkpoint" among them."""
    timings = [
        Timing(name, batch, 16, 100 / speed, 100 / speed, batch * speed * 10, speed, speed / 2)
        for name, both in speeds.items()
        for batch, speed in zip((1, 8), both, strict=True)
    ]
    known = metrics.get("checkpoint", {})
    proofs = {name: Proof(0.25, None, 0.5, metrics.get(name, known)) for name in speeds}
    on = {"processor": "P", "instructions": "avx2", "cores": "2", "load": "0.4", "python": "3.11"}
    sizes = dict.fromkeys(speeds, 10**6)
    result = Benchmark(1, 7, sizes, sizes, tuple(timings), on, {}, 12, known, proofs, 0.01, "wall")
    return replace(result, **more)


WEIGHTS, INT8, DYNAMIC = "OpenVINO weight-only", "ONNX int8", "ONNX quantize_dynamic"
SPEEDS = {"PyTorch float": [1.0, 1.0], DYNAMIC: [4.0, 4.0], INT8: [6.0, 1.0], WEIGHTS: [3.0, 3.0]}


@pytest.mark.parametrize(
    ("metrics", "max_loss", "expected"),
    [
        # The geometric mean decides: 3 against the root of 6.
        ({}, 0.01, (WEIGHTS, [INT8, WEIGHTS], {}, (DYNAMIC,))),
        ({"checkpoint": {"accuracy": 0.8}}, 0.01, (WEIGHTS, [INT8, WEIGHTS], {}, (DYNAMIC,))),
        # Just as much as it may lose, one more, and more than the checkpoint has.
        (
            {"checkpoint": {"accuracy": 0.8}, INT8: {"accuracy": 0.79}},
            0.01,
            (WEIGHTS, [INT8, WEIGHTS], {}, (DYNAMIC,)),
        ),
        (
            {"checkpoint": {"accuracy": 0.8}, INT8: {"accuracy": 0.78}},
            0.01,
            (WEIGHTS, [WEIGHTS, WEIGHTS], {INT8: 0.02}, (DYNAMIC,)),
        ),
        (
            {"checkpoint": {"accuracy": 0.8}, WEIGHTS: {"accuracy": 0.7}, INT8: {"accuracy": 0.9}},
            0.0,
            (INT8, [INT8, INT8], {WEIGHTS: 0.1}, (DYNAMIC,)),
        ),
        # The metric that loses most decides, and one that is not a number is no proof.
        (
            {"checkpoint": {"accuracy": 0.8, "f1": 0.9}, WEIGHTS: {"accuracy": 0.9, "f1": 0.8}},
            0.01,
            (INT8, [INT8, INT8], {WEIGHTS: 0.1}, (DYNAMIC,)),
        ),
        (
            {"checkpoint": {"accuracy": 0.8}, INT8: {"accuracy": 0.0}, WEIGHTS: {"accuracy": 0.0}},
            0.5,
            (None, [], {INT8: 0.8, WEIGHTS: 0.8}, ()),
        ),
    ],
)
def test_the_fastest_file_that_is_accurate_enough(
    metrics: dict[str, dict[str, float]], max_loss: float, expected: tuple[Any, ...]
) -> None:
    found = found_of(SPEEDS, metrics, max_loss=max_loss).recommendation()
    shapes = dict(zip(("1 x 16", "8 x 16"), expected[1], strict=False))
    assert (found.overall, found.by_shape, found.refused, found.faster) == (expected[0], shapes, *expected[2:])


def test_a_metric_that_is_not_a_number_proves_nothing() -> None:
    metrics = {"checkpoint": {"pearson": 0.8, "spearmanr": 0.8}, WEIGHTS: {"pearson": 0.8, "spearmanr": float("nan")}}
    found = found_of(SPEEDS, metrics).recommendation()
    assert found.overall == INT8 and found.refused.keys() == {WEIGHTS}


def test_the_recommendation_in_words() -> None:
    metrics = {"checkpoint": {"accuracy": 0.8}, WEIGHTS: {"accuracy": 0.7}, DYNAMIC: {"accuracy": 0.75}}
    lines = found_of(SPEEDS, metrics).table().splitlines()
    assert lines[-4:] == [
        "Deploy here: model_int8.onnx with ONNX Runtime (moq-hf export --to onnx --flavors int8 --activation_bits 7), "
        "2.45 times as fast as float PyTorch; accuracy 0.8000",
        "Faster, without the checkpoint's integers: ONNX quantize_dynamic, 4.00 times as fast as float PyTorch; "
        "accuracy 0.7500",
        "Loses more than 0.01: model.onnx with OpenVINO (moq-hf export --to onnx --flavors weight-only), 3.00 times as "
        "fast as float PyTorch; accuracy 0.7000",
        "The checkpoint in PyTorch: accuracy 0.8000",
    ]
    lines = found_of(SPEEDS, {}).table().splitlines()
    assert lines[-1] == "No accuracy was measured: give sentences with labels (--validation_file)"
    assert "times as fast as float PyTorch; largest difference 2.50e-01 over 12 sentences" in lines[-4]
    assert not any("Other programs" in line for line in lines)
    for threads, clock, busy in ((1, "wall", False), (3, "wall", True), (3, "cpu", False)):
        text = found_of(SPEEDS, {}, threads=threads, clock=clock).table()
        assert ("Other programs ran" in text) == busy
    lines = found_of({"PyTorch float": [1.0, 1.0]}, {}).table().splitlines()
    assert "Deploy here: none of the files, since no engine with the checkpoint's integers is left" in lines


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("model name : x\nflags : fpu avx2 avx512f avx512_vnni avx512cd amx_tile\n", "avx2 avx512_vnni avx512f"),
        ("flags\t\t: amx_bf16 amx_int8 avx_vnni avx512_bf16", "amx_bf16 amx_int8 avx512_bf16 avx_vnni"),
        ("Features\t: fp asimd asimddp i8mm bf16", "bf16 dotprod i8mm"),
        ("vendor_id : x\n", ""),
        ("", ""),
    ],
)
def test_instructions(info: str, expected: str) -> None:
    assert " ".join(instructions(info)) == expected
