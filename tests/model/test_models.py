"""Every family of models, on every task that transformers has a class for, ends in a model that loads bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from long_tests import long_but_for
from model_zoo import CASES, CONFIG, FAMILIES, HEAD, REPRESENTATIVE, Stranger, inputs_of, new_model, outcome, served
from stranger import outputs_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2ForSequenceClassification, GPT2Model
from transformers.pytorch_utils import Conv1D

from moq_hf import (
    MoQConfig,
    MoQError,
    dequantize_model,
    quantize_model,
    quantizer,
    save_quantized,
    verify_quantized,
)
from moq_hf.model.convert import check_finite, check_scales, quant_layers
from moq_hf.packed.reading import stored_weights
from moq_hf.quant_linear import QuantConv1D
from moq_hf.training.controller import MoQController
from moq_hf.weight_matrix import to_rows

RENEW = "python tests/helpers/model_zoo.py"


@pytest.mark.parametrize(("family", "task"), long_but_for(REPRESENTATIVE, CASES))
def test_trains_to_the_target_and_loads_bit_for_bit(family: str, task: str, tmp_path: Path, stranger: Stranger) -> None:
    found = outcome(family, task, tmp_path, stranger)
    assert found.faults() == []
    _, layers, heads, layouts, *_ = support.rows_of("models")[family]
    renewed = f"renew docs/reference/support.md, at the root of the repository, with:\n{RENEW}"
    assert f"{task} {found.cell()}" in layers.split(", "), renewed
    assert {f"`{head}`" for head in found.in_float} <= set(heads.split(", ")), renewed
    assert found.layout in layouts.split(", "), renewed


def test_the_page_has_no_cell_without_a_test() -> None:
    rows = support.rows_of("models")
    shown = {family: re.sub(r" \d+/\d+", "", rows[family][1]).split(", ") for family in FAMILIES}
    assert [(family, task) for family, tasks in shown.items() for task in tasks] == CASES


def test_the_page_has_who_serves_them() -> None:
    rows = support.rows_of("models")
    assert rows[HEAD[0]] == HEAD
    assert {family: rows[family][4:] for family in FAMILIES} == {family: served(family) for family in FAMILIES}


GROUPINGS: list[dict[str, Any]] = [
    {"quantize_groups": 4},
    {"quantize_groups": "per_channel"},
    {"quantize_group_size": 8},
    # As wide as the rows of some layers, half as wide as those of others.
    {"quantize_group_size": 32},
]
ALGORITHMS: list[dict[str, Any]] = [{"q_type": "symmetric"}, {"q_type": "asymmetric"}, {"rounding": "stochastic"}]


def config_of(bits: int, algorithm: dict[str, Any], grouping: dict[str, Any]) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_algo": algorithm, **grouping}


def twins() -> tuple[nn.Module, nn.Module]:
    """A `Conv1D` and the `nn.Linear` that computes the same, each in front of a head."""
    conv1d, linear = Conv1D(48, 32), nn.Linear(32, 48)
    with torch.no_grad():
        conv1d.bias.normal_()
        linear.weight.copy_(conv1d.weight.t())
        linear.bias.copy_(conv1d.bias)
    head = nn.Linear(48, 2)
    return nn.Sequential(conv1d, head), nn.Sequential(linear, head)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_conv1d_is_quantized_as_the_linear_layer_that_it_is(
    algorithm: dict[str, Any], grouping: dict[str, Any]
) -> None:
    one, two = twins()
    config = config_of(4, algorithm, grouping)
    quantize_model(one, config)
    quantize_model(two, config)
    conv1d, linear = one[0], two[0]
    assert isinstance(conv1d, QuantConv1D) and isinstance(conv1d, Conv1D)
    x = torch.randn(3, 5, 32)
    for _ in range(3):
        weight = conv1d.quantized_weight()
        assert torch.equal(weight, linear.quantized_weight().t()) and weight.is_contiguous()
        assert not torch.equal(weight, conv1d.weight)
        torch.testing.assert_close(conv1d(x), linear(x))
        for model in (one, two):
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(conv1d.weight.grad, linear.weight.grad.t())
        with torch.no_grad():
            linear.weight -= 0.1 * linear.weight.grad
            conv1d.weight.copy_(linear.weight.t())
    check_scales(quant_layers(one))
    with torch.no_grad():
        conv1d.weight[-1, 0] = float("nan")
    conv1d(x)
    for check in (check_finite, check_scales):
        with pytest.raises(MoQError, match=r"NaN or Inf in 0\.weight"):
            check(quant_layers(one))


ASYMMETRIC = {"q_type": "asymmetric"}
OUTWARDS: dict[str, dict[str, Any]] = {
    "asymmetric": {"quantize_bits": {"target_bits": 2}, "quantize_algo": ASYMMETRIC},
    "scales in bfloat16": {"quantize_bits": {"target_bits": 8}, "quantize_algo": {"scale_dtype": "bfloat16"}},
    "scales in float16": {"quantize_bits": {"target_bits": 8}, "quantize_algo": {"scale_dtype": "float16"}},
    "powers of two": {
        "quantize_bits": {"target_bits": 4},
        "quantize_format": "mxfp4",
        "quantize_algo": {"scale": "absmax"},
    },
}
BEYOND = r"^{}\.weight has weights so large that on the grid they are beyond {}, the most that {} holds"


def three_kinds(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 32), nn.Conv1d(4, 32, 1), nn.Linear(32, 32), nn.Linear(32, 2)).to(dtype)


def enlarge(weight: Any, largest: float) -> None:
    with torch.no_grad():
        weight.uniform_(-1, 1).mul_(largest).view(-1)[0] = largest


@pytest.mark.parametrize("outwards", OUTWARDS)
def test_weights_that_their_grid_makes_inf_are_told(outwards: str) -> None:
    config = {**OUTWARDS[outwards], "quantize_embeddings": 8, "quantize_convolutions": True}
    kinds = ["2"]
    if outwards.startswith("scales"):
        kinds = ["0", "1", "2"]
    for name in kinds:
        model: Any = three_kinds()
        quantize_model(model, config)
        enlarge(model[int(name)].weight, 65504)
        with pytest.raises(MoQError, match=BEYOND.format(name, 65504, "float16") + ".*: use bfloat16 or float32, or"):
            dequantize_model(model)
        with pytest.raises(MoQError, match=BEYOND.format(name, 65504, "float16")):
            quantize_model(model, config)
        assert not quant_layers(model)
        # The same numbers have room in another dtype.
        quantize_model(model.to(torch.bfloat16), config)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, "3.38953e+38"), (torch.float32, "3.40282e+38")])
def test_so_are_those_of_wider_dtypes(dtype: torch.dtype, most: str) -> None:
    model: Any = three_kinds(dtype)
    enlarge(model[2].weight, torch.finfo(dtype).max)
    with pytest.raises(MoQError, match=BEYOND.format(2, re.escape(most), str(dtype)[6:])):
        # A clipping ratio would bring them back.
        quantize_model(model, {"quantize_bits": {"target_bits": 2}, "quantize_algo": {**ASYMMETRIC, "scale": "absmax"}})


def test_weights_that_stay_finite_on_their_grid_are_no_error() -> None:
    model: Any = three_kinds()
    enlarge(model[2].weight, 65504)
    quantize_model(model, {"quantize_bits": {"target_bits": 8}})
    assert model[2].quantized_weight().isfinite().all()
    check_scales(quant_layers(model))


def test_weights_that_autocast_makes_inf_are_told_in_training_and_where_steps_are_skipped() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
    controller = MoQController(model, MoQConfig.from_dict(OUTWARDS["scales in bfloat16"]), 10)
    enlarge(model[0].weight, 70000)
    for dtype, act in ((torch.float16, controller.step), (torch.float16, controller.skip)):
        with torch.autocast("cpu", dtype):
            model(torch.randn(2, 32)).sum().backward()
        with pytest.raises(MoQError, match=BEYOND.format(0, 65504, "float16")):
            act()
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(torch.randn(2, 32)).sum().backward()
        controller.step()


class Launched(TorchDispatchMode):
    """The operators that are called, without views, which launch nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_to_check_the_scales_of_many_layers_takes_no_more_operators_than_of_one() -> None:
    found = []
    for count in (1, 5):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
        quantize_model(model, CONFIG)
        model(torch.randn(2, 8))
        with Launched() as launched:
            check_scales(quant_layers(model))
        found.append(launched.names)
    assert found[0] == found[1] and "aten::cat" in found[0]


def test_the_inputs_of_conv1d_are_quantized_too() -> None:
    one, two = twins()
    config = {**CONFIG, "activation_quantization": {"enabled": True, "bits": 4}}
    x = torch.randn(4, 32)
    results = []
    for model in (one, two):
        quantize_model(model, CONFIG)
        of_weights_alone = model(x)
        results.append(quantize_model(model, config)(x))
        assert not torch.allclose(results[-1], of_weights_alone)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("family", "algorithm", "grouping"),
    [
        *(("T5", algorithm, GROUPINGS[-1]) for algorithm in (*ALGORITHMS, {"range": "full"})),
        ("GPT-2", ALGORITHMS[0], GROUPINGS[1]),
        ("GPT-2", ALGORITHMS[1], GROUPINGS[-1]),
        ("GPT-2", ALGORITHMS[2], GROUPINGS[-1]),
    ],
    ids=str,
)
def test_models_that_are_unpacked_while_loading(
    family: str, algorithm: dict[str, Any], grouping: dict[str, Any], tmp_path: Path, stranger: Stranger
) -> None:
    model = new_model(family, "sequence classification")
    if family == "GPT-2":
        # A linear layer among the Conv1D ones.
        model.transformer.h[0].mlp.c_fc = nn.Linear(32, 128)
    config = config_of(4, algorithm, grouping)
    quantize_model(model, config)
    bits = [8, 4, 3, 9, *{"asymmetric": [2], "symmetric": [2, 1]}.get(algorithm.get("q_type", ""), [])]
    for index, layer in enumerate(quant_layers(model).values()):
        layer.set_bits(bits[index % len(bits)])
    save_quantized(model, tmp_path / "packed")
    stored = {name: layer.stored for name, layer in verify_quantized(tmp_path / "packed", model).layers.items()}
    assert set(stored.values()) == {"packed", "dense"}
    for name, values in stored_weights(tmp_path / "packed").items():
        layer = quant_layers(model)[name]
        weight = to_rows(layer.quantized_weight(), layer.kind)
        assert torch.equal(quantizer.dequantize(*values), weight), name
    if family == "GPT-2":
        # Its own layers are floats, and the linear one among them is packed.
        assert stored["transformer.h.0.mlp.c_fc"] == "packed"
        model.__class__ = WithLinear
    inputs = inputs_of("sequence classification", model)
    if family == "T5":
        assert stranger.load(tmp_path / "packed", model, inputs)["equal"] is True
    loaded = type(model).from_pretrained(tmp_path / "packed")
    pairs = zip(outputs_of(loaded, inputs), outputs_of(model, inputs), strict=True)
    assert all([torch.equal(one, other) for one, other in pairs])


class WithLinear(GPT2ForSequenceClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.h[0].mlp.c_fc = nn.Linear(32, 128)


def test_conv1d_layers_are_floats_on_the_grid_and_damage_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(new_model("GPT-2", "causal LM"), config_of(3, {}, {"quantize_groups": 4}))
    save_quantized(model, tmp_path / "packed")
    found = verify_quantized(tmp_path / "packed", model)
    assert "every quantized layer is saved as rounded floats, at full size: Conv1D layers, as GPT-2" in caplog.text
    assert {(layer.kind, layer.stored) for layer in found.layers.values()} == {("conv1d", "dense")}
    inputs = inputs_of("causal LM", model)
    loaded = type(model).from_pretrained(tmp_path / "packed")
    assert torch.equal(outputs_of(loaded, inputs)[0], outputs_of(model, inputs)[0])
    base = GPT2Model.from_pretrained(tmp_path / "packed")
    assert torch.equal(outputs_of(base, inputs)[0], outputs_of(model.transformer, inputs)[0])
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[0, 0] += 1
    with pytest.raises(MoQError, match=r"transformer\.h\.1\.mlp\.c_proj\.weight differs from the model's"):
        verify_quantized(tmp_path / "packed", model)
