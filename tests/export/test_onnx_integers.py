"""The flavors that multiply integers: what was trained is what is computed, on the CPUs that a file is made for."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_layer import export_layers, from_same_arithmetic
from packed_bert import SHAPE, TOKENIZER, checkpoint, config_of
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed

from moq_hf import MoQConfig, MoQError, quantizer, save_quantized
from moq_hf.export.compare import load_checkpoint
from moq_hf.export.onnx import export_onnx, prepare, write_model
from moq_hf.export.onnx_layers import (
    INT8_SCALES,
    OnnxEmbedding,
    OnnxInt8Linear,
    OnnxNBitsLinear,
    OnnxQdqLinear,
    OnnxTiedLinear,
    Rounding,
    Target,
    is_exact_signed,
    target_here,
    target_of,
)
from moq_hf.formats.stored import per_row
from moq_hf.grid import Grid, InputGrid, PerChannel, PerGroup, RowBlocks
from moq_hf.inputs import fake_quantize_input, static_scale
from moq_hf.training.controller import MoQController

needs_vnni = pytest.mark.skipif(target_here() != "vnni", reason="products of 8 bits saturate on this CPU")


@pytest.mark.parametrize("signed", [pytest.param(True, marks=needs_vnni), False], ids=["signed", "unsigned"])
def test_layers_compute_what_training_does(signed: bool, tmp_path: Path) -> None:
    grids = [(8, Grid(PerChannel())), (3, Grid(RowBlocks(2), symmetric=False))]
    layers, inputs, expected = [], [], []
    largest = torch.tensor(2.0)
    for scale, (bits, grid) in itertools.product(INT8_SCALES, grids):
        torch.manual_seed(0)
        weight = as_stored(per_row(quantizer.quantize(torch.randn(6, 16), 8, grid)), 8)
        # Some of the values are beyond the range.
        bias, x = torch.randn(6), torch.randn(2, 5, 16) + 0.5
        x[0, 0] = 0.0
        layers.append(OnnxInt8Linear(weight, bias, InputGrid(bits, scale), 2.0 if scale == "static" else None, signed))
        assert layers[-1].codes.dtype == (torch.int8 if signed else torch.uint8)
        rounded, coarser = (
            fake_quantize_input(x, InputGrid(each, scale), static_scale(largest[None], each))
            for each in (bits, bits - 1)
        )
        # A code more or less would be seen.
        assert not torch.equal(rounded, x) and float((coarser - rounded).abs().max()) > 1e-2
        inputs.append(x)
        expected.append(rounded.double() @ quantizer.dequantize(*weight).double().T + bias)
    for found, wanted in zip(export_layers(layers, inputs, tmp_path / "layers.onnx"), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@needs_vnni
def test_qdq_computes_what_training_does(tmp_path: Path) -> None:
    weight = quantizer.quantize(torch.randn(6, 16), 8, Grid(PerChannel()))
    x, largest, bias = torch.randn(2, 5, 16), torch.tensor(2.0), torch.randn(6)
    (found,) = export_layers([OnnxQdqLinear(weight, bias, 2.0)], [x], tmp_path / "layer.onnx")
    rounded = fake_quantize_input(x, InputGrid(8, "static"), static_scale(largest[None], 8))
    expected = rounded @ quantizer.dequantize(*weight).T + bias
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nbits_computes_what_training_does(tmp_path: Path) -> None:
    layers, inputs, expected = [], [], []
    symmetric_ones = [(1, None, True), (2, None, True), (3, 32, True), (4, 128, True), (6, None, True)]
    for bits, group, symmetric in [*symmetric_ones, (2, 64, False), (4, None, False), (8, 64, False)]:
        torch.manual_seed(0)
        columns = 128 if group else 100
        grid = Grid(PerGroup(group) if group else PerChannel(), symmetric=symmetric, full=None if symmetric else False)
        weight = as_stored(quantizer.quantize(torch.randn(6, columns), bits, grid), bits)
        floats = quantizer.dequantize(*weight)
        own = InputGrid(8, "per_block").beside(columns, weight.scale.shape[1])
        bias, x = torch.randn(6), torch.randn(2, 5, columns)
        layer = OnnxNBitsLinear(weight, bias, bits, own.block)
        torch.testing.assert_close(layer.weight, floats)
        # A byte holds as many codes as fit.
        assert layer.codes.numel() == 6 * 128 * layer.bits // 8
        rounded = fake_quantize_input(x, own)
        assert float((rounded @ floats.T - x @ floats.T).abs().max()) > 1e-3
        layers.append(layer)
        inputs.append(x)
        expected.append(rounded.double() @ floats.double().T + bias)
    for found, wanted in zip(export_layers(layers, inputs, tmp_path / "layers.onnx"), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_largest_sums_do_not_saturate_on_any_cpu(tmp_path: Path) -> None:
    codes = torch.full((16, 64), 127, dtype=torch.int32)
    codes[::2] = -127
    weight = quantizer.Quantized(codes, torch.full((16, 1), 0.5), None)
    grids = [InputGrid(bits, "per_token") for bits in (7, 8)]
    layers = [OnnxInt8Linear(weight, None, grid, None, is_exact_signed(codes, grid.bits)) for grid in grids]
    assert [layer.codes.dtype for layer in layers] == [torch.int8, torch.uint8]
    x = torch.full((8, 64), 2.0)
    for found, grid in zip(export_layers(layers, [x, x], tmp_path / "layers.onnx"), grids, strict=True):
        torch.testing.assert_close(found, fake_quantize_input(x, grid) @ quantizer.dequantize(*weight).T)


def as_stored(weight: quantizer.Quantized, bits: int) -> quantizer.Quantized:
    """As a folder has them: codes and zero points below 0 too."""
    if weight.zero_point is None:
        return weight
    half = 2 ** (bits - 1)
    return weight._replace(codes=weight.codes - half, zero_point=weight.zero_point - half)


def test_a_table_that_the_model_reads_is_dequantized(tmp_path: Path) -> None:
    ids, x = torch.tensor([[3, 0, 5], [1, 1, 2]]), torch.randn(2, 16)
    layers: list[nn.Module] = []
    expected = []
    for bits, grouping in itertools.product((8, 4), (PerChannel(), PerGroup(8))):
        grid = Grid(grouping, symmetric=(bits == 8) == (grouping == PerChannel()))
        weight = as_stored(quantizer.quantize(1 + torch.randn(6, 16), bits, grid), bits)
        table = OnnxEmbedding(weight, bits)
        floats = quantizer.dequantize(*weight)
        assert table.halved == (bits == 4) and torch.equal(table.weight, floats)
        layers += [table, OnnxTiedLinear(table, None, packed=True)]
        expected += [floats[ids], x @ floats.T]
    found = export_layers(layers, [ids, x] * 4, tmp_path / "layers.onnx")
    for each in range(0, 8, 2):
        assert torch.equal(found[each], expected[each])
        torch.testing.assert_close(found[each + 1], expected[each + 1], rtol=1e-5, atol=1e-5)


def test_a_tied_head_multiplies_floats_with_the_codes_of_its_table(tmp_path: Path) -> None:
    cases = [(4, 64, 64, 64), (3, 48, 48, 16), (8, 64, 64, None), (4, 18, 18, None), (4, 512, 128, 128)]
    layers, inputs, expected = [], [], []
    for bits, columns, group, block in [*cases, (4, 96, 8, None)]:
        torch.manual_seed(0)
        weight = quantizer.quantize(torch.randn(6, columns), bits, Grid(PerGroup(group)))
        bias, x = torch.randn(6), torch.randn(2, 5, columns)
        layers.append(OnnxTiedLinear(OnnxEmbedding(weight, bits), bias, packed=True))
        assert layers[-1].block == block
        inputs.append(x)
        expected.append(x @ quantizer.dequantize(*weight).T + bias)
    for found, wanted in zip(export_layers(layers, inputs, tmp_path / "heads.onnx"), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    kinds = [node.op_type for node in onnx.load(tmp_path / "heads.onnx").graph.node]
    assert kinds.count("MatMulNBits") == kinds.count("MatMul") == 3


@pytest.mark.parametrize(
    ("cpu", "architecture", "target"),
    [
        ("flags : fpu avx2", "x86_64", "avx2"),
        ("model name : vnni\nflags : avx2 avx512f amx_tile", "x86_64", "avx2"),
        ("flags\t\t: avx2 avx_vnni", "x86_64", "vnni"),
        ("flags : avx2 avx512_vnni avx512f\nbugs : x", "x86_64", "vnni"),
        ("flags : avx512f amx_int8", "x86_64", "vnni"),
        ("", "aarch64", "vnni"),
        ("", "arm64", "vnni"),
        ("", "AMD64", "avx2"),
    ],
)
def test_what_suits_a_machine(cpu: str, architecture: str, target: Target) -> None:
    assert target_of(cpu, architecture) == target


def train_and_save(folder: Path, *without: str) -> tuple[Path, dict[str, float]]:
    """A packed checkpoint of a run that learned static ranges, but for the layers `without`, and these."""
    set_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    schedule = {"quantize_period": 1, "schedule_offset": 0}
    config = config_of(
        quantize_groups="per_channel", quantize_schedule=schedule, activation_quantization={"enabled": True}
    )
    controller = MoQController(model, MoQConfig.from_dict(config), total_steps=3)
    ids = torch.arange(5, 37).view(2, 16)
    for _ in range(2):
        model.train()(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
        controller.step()
    for name in without:
        inputs = controller.layers[name].moq.inputs
        assert inputs is not None
        inputs.range = None
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return save_quantized(model, folder, processing_class=tokenizer), controller.state_dict()["input_ranges"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A packed checkpoint of a run that learned static ranges, and these."""
    return train_and_save(tmp_path_factory.mktemp("trained") / "packed")


def scalars(path: Path) -> dict[str, float]:
    values = onnx.load(path).graph.initializer
    return {v.name: float(numpy_helper.to_array(v)) for v in values if v.name.endswith(".step")}


def test_a_layer_that_never_ran_leaves_the_others_their_ranges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unused = "bert.pooler.dense"
    folder, ranges = train_and_save(tmp_path / "packed", unused)
    assert ranges and unused not in ranges
    export = export_onnx(folder, tmp_path / "out", flavors=["int8"], cpu="avx2")
    assert export.activations == {"int8": "static, 8 bits, ranges partly trained, for avx2"}
    assert f"no ranges of the activations were trained in {unused}: they are" in caplog.text
    # Layers with the same input share its step.
    found = set(scalars(tmp_path / "out" / "model_int8.onnx").values())
    assert {np.float32(largest) / np.float32(127) for largest in ranges.values()} < found


@needs_vnni
def test_trained_ranges_are_those_of_the_files(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    folder, ranges = trained
    export = export_onnx(folder, tmp_path / "out", flavors=["int8", "qdq"])
    assert export.activations == dict.fromkeys(("int8", "qdq"), "static, 8 bits, ranges trained, for vnni")
    assert json.loads((tmp_path / "out" / "moq_export.json").read_text())["activations"] == export.activations
    assert "int8: activations static, 8 bits, ranges trained, for vnni" in export.table()
    expected = {f"{name}.step": np.float32(largest) / np.float32(127) for name, largest in ranges.items()}
    for name in ("model_int8.onnx", "model_qdq.onnx"):
        # Layers with the same input share its codes.
        found = scalars(tmp_path / "out" / name)
        assert found and found == {key: expected[key] for key in found}
    for flavor in ("int8", "qdq"):
        same = from_same_arithmetic(folder, export, flavor)  # type: ignore[arg-type]
        assert same < 1e-5 < export.proofs[flavor].largest_difference
    graph = onnx.load(tmp_path / "out" / "model_qdq.onnx").graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in graph.node}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"activation_scale": "per_token"}, "per_token, 8 bits, for avx2"),
        ({"activation_bits": 7}, "static, 7 bits, ranges trained, for avx2"),
    ],
)
def test_what_is_asked_for_is_written(
    asked: dict[str, Any], words: str, trained: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    export = export_onnx(trained[0], tmp_path / "out", flavors=["int8"], cpu="avx2", **asked)
    assert export.activations == {"int8": words}
    assert from_same_arithmetic(trained[0], export, "int8", scale=asked.get("activation_scale")) < 1e-4


def test_without_training_a_static_range_is_measured_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    set_seed(0)
    source = checkpoint(tmp_path / "packed", BertForSequenceClassification(BertConfig(**SHAPE)), config_of())
    found = export_onnx(source, tmp_path / "out", flavors=["int8"], cpu="avx2", activation_scale="static")
    assert found.activations == {"int8": "static, 8 bits, ranges measured, for avx2"}
    (message,) = caplog.messages
    assert "no ranges of the activations were trained" in message and "of the sentences compared" in message
    assert from_same_arithmetic(source, found, "int8", scale="static") < 1e-4


def test_a_file_with_signed_weights_refuses_where_products_saturate(guarded: bytes) -> None:
    inputs = {name: np.ones((1, 8), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}

    def answers(model: onnx.ModelProto) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {value.name: inputs[value.name] for value in session.get_inputs()})

    model = onnx.load_from_string(guarded)
    constant = next(node for node in model.graph.node if "guard.expected" in node.output).attribute[0].t
    right = {True: 4 * 255 * 127, False: 2 * (2**15 - 1)}
    for exact, expected in right.items():
        constant.CopyFrom(numpy_helper.from_array(np.array([[expected]], np.int32)))
        if exact == (target_here() == "vnni"):
            assert np.isfinite(answers(model)[0]).all()
        else:
            with pytest.raises(Exception, match="made for CPUs with VNNI; export again with --cpu avx2"):
                answers(model)


@pytest.fixture(scope="module")
def guarded(trained: tuple[Path, dict[str, float]]) -> bytes:
    """A file with signed weights, made on any CPU."""
    folder = trained[0]
    loaded = load_checkpoint(folder)
    prepared = prepare(loaded, "int8", Rounding(InputGrid(8, "per_tensor"), {}, "", "vnni"))
    assert prepared.guarded and "uint8" not in prepared.stored.values()
    # Products of 7 bits and 8 bits fit.
    assert not prepare(loaded, "int8", Rounding(InputGrid(7, "per_tensor"), {}, "", "vnni")).guarded
    ids = torch.ones(2, 8, dtype=torch.int64)
    example = {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids}
    write_model(prepared, example, folder.parent / "guarded.onnx")
    return (folder.parent / "guarded.onnx").read_bytes()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"cpu": "amx"}, r"cpu must be one of auto, vnni, avx2, got 'amx'"),
        ({"activation_scale": "token"}, r"activation_scale must be one of per_token, per_tensor, static, got 'token'"),
        ({"flavors": ["qdq"], "cpu": "avx2"}, r"CPUs without VNNI do not do exactly: leave it out"),
    ],
)
def test_wrong_options(
    asked: dict[str, Any], message: str, trained: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    with pytest.raises(MoQError, match=message):
        export_onnx(trained[0], tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_layers_that_share_their_input_share_its_codes(guarded: bytes) -> None:
    model = onnx.load_from_string(guarded)
    kinds = [node.op_type for node in model.graph.node]
    # Query, key and value; attention's output, both of the feed-forward network, and the pooler.
    assert kinds.count("MatMulIntegerToFloat") == 7 and kinds.count("DynamicQuantizeLinear") == 5
    assert TensorProto.UINT8 not in {v.data_type for v in model.graph.initializer if v.name.endswith(".codes")}
