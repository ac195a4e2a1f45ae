"""The flavors that multiply integers: what was trained is what is computed, on the CPUs that a file is made for."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_layer import Layers, from_same_arithmetic, products
from packed_bert import SHAPE, TOKENIZER, checkpoint, config_of
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed

from moq_hf import MoQConfig, MoQError, quantize_model, save_quantized
from moq_hf.export.compare import SENTENCES, Reference, load_checkpoint
from moq_hf.export.onnx import _write_model, export_onnx, grid_of, rounding_of, traced
from moq_hf.export.onnx_rewrite import (
    GUARD,
    INT8_SCALES,
    Flavor,
    Rounding,
    Target,
    Traced,
    is_exact_signed,
    rewrite,
    target_here,
    target_of,
)
from moq_hf.grid import Grid, InputGrid, PerChannel, PerGroup, RowBlocks
from moq_hf.inputs import fake_quantize_input, range_in, static_parameters
from moq_hf.training.controller import MoQController

needs_vnni = pytest.mark.skipif(target_here() != "vnni", reason="products of 8 bits saturate on this CPU")


@pytest.fixture(scope="module")
def linear() -> tuple[Layers, Traced]:
    """Linear layers with a bias and without, inputs of three and of two dimensions, and their graph."""
    torch.manual_seed(0)
    layers = Layers()
    for grid in (Grid(PerChannel()), Grid(RowBlocks(2), symmetric=False)):
        for bias, shape in ((True, (2, 5, 16)), (False, (2, 5, 16)), (True, (5, 16))):
            # Some of the values are beyond the range.
            x = torch.randn(shape) + 0.5
            x[0] = 0.0
            layers.add(nn.Linear(16, 6, bias), x, 8, grid)
    return layers, layers.traced()


@pytest.mark.parametrize("target", [pytest.param("vnni", marks=needs_vnni), "avx2"])
@pytest.mark.parametrize(
    ("scale", "bits", "symmetric"),
    [
        *itertools.product(INT8_SCALES, (8, 3), [True]),
        *itertools.product(["static"], (8, 3), [False]),
        *itertools.product(["qdq"], [8], [True, False]),
    ],
)
def test_layers_compute_what_training_does(
    scale: Any, bits: int, symmetric: bool, target: Target, linear: tuple[Layers, Traced]
) -> None:
    layers, graph = linear
    flavor: Flavor = "int8"
    if scale == "qdq":
        flavor, scale = "qdq", "static"
        if target_here() != "vnni":
            pytest.skip("products of 8 bits saturate on this CPU")
    grid = InputGrid(bits, scale, symmetric=symmetric)
    entry: Any = 2.0 if symmetric else [1.0, 2.5]
    ranges = dict.fromkeys(layers.weights, entry) if scale == "static" else {}
    rewritten = layers.rewritten(graph, flavor, Rounding(grid, ranges, "", target))
    assert rewritten.rounded == dict.fromkeys(layers.weights, grid)
    is_signed = target == "vnni" or flavor == "qdq" or bits == 3
    assert set(rewritten.stored.values()) == {"int8" if is_signed else "uint8"}
    rounded, coarser = (
        [fake_quantize_input(x, own, *static_parameters(range_in(entry, own), own)) for x in layers.inputs]
        for own in (grid, replace(grid, bits=bits - 1))
    )
    # A code more or less would be seen.
    assert all(float((a - b).abs().max()) > 1e-2 for a, b in zip(rounded, coarser, strict=True))
    expected = products(rounded, list(layers), list(layers.weights.values()))
    for found, wanted in zip(layers.answers(rewritten), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["static", "per_tensor"])
def test_a_layer_that_is_not_called_multiplies_floats(scale: Any, linear: tuple[Layers, Traced]) -> None:
    """As training does where a model reads the weight, as torch.nn.MultiheadAttention does. It has no range either."""
    layers, graph = linear
    ranges = {"0": 2.0} if scale == "static" else {}
    rounding = Rounding(InputGrid(8, scale), ranges, "", "avx2")
    called = graph.called if ranges else ["0"]
    rewritten = layers.rewritten(graph._replace(called=called), "int8", rounding)
    assert rewritten.rounded.keys() == {"0"}
    expected = products(layers.inputs, list(layers), list(layers.weights.values()))
    torch.testing.assert_close(layers.answers(rewritten)[1].double(), expected[1], rtol=1e-5, atol=1e-5)


def test_nbits_computes_what_training_does() -> None:
    layers = Layers()
    symmetric_ones = [(1, None, True), (2, None, True), (3, 32, True), (4, 128, True), (6, None, True)]
    for bits, group, symmetric in [*symmetric_ones, (2, 64, False), (4, None, False), (8, 64, False)]:
        torch.manual_seed(0)
        columns = 128 if group else 100
        grid = Grid(PerGroup(group) if group else PerChannel(), symmetric=symmetric, full=None if symmetric else False)
        layers.add(nn.Linear(columns, 6), torch.randn(2, 5, columns), bits, grid)
    rewritten = layers.rewritten(layers.traced(), "nbits", Rounding(InputGrid(8, "per_block"), {}, "", "avx2"))
    rounded = [fake_quantize_input(x, rewritten.rounded[str(index)]) for index, x in enumerate(layers.inputs)]
    for index, layer in enumerate(layers):
        # A byte holds as many codes as fit.
        bits = int(rewritten.stored[str(index)].removeprefix("int"))
        assert bits == next(each for each in (2, 4, 8) if each >= layers.states[str(index)].bits)
        assert rewritten.model.graph.initializers[f"{index}.codes"].const_value.size == 6 * 128 * bits // 8
        assert float((layer(rounded[index]) - layer(layers.inputs[index])).detach().abs().max()) > 1e-3
    expected = products(rounded, list(layers), list(layers.weights.values()))
    for found, wanted in zip(layers.answers(rewritten), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_largest_sums_do_not_saturate_on_any_cpu() -> None:
    layers = Layers()
    layer = nn.Linear(64, 16, bias=False)
    layer.weight = nn.Parameter(torch.full((16, 64), 0.5))
    layer.weight.data[::2] = -0.5
    codes, _, _ = layers.add(layer, torch.full((2, 8, 64), 2.0))
    assert set(codes.flatten().tolist()) == {-127, 127}
    graph = layers.traced()
    for bits, stored in ((7, "int8"), (8, "uint8")):
        grid = InputGrid(bits, "per_token")
        assert is_exact_signed(codes, bits) == (stored == "int8")
        rewritten = layers.rewritten(graph, "int8", Rounding(grid, {}, "", "avx2"))
        assert rewritten.stored == {"0": stored}
        rounded = fake_quantize_input(layers.inputs[0], grid)
        torch.testing.assert_close(layers.answers(rewritten)[0], layer(rounded))


class Tied(nn.Module):
    """An output head that shares its weight with a table, which the model may read too."""

    def __init__(self, rows: int, columns: int, reads: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, columns)
        nn.init.normal_(self.table.weight, std=0.1)
        self.head = nn.Linear(columns, rows)
        self.reads = reads

    @property
    def weight(self) -> torch.Tensor:
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        answers = self.head(self.table(ids) + 1)
        return answers + self.weight[1:].mean() if self.reads else answers


def test_a_table_and_the_head_that_shares_it() -> None:
    cases: list[tuple[int, int, Grid, bool]] = [
        (4, 64, Grid(PerGroup(64)), True),
        (3, 48, Grid(PerChannel()), True),
        (4, 512, Grid(PerGroup(128)), True),
        (4, 32, Grid(PerChannel(), symmetric=False), False),
        (8, 64, Grid(PerGroup(32), symmetric=False), False),
        # Too narrow, and of an odd number of columns.
        (4, 96, Grid(PerGroup(8)), False),
        (4, 17, Grid(PerChannel()), False),
    ]
    layers = Layers()
    for bits, columns, grid, _ in cases:
        torch.manual_seed(0)
        layers.add(Tied(6, columns), torch.tensor([[3, 0, 5], [1, 1, 2]]), bits, grid, "embedding", ["table", "head"])
    layers.add(Tied(6, 16, reads=True), torch.tensor([[2], [4]]), 4, None, "embedding", ["table", "head"])
    graph = layers.traced()
    expected = [layer(x) for layer, x in zip(layers, layers.inputs, strict=True)]
    for flavor, rounding in (("weight-only", None), ("nbits", Rounding(InputGrid(8, "per_block"), {}, "", "avx2"))):
        rewritten = layers.rewritten(graph, flavor, rounding)  # type: ignore[arg-type]
        for found, wanted in zip(layers.answers(rewritten), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        bits = [int(kind.removeprefix("int")) for kind in rewritten.stored.values()]
        assert bits == [4, 4, 4, 4, 8, 4, 8, 4] and not rewritten.rounded
        kinds = [node.op_type for node in rewritten.model.graph]
        packed = sum(is_packed for *_, is_packed in cases) if flavor == "nbits" else 0
        assert kinds.count("MatMulNBits") == packed and kinds.count("MatMul") == 8 - packed


def test_a_weight_without_a_place_is_one_error() -> None:
    layers = Layers()
    weight = layers.add(nn.Linear(4, 4), torch.ones(2, 4))
    # No answer depends on a layer that is never called.
    layers.append(nn.Linear(4, 4))
    layers.weights["1"], layers.states["1"] = weight, layers.states["0"]
    graph = layers.traced()
    assert layers.rewritten(graph, "weight-only").stored == {"0": "int8"}
    layers.weights["2"], layers.states["2"] = weight, layers.states["0"]
    with pytest.raises(MoQError, match=r"wrote no 2\.weight, which integers would replace: keep 2 in float"):
        layers.rewritten(graph, "weight-only")


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


def train_and_save(
    folder: Path, *without: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Path, dict[str, Any]]:
    """A packed checkpoint of a run that learned static ranges, but for the layers `without`, and these."""
    set_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE)).to(dtype)
    schedule = {"quantize_period": 1, "schedule_offset": 0}
    config = config_of(
        quantize_groups="per_channel",
        quantize_schedule=schedule,
        **{"activation_quantization": {"enabled": True}, **more},
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
    saved = save_quantized(model, folder, processing_class=tokenizer, controller=controller)
    return saved, controller.state_dict()["input_ranges"]


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


def test_a_layer_that_never_ran_does_not_take_rounded_inputs_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unused = "bert.pooler.dense"
    folder, ranges = train_and_save(tmp_path / "packed", unused)
    assert load_checkpoint(folder).verified.state["rounds_inputs"]
    model = BertForSequenceClassification.from_pretrained(folder)
    scales = {name for name in model.state_dict() if name.endswith(".input_scale")}
    assert scales == {f"{name}.input_scale" for name in ranges}
    assert f"leaves the inputs of {unused} as they are: no range is known of them" in caplog.text


@pytest.mark.parametrize("section", [{"enabled": True}, {"enabled": True, "symmetric": False}])
def test_scales_are_those_of_a_folder_that_was_trained_in_half_precision(
    section: dict[str, Any], tmp_path: Path
) -> None:
    """Training rounds them to the dtype of the weights."""
    folder, _ = train_and_save(tmp_path / "packed", dtype=torch.bfloat16, activation_quantization=section)
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    stored = {float(tensor) for name, tensor in model.state_dict().items() if name.endswith(".input_scale")}
    assert stored and all(float(torch.tensor(scale).bfloat16()) == scale for scale in stored)
    export = export_onnx(folder, tmp_path / "out", flavors=["int8"], cpu="avx2")
    found = set(scalars(tmp_path / "out" / "model_int8.onnx").values())
    assert found and found <= stored
    # Of a plain model that was loaded in the export's dtype.
    checkpoint = load_checkpoint(folder)
    reference = Reference(checkpoint, SENTENCES, 128)
    with torch.no_grad():
        served = torch.cat([model(**batch).logits for batch in reference.batches])
    torch.testing.assert_close(reference._answers, served, rtol=0, atol=2e-6)
    assert export.proofs["int8"].largest_difference < 0.5 * export.proofs["int8"].difference_in_float


def test_a_folder_without_scales_of_inputs_has_their_dtype(tmp_path: Path) -> None:
    bits = {"start_bits": 4, "target_bits": 4}
    options = {"activation_quantization": {"enabled": True}, "quantize_bits": bits}
    folder, ranges = train_and_save(tmp_path / "packed", dtype=torch.bfloat16, **options)
    state = load_checkpoint(folder).verified.state
    assert state["input_dtypes"] == dict.fromkeys(ranges, "bfloat16")
    export_onnx(folder, tmp_path / "out", flavors=["int8"], cpu="avx2")
    found = {torch.tensor(scale) for scale in scalars(tmp_path / "out" / "model_int8.onnx").values()}
    assert found and all(scale.bfloat16().float() == scale for scale in found)


@needs_vnni
def test_ranges_with_two_ends_and_layers_that_differ(tmp_path: Path) -> None:
    section = {"enabled": True, "symmetric": False, "percentile": 99.9, "window": 2}
    floats = "bert.encoder.layer.0.output.dense"
    overrides = {floats: {"activations": False}, "pooler": {"activations": {"scale": "per_token"}}}
    folder, ranges = train_and_save(tmp_path / "packed", activation_quantization=section, overrides=overrides)
    export = export_onnx(folder, tmp_path / "out", flavors=["int8", "qdq"], cpu="vnni")
    told = "static, asymmetric, 8 bits, 2 layers otherwise, ranges"
    # In qdq the pooler has a static range too, of the sentences.
    assert export.activations == {"int8": f"{told} trained, for vnni", "qdq": f"{told} partly trained, for vnni"}
    nodes = onnx.load(tmp_path / "out" / "model_int8.onnx").graph
    steps = {v.name: numpy_helper.to_array(v) for v in nodes.initializer if v.name.endswith((".step", ".middle"))}
    below, above, _ = ranges["bert.encoder.layer.0.intermediate.dense"]
    assert np.float32(below + above) / np.float32(255) in {float(value) for value in steps.values()}
    assert not any(floats in name for name in steps)
    for flavor in ("int8", "qdq"):
        assert from_same_arithmetic(folder, export, flavor) < 1e-4  # type: ignore[arg-type]


def test_the_widest_layers_of_blocks_have_bits_of_their_own(tmp_path: Path) -> None:
    section = {"enabled": True, "bits": 4, "scale": "per_token", "wide_bits": 8}
    folder, _ = train_and_save(tmp_path / "packed", activation_quantization=section)
    checkpoint = load_checkpoint(folder)
    rounding = rounding_of(checkpoint, Reference(checkpoint, SENTENCES, 128), "int8", "avx2")
    assert rounding.grid == InputGrid(4, "per_token") and "4 bits, 1 layer otherwise" in str(rounding)
    assert rounding.own == {"bert.encoder.layer.0.output.dense": InputGrid(8, "per_token")}


def test_no_file_has_a_zero_point_for_each_token() -> None:
    trained = InputGrid(4, "per_token", symmetric=False)
    assert grid_of("int8", trained, None, None) == InputGrid(4, "per_token")
    assert grid_of("int8", trained, 8, "per_tensor") == InputGrid(8, "per_tensor")
    assert grid_of("qdq", trained, None, None) == InputGrid(8, "static")


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
        proof = export.proofs[flavor]
        assert same < 1e-5 < proof.difference_in_float and proof.largest_difference == same
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
    scale, bits = asked.get("activation_scale"), asked.get("activation_bits")
    assert from_same_arithmetic(trained[0], export, "int8", scale=scale, bits=bits) < 1e-4


def test_ranges_of_inputs_alone_are_not_said_to_be_trained(tmp_path: Path) -> None:
    set_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 7]])}
    quantize_model(model, config_of(activation_quantization={"enabled": True, "bits": 8}), inputs=inputs)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    source = save_quantized(model.eval(), tmp_path / "packed", processing_class=tokenizer)
    found = export_onnx(source, tmp_path / "out", flavors=["int8"], cpu="avx2")
    assert found.activations == {"int8": "static, 8 bits, ranges as saved, for avx2"}


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
    ids = torch.ones(2, 8, dtype=torch.int64)
    graph = traced(loaded.model, {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids})
    for bits in (7, 8):
        rewritten = rewrite(graph, loaded, "int8", Rounding(InputGrid(bits, "per_tensor"), {}, "", "vnni"))
        assert "uint8" not in rewritten.stored.values()
        # Products of 7 bits and 8 bits fit.
        assert any(GUARD in node.name for node in rewritten.model.graph) == (bits == 8)
    _write_model(rewritten.model, folder.parent / "guarded.onnx")
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


@pytest.mark.parametrize(
    "section",
    [
        {"enabled": True},
        {"enabled": True, "scale": "per_token"},
        {"enabled": True, "symmetric": False},
        {"enabled": True, "scale": "per_tensor"},
        {"enabled": True, "scale": "per_token", "bits": 4, "wide_bits": 8},
    ],
)
def test_files_are_compared_with_the_model_as_it_was_evaluated(section: dict[str, Any], tmp_path: Path) -> None:
    """With rounded inputs, as plain transformers computes where a folder has a place for them."""
    folder, _ = train_and_save(tmp_path / "packed", activation_quantization=section)
    loaded = load_checkpoint(folder)
    reference = Reference(loaded, SENTENCES, 128)
    assert reference.rounds
    if loaded.verified.state["rounds_inputs"]:
        model = BertForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            served = torch.cat([model(**batch).logits for batch in reference.batches])
        torch.testing.assert_close(reference._answers, served, rtol=0, atol=2e-6)
    export = export_onnx(folder, tmp_path / "out", cpu="avx2")
    int8, weight_only = export.proofs["int8"], export.proofs["weight-only"]
    assert int8.agreement == 1.0
    assert int8.largest_difference == from_same_arithmetic(folder, export, "int8") < 0.5 * int8.difference_in_float
    # Without rounded inputs its answers are others, and only that.
    assert weight_only.difference_in_float < 1e-6 < weight_only.largest_difference
    words = MoQConfig.from_dict(loaded.verified.state["config"]).inputs_in_words
    assert f"checkpoint: activations {words}, as evaluated" in export.table()
    told = (
        f"weight-only: differs by {weight_only.difference_in_float:.2e} from the checkpoint with activations in float"
    )
    assert told in export.table()


def test_inputs_that_no_step_rounded_are_floats(tmp_path: Path) -> None:
    section = {"enabled": True, "start_step": 2}
    folder, _ = train_and_save(tmp_path / "packed", activation_quantization=section)
    loaded = load_checkpoint(folder)
    assert Reference(loaded, SENTENCES, 128).rounds
    loaded.verified.state["step"] = 1
    assert not Reference(loaded, SENTENCES, 128).rounds


def test_a_file_that_would_multiply_no_integers_is_written_only_where_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(quantize_group_size=32)
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 128}
    source = checkpoint(tmp_path / "packed", BertForSequenceClassification(BertConfig(**shape)), config, [4])
    export = export_onnx(source, tmp_path / "default", cpu="avx2")
    assert export.files == {"weight-only": "model.onnx"} and not caplog.messages
    assert not (tmp_path / "default" / "model_int8.onnx").exists()
    why = "model_int8.onnx is left out: it would multiply no integers, and be no faster: all layers have"
    assert why in export.table() and "checkpoint: activations in float, as evaluated" in export.table()
    hub = export_onnx(source, tmp_path / "hub", names="hub")
    assert not any("int8" in key for key in hub.files) and "nbits" in hub.files
    asked = export_onnx(source, tmp_path / "asked", flavors=["int8"], cpu="avx2")
    assert asked.files == {"int8": "model_int8.onnx"}
    assert "the int8 model multiplies no integers: all layers have" in caplog.text
