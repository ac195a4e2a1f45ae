"""`"grid": "found"`: layers on the grids that their weights lie on, with no weight changed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQConfigError,
    MoQError,
    dequantize_model,
    quantize_model,
    save_quantized,
    verify_quantized,
)
from moq_hf.model.convert import quant_layers


def tiny(**keywords: Any) -> LlamaForCausalLM:
    """A model whose layers lie on a grid."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    return dequantize_model(quantize_model(model, **keywords)) if keywords else model  # type: ignore[return-value]


Q4_0 = {"bits": 4, "group_size": 32, "scale_dtype": "float16"}
MIXED = Q4_0 | {"overrides": {"*.down_proj": {"bits": 8}}}


@pytest.mark.parametrize(
    "keywords",
    [Q4_0, MIXED, {"bits": 8}, {"bits": 3}, {"bits": 4, "q_type": "asymmetric"}, {"format": "mxfp4"}],
    ids=["q4_0", "mixed", "w8", "w3", "asymmetric", "mxfp4"],
)
def test_no_weight_changes_and_the_folder_is_small(keywords: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(**keywords)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    quantize_model(model, grid="found")
    assert torch.equal(model(ids).logits, expected)
    # The proof compares with the model in memory.
    save_quantized(model, tmp_path / "out", inputs={"input_ids": ids})
    loaded = dequantize_model(LlamaForCausalLM.from_pretrained(tmp_path / "out"))
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_each_layer_has_the_bits_of_its_weight() -> None:
    model = quantize_model(tiny(**MIXED), {"grid": "found"})
    bits = {name.rpartition(".")[2]: layer.moq.bits for name, layer in quant_layers(model).items()}
    assert bits["down_proj"] == 8 and bits["q_proj"] == bits["up_proj"] == 4


class PartsOfNames(nn.Module):
    """Layers of which one has a name that is part of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"b": nn.Linear(64, 64)})
        self.b = nn.Linear(64, 64)
        self.c = nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)


@pytest.mark.parametrize(
    "overrides",
    [{"a.b": {"bits": 8}, "[b]": {"bits": 3}}, {"[b]": {"bits": 6}}, {"[b]": {"group_size": 16}}],
    ids=["both", "bits", "groups beside rows"],
)
def test_a_name_that_is_part_of_another_means_its_own_layer(overrides: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = quantize_model(PartsOfNames(), bits=4, overrides=overrides)
    bits = {name: layer.moq.bits for name, layer in quant_layers(model).items()}
    dequantize_model(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    quantize_model(model, grid="found")
    assert {name: layer.moq.bits for name, layer in quant_layers(model).items()} == bits
    for name, weight in dequantize_model(model).state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_rows_as_long_as_the_groups_of_other_layers_are_groups() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    model = dequantize_model(quantize_model(MixtralForCausalLM(config), bits=4, group_size=32))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    # The rows of gate_up_proj are one group, those of down_proj two; experts must have the same groups.
    quantize_model(model, grid="found")
    for name, weight in dequantize_model(model).state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_weights_on_no_grid_are_named() -> None:
    model = tiny(**Q4_0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.001
    with pytest.raises(MoQError, match=r"these do not: model\.layers\.0\.mlp\.up_proj \(98\.44 % on 4 bits"):
        quantize_model(model, grid="found")
    assert not quant_layers(model)


def test_a_key_that_says_another_grid_is_an_error() -> None:
    with pytest.raises(MoQError, match=r"bits: 3 \(the weights have 4\); leave these keys out"):
        quantize_model(tiny(**Q4_0), grid="found", bits=3)
    for wrong in ({"gptq": 8}, {"rounding": "stochastic"}, {"offset": 5}, {"scale": "mse"}):
        with pytest.raises(MoQConfigError, match='"found" keeps the grids of the weights'):
            MoQConfig(grid="found", **wrong)


@pytest.mark.parametrize("bits", [4, 8], ids=["full", "narrow"])
def test_symmetric_layers_beside_asymmetric_ones_get_zero_points(bits: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 2))
    for layer, kind in zip(model, ("symmetric", "asymmetric"), strict=False):
        layer.weight.data += 0.1
        alone = nn.Sequential(layer, nn.Linear(32, 2))
        dequantize_model(quantize_model(alone, bits=bits, q_type=kind))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    alone = quantize_model(copy.deepcopy(model), grid="found", modules_to_not_convert=["1"])
    assert quant_layers(alone)["0"].moq.grid.symmetric
    quantize_model(model, grid="found")
    for layer in quant_layers(model).values():
        assert (layer.moq.bits, layer.moq.grid.symmetric) == (bits, False)
    for name, weight in dequantize_model(model).state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_folder_holds_layers_that_are_symmetric_by_chance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, state_size=4, time_step_rank=1)
    model = MambaForCausalLM(config).eval()
    dequantize_model(quantize_model(model, bits=4, q_type="asymmetric"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.arange(8)[None]
    # A row of dt_proj is a single weight.
    quantize_model(model, grid="found")
    save_quantized(model, tmp_path / "out", inputs={"input_ids": ids})
    stored = verify_quantized(tmp_path / "out").layers
    assert {layer.stored for layer in stored.values()} == {"packed"}
    assert len({layer.bits for layer in stored.values()}) == 2
    loaded = dequantize_model(MambaForCausalLM.from_pretrained(tmp_path / "out"))
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_layers_of_several_formats_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 2))
    model[1].weight.data += 0.1
    for layer, more in zip(model, ({"format": "mxfp4"}, {"bits": 4, "q_type": "asymmetric"}), strict=False):
        dequantize_model(quantize_model(nn.Sequential(layer, nn.Linear(32, 2)), more))
    with pytest.raises(MoQError, match=r"several formats.*: 0 \(mxfp4 in groups of 32\); 1 \(4 bits asymmetric"):
        quantize_model(model, grid="found")


def test_a_run_trains_on_the_grid_and_resumes(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(8)]

    def run(folder: Path, resume: str | None = None) -> tuple[LlamaForCausalLM, MoQCallback]:
        model = tiny(**Q4_0)
        callback = MoQCallback(grid="found")
        args = TrainingArguments(
            str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
        )
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])  # type: ignore[arg-type]
        trainer.train(resume_from_checkpoint=resume)
        return model, callback

    start = quantize_model(tiny(**Q4_0), grid="found")
    model, callback = run(tmp_path / "a")
    again, _ = run(tmp_path / "b", str(tmp_path / "a" / "checkpoint-2"))
    assert callback.delivered is not None and callback.delivered.proof is not None
    assert callback.delivered.proof.agrees
    scales = {name: layer.moq.scales for name, layer in quant_layers(start).items()}
    for name, layer in quant_layers(model).items():
        own, other = layer.moq.scales, quant_layers(again)[name]
        assert own is not None and torch.equal(own.scale, scales[name].scale)  # type: ignore[union-attr]
        assert torch.equal(layer.quantized_copy(torch.float32), other.quantized_copy(torch.float32))
        # What is found stays known, for a later run on the same model.
        assert other.moq.found is not None and other.moq.found.scale_dtype == "float16"
