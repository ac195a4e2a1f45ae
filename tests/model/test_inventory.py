"""What is in a model, and what a run finds in it when it begins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import CONFIG, arguments, moq, new_model, rows, stock
from torch import nn
from transformers import Trainer

from moq_hf import MoQCallback, MoQConfig, MoQError, QuantLinear, quantize_model
from moq_hf.model.inventory import Inventory, output_heads
from moq_hf.model.selection import take_inventory


def test_names_are_those_of_torch() -> None:
    model = new_model()
    # A module in two places.
    model.again = model.bert.pooler
    inventory = Inventory.of(model)
    assert inventory.modules == dict(model.named_modules())
    expected = list(model.named_parameters(remove_duplicate=False))
    found = list(inventory.parameters())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))


def test_blocks_are_entries_of_the_outermost_list_or_of_the_one_that_is_measured() -> None:
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    inventory = Inventory.of(nn.ModuleDict({"layers": nn.ModuleList([inner]), "head": nn.Linear(2, 2)}))
    assert inventory.blocks(inventory.linears) == {
        "layers.0": ["layers.0.experts.0", "layers.0.experts.1"],
        "head": ["head"],
    }
    measured = inventory.layer_blocks("layers.0.experts", 1)
    assert inventory.blocks(inventory.linears, measured) == {
        "layers.0.experts.0": ["layers.0.experts.0"],
        "layers.0": ["layers.0.experts.1"],
        "head": ["head"],
    }


def test_a_layer_that_was_replaced_in_the_meantime_is_quantized(tmp_path: Path) -> None:
    trainer = stock(tmp_path)
    trainer.model.bert.pooler.dense = nn.Linear(16, 16)
    trainer.train()
    assert isinstance(trainer.model.bert.pooler.dense, QuantLinear)


def test_what_the_layers_are_is_what_the_config_says() -> None:
    model = new_model()
    model.bert.beside = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    found = take_inventory(model, MoQConfig.from_dict(CONFIG))
    assert output_heads(model, list(found.linears)) == ["classifier"] and not found.embeddings
    assert found.left_out == {"classifier": None, "bert.beside": "has a computed weight"}
    assert "bert.beside" not in found.layers and "bert.pooler.dense" in found.layers
    off = take_inventory(model, MoQConfig.from_dict({**CONFIG, "enabled": False}))
    assert not off.layers and off.linears.keys() == found.linears.keys()


def test_a_table_that_bounds_its_rows_stays_float() -> None:
    config = MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, "quantize_embeddings": 8})
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    assert list(take_inventory(model, config).embeddings) == ["0"]
    model[0].max_norm = 1.0
    with pytest.raises(MoQError, match="no embedding table that can be quantized"):
        take_inventory(model, config)


@pytest.mark.parametrize("model", [None, "bert", nn.Linear, object()], ids=["none", "text", "class", "object"])
def test_what_is_not_a_module_is_named(model: Any) -> None:
    with pytest.raises(MoQError, match=r"must be a torch.nn.Module, got (NoneType|str|the class Linear|object)"):
        quantize_model(model, {"quantize_bits": {"target_bits": 4}})


@pytest.mark.parametrize("runs_first", ["stock", "moq"])
def test_a_callback_of_two_trainers_serves_the_one_that_trains(runs_first: str, tmp_path: Path) -> None:
    trainers: dict[str, Any] = {"stock": stock(tmp_path / "stock")}
    callback = next(c for c in trainers["stock"].callback_handler.callbacks if isinstance(c, MoQCallback))
    trainers["moq"] = moq(tmp_path / "moq", None, [callback])
    if runs_first == "moq":
        # The stock Trainer comes last.
        trainers["stock"] = Trainer(
            new_model(), arguments(tmp_path / "stock"), train_dataset=rows(), callbacks=[callback]
        )
    trainer = trainers[runs_first]
    trainer.train()
    assert callback.trainer is (trainers["moq"] if runs_first == "moq" else None)
    assert (tmp_path / runs_first / "quantized").exists()
    assert callback.delivered is not None and callback.delivered.path == tmp_path / runs_first / "quantized"
