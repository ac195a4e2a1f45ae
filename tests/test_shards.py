"""Weights that engines take apart are quantized as whole ones are: in parts, or where they are whole."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForSequenceClassification

from moq_hf import MoQConfig, MoQError, dequantize_model, processes, quantize_model, quantizer, save_quantized
from moq_hf.eigen import block_eigenvalues
from moq_hf.layer_state import LayerState
from moq_hf.model.convert import check_finite, check_scales, quant_layers
from moq_hf.model.selection import take_inventory
from moq_hf.processes import gathered_state_dict, whole
from moq_hf.schedule import FLOAT_BITS
from moq_hf.seams.engines import ZERO_3, ZERO_3_SHAPE
from moq_hf.training.controller import MoQController
from moq_hf.training.measuring import measuring
from moq_hf.training.sensitivity import Sensitivity

FIXED = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}


class Parted:
    """Takes the weight of a layer apart between passes, as ZeRO-3 does, without DeepSpeed."""

    def __init__(self, layer: nn.Linear | nn.Conv1d) -> None:
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
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 8), lambda: nn.Conv1d(4, 8, 3)], ids=["linear", "conv"])
def test_a_weight_that_is_whole_in_passes_alone_is_quantized_in_them(
    make: Callable[[], nn.Linear | nn.Conv1d], rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    layers = [make(), make()]
    layers[1].load_state_dict(layers[0].state_dict())
    # The convolution's output is of length 1.
    plain, parted = (nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)) for layer in layers)
    parted[3].load_state_dict(plain[3].state_dict())
    config = {
        "quantize_bits": {"start_bits": 3, "target_bits": 3},
        "quantize_algo": {"rounding": rounding},
        "modules_to_not_convert": ["3"],
        "quantize_convolutions": isinstance(layers[0], nn.Conv1d),
    }
    quantize_model(plain, config)
    engine = Parted(layers[1])
    # What DeepSpeed would gather.
    monkeypatch.setattr(processes, "whole_of_partitions", lambda weight: engine.values.clone())
    quantize_model(parted, config)
    layer: Any = parted[0]
    assert quant_layers(parted)["0"].matrix_shape == quant_layers(plain)["0"].matrix_shape
    shape = (4, 6) if isinstance(layer, nn.Linear) else (4, 4, 3)
    inputs, copies = [torch.randn(shape).requires_grad_()], []
    inputs.append(inputs[0].detach().clone().requires_grad_())
    quantize = LayerState.fake_quantize

    def counted(self: LayerState, weight: Tensor, dtype: torch.dtype) -> Tensor:
        found = quantize(self, weight, dtype)
        if self is layer.moq:
            copies.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(LayerState, "fake_quantize", counted)
    expected, found = plain(inputs[0]), parted(inputs[1])
    assert torch.equal(found, expected) and not layer.parameter("weight").numel()
    # The graph holds no quantized copy from the forward pass to the backward pass.
    gc.collect()
    assert [copy() for copy in copies] == [None]
    expected.sum().backward()
    found.sum().backward()
    # For the backward pass it was made again.
    assert len(copies) == 2 and torch.equal(inputs[1].grad, inputs[0].grad)  # type: ignore[arg-type]
    gradient: Any = plain[0].weight.grad  # type: ignore[union-attr]
    assert torch.equal(layer.parameter("weight").grad, gradient)
    assert torch.equal(quant_layers(parted)["0"].quantized_copy(torch.float32), plain[0].quantized_weight())  # type: ignore[operator]


def test_layers_that_were_tied_later_quantize_what_fsdp2_hands_over_each_in_its_way(alone: None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    quantize_model(model, FIXED)
    layers = quant_layers(model)
    model[0].weight = model[1].weight
    layers["0"].set_bits(8)
    expected = {name: layer.quantized_weight().detach() for name, layer in layers.items()}
    assert not torch.equal(expected["0"], expected["1"])
    inputs = torch.randn(4, 6)
    plain = model(inputs)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for _ in range(2):
        assert torch.equal(model(inputs), plain)
    for name, layer in layers.items():
        assert torch.equal(layer.quantized_copy(torch.float32), expected[name])


@pytest.mark.parametrize("training", [True, False])
def test_a_policy_of_half_precision_hands_over_rounded_weights(training: bool, alone: None, tmp_path: Path) -> None:
    """What is quantized is the weight in the dtype in which it is handed over, in evaluation too."""
    model = launched.new_model()
    quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": "per_channel"})
    layer: Any = model.bert.pooler.dense
    ratio, floats = layer.moq.ratio, layer.float_weight.detach().clone()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    model.train(training)
    found: list[Tensor] = []
    layer.register_forward_pre_hook(lambda *_: found.append(layer.quantized_weight()))
    with torch.no_grad():
        model(torch.stack([row["input_ids"] for row in launched.rows(2)]))
    expected = quantizer.fake_quantize(floats.to(torch.bfloat16), 4, layer.moq.grid, ratio=ratio)
    assert torch.equal(found[0], expected)
    assert layer.moq.handed_dtype == torch.bfloat16
    # What is saved is rounded in the same way first.
    assert torch.equal(quant_layers(model)["bert.pooler.dense"].quantized_copy(torch.bfloat16), expected)
    with gathered_state_dict(model) as tensors:
        save_quantized(model, tmp_path, state_dict=tensors)
    saved: Any = dequantize_model(AutoModelForSequenceClassification.from_pretrained(tmp_path))
    assert torch.equal(saved.bert.pooler.dense.weight.to(torch.bfloat16), expected)


def test_nan_in_a_sharded_weight_is_found_where_it_is_quantized(alone: None) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), mesh=init_device_mesh("cpu", (1,)))
    quantize_model(model, FIXED)
    layers = quant_layers(model)
    with torch.no_grad():
        whole(layers["0"].float_weight)[0, 0] = torch.nan
    for check in (check_finite, check_scales):
        model(torch.randn(4, 6))
        with pytest.raises(MoQError, match=r"^NaN or Inf in 0.weight: training has diverged"):
            check(layers)
    # What is not quantized is not looked at.
    layers["0"].set_bits(FLOAT_BITS)
    check_finite(layers)


def sharded_pair(only_first: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models, of which FSDP2 shards the second, or its first layer alone."""
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    wrapped = copy.deepcopy(plain)
    fully_shard(wrapped[0] if only_first else wrapped, mesh=init_device_mesh("cpu", (1,)))
    return plain, wrapped


def test_a_pass_after_a_switch_has_the_new_bits_whatever_was_left_gathered(alone: None) -> None:
    """FSDP2 keeps the root's weights after a pass without a backward pass, as an evaluation makes it."""
    config = MoQConfig.load(
        {
            "quantize_bits": {"start_bits": 4, "target_bits": 3},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
        }
    )
    inputs = torch.randn(4, 6)
    models = sharded_pair(only_first=False)
    controllers = [MoQController(model, config) for model in models]
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(*(model(inputs) for model in models))
        for controller in controllers:
            controller.step()
    assert torch.equal(*(model(inputs) for model in models))


def test_whole_weights_beside_shards_are_measured_as_they_are(alone: None) -> None:
    config = {"quantize_bits": {"start_bits": 3, "target_bits": 3}}
    inputs = torch.randn(4, 6)
    plain, wrapped = (quantize_model(model, config) for model in sharded_pair(only_first=True))
    weights = [whole(p).clone() for p in wrapped.parameters()]
    with measuring(wrapped):
        assert torch.equal(wrapped(inputs), plain(inputs))
    assert all(torch.equal(whole(p), before) for p, before in zip(wrapped.parameters(), weights, strict=True))
    assert torch.equal(wrapped(inputs), plain(inputs))


def test_eigenvalues_of_what_engines_take_apart_are_one_error_before_training(alone: None) -> None:
    for engine in ("FSDP2", "ZeRO-3"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        model.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        if engine == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        else:
            for layer in model.layers:
                Parted(layer)
        blocks = {"layers.0": list(model.layers[0].parameters())}
        refused = pytest.raises(MoQError, match=r'^eigenvalues cannot be measured where .*"measure": "divergence"')
        with refused:
            block_eigenvalues(lambda: torch.zeros(()), blocks)
        for measure in ("eigenvalue", "divergence"):
            config = MoQConfig.from_dict(
                {
                    "quantize_bits": {"start_bits": 8, "target_bits": 4},
                    "eigenvalue": {"enabled": True},
                    "sensitivity": {"measure": measure},
                }
            )
            sensitivity = Sensitivity(take_inventory(model, config), config)
            with refused if measure == "eigenvalue" else nullcontext():
                sensitivity.set_run_length(100, 8)


def test_what_cannot_be_trained_in_parts_is_one_error(alone: None) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    tensor_parallel = parallelize_module(model(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(MoQError, match=r"^tensor-parallel weights cannot be quantized; DDP, FSDP2 and"):
        quantize_model(tensor_parallel, FIXED)
    with pytest.raises(MoQError, match=r"^device_map has left some weights on the CPU or on disk.* without device_map"):
        quantize_model(cpu_offload(model(), execution_device=torch.device("cpu")), FIXED)
    columns = model()
    fully_shard(columns, mesh=init_device_mesh("cpu", (1,)), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    whole_model = quantize_model(model(), FIXED)
    quantize_model(columns, FIXED)
    inputs = torch.randn(3, 6)
    with torch.no_grad():
        for mine, other in zip(columns.parameters(), whole_model.parameters(), strict=True):
            whole(mine).copy_(other)
    columns.train()
    for layer, same in zip(quant_layers(columns).values(), quant_layers(whole_model).values(), strict=True):
        layer.moq.ratio = same.moq.ratio
    assert torch.equal(columns(inputs), whole_model(inputs))
    # All of it in one place is a model like any other.
    quantize_model(dispatch_model(model(), {"": "cpu"}, force_hooks=True), FIXED)
