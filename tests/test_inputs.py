"""Inputs on a grid: the numbers, against NumPy and ONNX; the running range; what a checkpoint keeps of it."""

import copy
import json
import pickle
import weakref
from typing import Any, get_args

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from moq_hf import MoQConfig, MoQError, quantize_model
from moq_hf.grid import InputGrid, InputScale
from moq_hf.inputs import (
    InputObserver,
    fake_quantize_input,
    load_ranges,
    new_inputs,
    range_of,
    ranges_of,
    static_parameters,
    static_scale,
    tensor_scale,
    token_parameters,
    update_ranges,
)
from moq_hf.model.convert import quant_layers
from moq_hf.servers import fused_units
from moq_hf.training.controller import MoQController
from moq_hf.training.resume import checked_state

Floats = NDArray[np.float32]
SCALES: tuple[InputScale, ...] = get_args(InputScale)
F32 = np.float32
matrices = arrays(F32, (3, 5), elements=st.floats(-1e4, 1e4, width=32))


def config_of(**activation: Any) -> dict[str, Any]:
    return {
        "quantize_bits": {"start_bits": 8, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "activation_quantization": {"enabled": True, **activation},
        "quantize_heads": True,
    }


@given(x=matrices, bits=st.integers(2, 8))
def test_the_numbers_are_those_of_the_table(x: Floats, bits: int) -> None:
    most = F32(2 ** (bits - 1) - 1)
    tiny = np.finfo(F32).tiny
    scale = np.abs(x).max(1, keepdims=True) / F32(most + 0.5)
    scale = np.where(scale == 0, np.finfo(F32).eps, scale)
    tokens = np.clip(np.rint(x / scale), -most - 1, most) * scale
    check(x[None], InputGrid(bits, "per_token"), tokens[None])
    # The last block of a row may be narrower.
    blocks = [np.maximum(np.abs(x[:, i : i + 2]).max(1, keepdims=True), most * tiny) for i in (0, 2, 4)]
    largest = np.concatenate([blocks[0], blocks[0], blocks[1], blocks[1], blocks[2]], 1)
    check(x, InputGrid(bits, "per_block", 2), np.rint(x * (most / largest)) * (largest / most))
    scale = np.maximum(F32(50) / most, tiny)
    codes = np.clip(np.rint(x / scale), -most - 1, most)
    check(x, InputGrid(bits, "static"), codes * scale, static_scale(torch.tensor([50.0]), InputGrid(bits, "static")))
    low, high, top = min(F32(0), x.min()), max(F32(0), x.max()), F32(2**bits - 1)
    scale = np.maximum((high - low) / top, tiny)
    zero = np.minimum(np.rint(-low / scale), top) - most - 1
    codes = np.clip(np.rint(x / scale + zero), -most - 1, most)
    check(x, InputGrid(bits, "static", symmetric=False), (codes - zero) * scale)
    low, high = (np.minimum(F32(0), x.min(1, keepdims=True)), np.maximum(F32(0), x.max(1, keepdims=True)))
    scale = (high - low) / top
    scale = np.where(scale == 0, np.finfo(F32).eps, scale)
    zero = np.clip(np.rint(-most - 1 - low / scale), -most - 1, most)
    codes = np.clip(np.rint(x / scale + zero), -most - 1, most)
    check(x[None], InputGrid(bits, "per_token", symmetric=False), ((codes - zero) * scale)[None])
    low, high = min(F32(0), x.min()), max(F32(0), x.max())
    scale = np.maximum((high - low) / top, tiny)
    zero = np.clip(np.rint(-low / scale), 0, top)
    check(x, InputGrid(bits, "per_tensor"), (np.clip(np.rint(x / scale) + zero, 0, top) - zero) * scale)


def check(x: Floats, grid: InputGrid, expected: Floats, scale: torch.Tensor | None = None) -> None:
    assert np.array_equal(fake_quantize_input(torch.from_numpy(x), grid, scale).numpy(), expected)


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 3, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "symmetric"), [("per_token", True), ("per_token", False), ("static", True)])
def test_the_numbers_are_those_of_compressed_tensors(
    scale: InputScale, symmetric: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[-1, -1] = 0.0
    # Tokens of one sign, of numbers that are hardly there, and of one that is far out.
    x[0, 0], x[1, 0], x[1, 1] = x[0, 0].abs(), -x[1, 0].abs() - 1, x[1, 1] * torch.finfo(dtype).tiny
    x[0, 1].view(-1)[0] = -50.0
    is_static = scale == "static"
    strategy = "tensor" if is_static else "token"
    args = QuantizationArgs(num_bits=8, strategy=strategy, dynamic=not is_static, symmetric=symmetric)
    step = static_scale(torch.tensor([7.0]), InputGrid(8, scale)).to(dtype) if is_static else None
    found = fake_quantize_input(x, InputGrid(8, scale, symmetric=symmetric), step)
    zero = None
    if step is None:
        step, zero = compute_dynamic_scales_and_zp(x, args, nn.Linear(8, 8))
    assert torch.equal(found, fake_quantize(x, step, zero, args).to(dtype))


def test_asymmetric_tokens_are_those_of_xnnpack() -> None:
    """Scale and zero point; of 20,000 codes one is a tie that it rounds to the other side."""
    x = torch.randn(1, 40, 500, generator=torch.Generator().manual_seed(0)) + torch.linspace(-2, 2, 40)[None, :, None]
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
    inverse = 255 / (high - low)
    # xnn_f32_qd8_asymmetric_quantization_params takes the end with the smaller error.
    below, above = low * inverse, high * inverse
    zero = torch.where(below + above > 1, -128 - below, 127 - above).clamp(-128, 127).round()
    codes = ((x * inverse).round() + zero).clamp(-128, 127)
    grid = InputGrid(8, "per_token", symmetric=False)
    scale, ours = token_parameters(x, grid)
    assert ours is not None and torch.equal(ours, zero) and torch.allclose(scale, 1 / inverse, rtol=1e-6)
    steps = (fake_quantize_input(x, grid) / scale).round() - (codes - zero)
    assert steps.count_nonzero() <= 2 and steps.abs().max() <= 1


@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_asymmetric_numbers_are_those_of_compressed_tensors(dtype: torch.dtype, is_autocast: bool) -> None:
    """In a model of that dtype, and in one of float32, where autocast brings what it computes to the input's."""
    weights = torch.float32 if is_autocast else dtype
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    # Some are beyond the range, and of some the codes are ties.
    observer = new_inputs(InputGrid(8, "static", symmetric=False), torch.zeros(2, 2, dtype=weights))
    observer.range = torch.tensor([0.171875, 2.375])
    scale, zero = observer.stored
    assert scale is not None and zero is not None and zero.dtype == torch.int8 and -128 < int(zero) < 0
    found, args = observer.quantize(x, training=False), QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False)
    assert found is not None
    expected = fake_quantize(x, scale.to(weights), zero, args)
    assert torch.equal(found, expected.to(dtype)) and found.dtype == dtype
    # Zero is exact.
    assert not observer.quantize(torch.zeros(1, 4, dtype=dtype), training=False).any()  # type: ignore[union-attr]


@given(x=matrices.filter(lambda x: bool(np.abs(x).max() > 1e-30)))
def test_per_tensor_is_dynamic_quantize_linear_of_onnx(x: Floats) -> None:
    names = ["codes", "scale", "zero"]
    node = helper.make_node("DynamicQuantizeLinear", ["x"], names)
    value = helper.make_tensor_value_info
    outputs = [value(name, TensorProto.UNDEFINED, None) for name in names]
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [3, 5])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    codes, scale, zero = ReferenceEvaluator(model).run(None, {"x": x})
    ours, middle = tensor_scale(torch.from_numpy(x), 8)
    assert np.array_equal(ours.numpy(), scale) and int(middle) == int(zero)
    expected = (codes.astype(F32) - F32(zero)) * scale
    assert np.array_equal(fake_quantize_input(torch.from_numpy(x), InputGrid(8, "per_tensor")).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", SCALES)
def test_ends_of_a_dtype(scale: InputScale, dtype: torch.dtype) -> None:
    grid = InputGrid(8, scale)
    x = torch.tensor([[torch.finfo(dtype).max / 2, 1.0], [torch.finfo(dtype).tiny, 0.0]], dtype=dtype)
    found = fake_quantize_input(x, grid)
    assert found.dtype == dtype and found.isfinite().all() and found[1, 1] == 0.0
    x[0, 0] = torch.nan
    assert fake_quantize_input(x, grid)[0].isnan().any()
    zeros = torch.zeros(2, 4, dtype=dtype)
    # The static scale of such a range is zero in float16.
    tiny = InputObserver(grid, torch.zeros(()), dtype, torch.tensor(1e-7))
    for rounded in (fake_quantize_input(zeros, grid), tiny.quantize(zeros, training=False)):
        assert rounded is not None and torch.equal(rounded, zeros)


def observe(inputs: InputObserver, *values: float) -> None:
    for value in values:
        inputs.quantize(torch.tensor([[-value, value / 2]]), training=True)


def test_the_range_is_a_moving_average_of_steps() -> None:
    inputs = new_inputs(InputGrid(8, "static"), torch.zeros(2, 2))
    # Before the first step the range is that of the call; evaluation is not observed.
    x = torch.tensor([[1.0, -3.0]])
    assert torch.equal(
        inputs.quantize(x, training=False),
        fake_quantize_input(x, inputs.grid, static_scale(torch.tensor([3.0]), inputs.grid)),
    )  # type: ignore[arg-type]
    update_ranges([inputs])
    assert inputs.range is None
    observe(inputs, 2.0, 4.0, 1.0)
    update_ranges([inputs])
    assert inputs.range is not None and float(inputs.range) == 4.0
    observe(inputs, 8.0)
    # The range of a pass is not that of its own values: a pass that is computed again gives the same.
    assert torch.equal(
        inputs.quantize(x, training=True),
        fake_quantize_input(x, inputs.grid, static_scale(torch.tensor([4.0]), inputs.grid)),
    )  # type: ignore[arg-type]
    update_ranges([inputs])
    assert float(inputs.range) == pytest.approx(4.0 + 0.01 * 4.0, rel=1e-6)
    known = float(inputs.range)
    # A skipped step that overflowed, and one without a forward pass.
    observe(inputs, float("inf"))
    update_ranges([inputs])
    observe(inputs, float("nan"))
    update_ranges([inputs])
    update_ranges([inputs])
    assert float(inputs.range) == known and float(inputs.observed) == 0.0
    # A pass that overflowed in a step that was skipped takes nothing from the next one.
    observe(inputs, float("inf"), known)
    assert float(inputs.observed) == known


def test_the_widest_range_has_a_finite_scale() -> None:
    widest = torch.full((2,), torch.finfo(torch.float32).max)
    scale, zero = static_parameters(widest, InputGrid(8, "static", symmetric=False))
    assert scale.isfinite() and zero is not None and zero.isfinite()


def test_a_percentile_leaves_out_what_is_farthest_out() -> None:
    x = torch.arange(-100, 101.0).view(1, -1)
    ends = range_of(x, InputGrid(8, "static", symmetric=False, percentile=99.0))
    assert ends.tolist() == [98.0, 98.0] and float(range_of(x, InputGrid(8, "static", percentile=99.0))) == 99.0
    # An end is never beyond zero, and without a percentile nothing is left out.
    assert range_of(x.clamp(min=0.0) + 1, InputGrid(8, "static", symmetric=False)).tolist() == [0.0, 101.0]
    # Of many inputs it is taken of a sample, in which every feature has a part.
    wide = torch.zeros(1000, 768)
    wide[:, 5] = 7.0
    assert float(range_of(wide, InputGrid(8, "static", percentile=99.95))) == 7.0
    assert float(range_of(wide, InputGrid(8, "static", percentile=99.5))) == 0.0


def test_a_window_is_a_mean_and_then_a_moving_one() -> None:
    inputs = new_inputs(InputGrid(8, "static", symmetric=False, window=3), torch.zeros(2, 2))
    expected = [0.0, 0.0]
    for step, size in enumerate((3.0, 6.0, 9.0, 2.0, 8.0), 1):
        inputs.quantize(torch.tensor([[-size, size / 2]]), training=True)
        update_ranges([inputs])
        # A step without a forward pass does not count.
        update_ranges([inputs])
        share = 1 / min(step, 3)
        expected = [old + share * (new - old) for old, new in zip(expected, (size, size / 2), strict=True)]
        assert inputs.range is not None and inputs.range.tolist() == pytest.approx(expected)
    saved = json.loads(json.dumps(ranges_of({"a": inputs})))
    other = new_inputs(inputs.grid, torch.zeros(2, 2))
    load_ranges({"a": other}, saved)
    assert other.range is not None and torch.equal(other.range, inputs.range) and other.steps == inputs.steps == 5
    # Those of another kind of range, before the offset, are begun anew.
    for grid in (InputGrid(8, "static"), InputGrid(8, "static", symmetric=False), InputGrid(8, "per_token")):
        other = new_inputs(grid, torch.zeros(2, 2))
        load_ranges({"a": other}, saved)
        assert other.range is None


def test_layers_that_servers_fuse_have_one_range(tiny_bert: nn.Module, tiny_batch: dict[str, torch.Tensor]) -> None:
    section = {"symmetric": False, "percentile": 99.0, "window": 5}
    controller = MoQController(tiny_bert, MoQConfig(bits=8, activations=section), total_steps=3)
    for _ in range(3):
        tiny_bert.train()(**tiny_batch)
        controller.step()
    ranges = controller.state_dict()["input_ranges"]
    units = [names for names in fused_units(ranges).values() if len(names) > 1]
    assert units and all(ranges[name] == ranges[names[0]] for names in units for name in names)


@pytest.mark.parametrize("damaged", [-1.0, 1e39, float("nan"), "1", [1.0, -1.0]])
def test_a_damaged_range_is_named(damaged: Any) -> None:
    controller = MoQController(nn.Sequential(nn.Linear(4, 4)), MoQConfig.from_dict(config_of()), total_steps=6)
    state = controller.state_dict() | {"input_ranges": {"0": damaged}}
    with pytest.raises(MoQError, match=r"input_ranges\.0"):
        controller.load_state_dict(checked_state(state))


def test_in_a_loop_without_a_controller_train_and_eval_move_the_range() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(4, 4)), config_of())
    inputs: Any = quant_layers(model)["0"].moq.inputs
    model.train()(torch.full((1, 4), 3.0))
    model.eval()
    assert float(inputs.range) == 3.0
    model.train()(torch.full((1, 4), 5.0))
    model.train()
    assert float(inputs.range) == pytest.approx(3.02)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied: Any = quant_layers(again)["0"].moq.inputs
        assert copied.range == inputs.range and copied.range is not inputs.range


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scale", ["static", "per_token"])
def test_computed_again_by_checkpointing_it_is_the_same(scale: InputScale, reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    plain: Any = quantize_model(layers, config_of(scale=scale))
    other = copy.deepcopy(plain)
    for step in range(3):
        x = (step * torch.randn(3, 4)).requires_grad_()
        again = x.detach().requires_grad_()
        plain.train()(x).square().sum().backward()
        checkpoint(other.train(), again, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]
        for one, two in zip(quant_layers(plain).values(), quant_layers(other).values(), strict=True):
            assert one.moq.inputs is not None and two.moq.inputs is not None
            update_ranges([one.moq.inputs])
            update_ranges([two.moq.inputs])
            assert torch.equal(one.float_weight.grad, two.float_weight.grad)  # type: ignore[arg-type]
            assert one.moq.inputs.range == two.moq.inputs.range


def test_a_compiled_model_learns_the_range() -> None:
    torch.manual_seed(0)
    model = quantize_model(nn.Sequential(nn.Linear(4, 4)), config_of())
    compiled = torch.compile(model, backend="eager")
    inputs: Any = quant_layers(model)["0"].moq.inputs
    for size in (2.0, 4.0):
        compiled.train()(torch.full((1, 4), size)).sum().backward()
        update_ranges([inputs])
    assert float(inputs.range) == pytest.approx(2.02)
    x = torch.randn(3, 4)
    assert torch.equal(compiled.eval()(x), model(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_no_values_have_no_range_and_only_a_static_scale_has_one(scale: InputScale, training: bool) -> None:
    model = quantize_model(nn.Sequential(nn.Linear(4, 2)), config_of(scale=scale)).train(training)
    assert model(torch.zeros(0, 4)).shape == (0, 2)
    inputs: Any = quant_layers(model)["0"].moq.inputs
    update_ranges([inputs])
    assert inputs.range is None
    model(torch.ones(1, 4))
    update_ranges([inputs])
    assert (inputs.range is not None) == (scale == "static" and training) and not inputs.observed


@pytest.mark.parametrize("assign", [True, False])
def test_a_model_comes_back_from_the_meta_device_with_its_ranges(assign: bool) -> None:
    model = quantize_model(nn.Sequential(nn.Linear(4, 4)), config_of())
    model.train()(torch.full((1, 4), 3.0))
    x = torch.randn(3, 4)
    expected, weights = model.eval()(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta")
    assert model(x.to("meta")).is_meta
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(weights, assign=assign)
    inputs: Any = quant_layers(model)["0"].moq.inputs
    assert float(inputs.range) == 3.0 and torch.equal(model(x), expected)
    model.train()(x)
    assert float(inputs.observed) == float(x.abs().max())


def test_gradients_of_torch_func_go_through_a_training_model() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(4, 4)), config_of())
    parameters, x = {name: p.detach() for name, p in model.named_parameters()}, torch.randn(3, 4)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, parameters, (x[None],))
        return found.square().sum()

    found = torch.func.grad(loss)(parameters, x[0])
    model.train()(x[:1]).square().sum().backward()
    assert torch.equal(found["0.weight"], model.get_parameter("0.weight").grad)  # type: ignore[arg-type]


def linear(scale: InputScale) -> Any:
    torch.manual_seed(0)
    return quantize_model(nn.Sequential(nn.Linear(8, 4)), config_of(scale=scale))[0].train()  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", SCALES)
def test_the_gradient_goes_straight_through(scale: InputScale, dtype: torch.dtype) -> None:
    layer = linear(scale).to(dtype)
    # Neither contiguous nor a leaf.
    leaf = torch.randn(8, 3, dtype=dtype, requires_grad=True)
    x = (2 * leaf).t()
    rounded = layer.moq.inputs.quantize(x, training=False)
    y = layer.quantized_input(x)
    assert torch.equal(y, rounded) and y.dtype == dtype and not y._is_view()
    weights = torch.randn(3, 8, dtype=dtype)
    (first,) = torch.autograd.grad((y * y * weights).sum(), leaf, create_graph=True)
    torch.testing.assert_close(first, (4 * rounded * weights).t())
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, (8 * weights).t())


def test_what_was_rounded_is_not_kept() -> None:
    layer = linear("per_token")
    x = 2 * torch.randn(3, 8, requires_grad=True)
    kept = weakref.ref(x)
    y = layer.quantized_input(x)
    loss = y.square().sum()
    # What is written there afterwards is nothing to the gradient.
    x.add_(1.0)
    del x
    assert kept() is None
    loss.backward()


def test_without_gradients_it_is_rounded_all_the_same() -> None:
    layer, x = linear("per_token"), torch.randn(3, 8, requires_grad=True)
    expected = layer.quantized_input(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = layer.quantized_input(x)
            assert torch.equal(found, expected) and not found.requires_grad
            assert torch.equal(layer.quantized_input(x.clone()), expected)
            assert layer(torch.zeros(0, 8)).shape == (0, 4)


# PyTorch's own, when it first goes forward.
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_forward_mode_goes_straight_through() -> None:
    layer, x, tangent = linear("per_token"), torch.randn(3, 8), torch.randn(3, 8)
    with forward_ad.dual_level():
        y = layer.quantized_input(forward_ad.make_dual(x, tangent))
        values, found = forward_ad.unpack_dual(y)
        assert torch.equal(found, tangent) and torch.equal(values, layer.moq.inputs.quantize(x, False))


def test_who_traces_sees_the_rounding() -> None:
    layer, x = linear("per_token"), torch.randn(3, 8)
    other = torch.randn(3, 8)
    traced = make_fx(lambda x: layer.quantized_input(x))(x)
    assert torch.equal(traced(other), layer.quantized_input(other))
    found = torch.func.grad(lambda x: layer.quantized_input(x).square().sum())(x)
    assert torch.equal(found, 2 * layer.quantized_input(x))
