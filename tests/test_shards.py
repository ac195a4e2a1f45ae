"""Weights that engines take apart are quantized as whole ones are: in parts, or where they are whole."""

import gc
import importlib
import json
import weakref
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from repo import HELPERS, ROOT
from torch import Tensor, nn

from moq_hf import processes, quantize_model
from moq_hf.engine_seams import ZERO_3, ZERO_3_SHAPE


def test_parts_are_quantized_as_the_whole_is(tmp_path: Path) -> None:
    """Random weights, kinds, grids and bits in three processes; some hold nothing of a weight."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    words += ["--run-path", "--start-method", "fork", str(HELPERS / "sharded.py"), str(tmp_path / "wrong")]
    done = programs.run(*words, cwd=ROOT, timeout=300, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    *wrong, counted = (tmp_path / "wrong").read_text().splitlines()
    assert wrong == []
    # With as many processes as these, groups lie across borders in many cases, and in many they do not.
    cases, split = map(int, counted.split())
    assert cases / 5 < split < cases * 4 / 5


class Parted:
    """Takes the weight of a layer apart between passes, as ZeRO-3 does, without DeepSpeed."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight: Any = layer.weight
        self.values = layer.weight.detach().clone()
        setattr(self.weight, ZERO_3, 0)
        setattr(self.weight, ZERO_3_SHAPE, self.values.shape)
        self.apart()
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(lambda *_: self.apart())
        layer.register_full_backward_pre_hook(lambda *_: self.gather())

    def gather(self) -> None:
        self.weight.data = self.values.clone()

    def apart(self) -> None:
        self.weight.data = torch.empty(0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_weight_that_is_whole_in_passes_alone_is_quantized_in_them(
    rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8), nn.Linear(6, 8)]
    layers[1].load_state_dict(layers[0].state_dict())
    plain, parted = (nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2)) for layer in layers)
    parted[2].load_state_dict(plain[2].state_dict())
    config = {
        "quantize_bits": {"start_bits": 3, "target_bits": 3},
        "quantize_algo": {"rounding": rounding},
        "modules_to_not_convert": ["2"],
    }
    quantize_model(plain, config)
    engine = Parted(layers[1])
    # What DeepSpeed would gather.
    monkeypatch.setattr(processes, "whole_of_partitions", lambda weight: engine.values.clone())
    monkeypatch.setattr(processes, "own_partition", lambda weight: engine.values.flatten())
    quantize_model(parted, config)
    layer: Any = parted[0]
    assert layer.moq.weight is None and layer.matrix_shape == (8, 6)
    inputs, copies = [torch.randn(4, 6).requires_grad_()], []
    inputs.append(inputs[0].detach().clone().requires_grad_())
    quantize = type(layer)._of_engine

    def counted(self: Any, weight: Tensor) -> Tensor:
        found: Tensor = quantize(self, weight)
        copies.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(type(layer), "_of_engine", counted)
    expected, found = plain(inputs[0]), parted(inputs[1])
    assert torch.equal(found, expected) and not layer.parameter().numel()
    # The graph holds no quantized copy from the forward pass to the backward pass.
    gc.collect()
    assert [copy() for copy in copies] == [None]
    expected.sum().backward()
    found.sum().backward()
    # For the backward pass it was made again.
    assert len(copies) == 2 and torch.equal(inputs[1].grad, inputs[0].grad)  # type: ignore[arg-type]
    gradient: Any = plain[0].weight.grad  # type: ignore[union-attr]
    assert torch.equal(layer.parameter().grad, gradient)
    assert torch.equal(layer.quantized_copy(torch.float32), plain[0].quantized_weight())  # type: ignore[operator]


def test_the_table_in_the_docs_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "sharding.json").read_text())["results"]
    page = (ROOT / "docs" / "evidence" / "sharding.md").read_text()
    assert importlib.import_module("sharding").table(results) in page
    lines = {(line["label"], line["dtype"], line["arm"], line["bits"]): line for line in results}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        base = lines["", dtype, "float", 32]
        for bits in (8, 4, 2):
            values, packed = (lines["", dtype, way, bits] for way in ("values", "packed"))
            # A fourth of a copy: scales beside it, one for a row.
            quarter = values["quantized"] * size / 4
            assert quarter <= values["held"] - base["held"] <= 1.02 * quarter
            assert values["gathered"] == base["gathered"]
            # Scales beside the codes, and clipping ratios, which are whole in each process.
            assert packed["held"] - base["held"] <= 1.1 * values["quantized"] * bits / 8 / 4
            assert packed["gathered"] < values["gathered"] * (bits + 1) / (8 * size)
