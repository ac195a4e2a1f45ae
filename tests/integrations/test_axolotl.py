"""axolotl's plugin, on a stand-in for axolotl's base class, and its page.

`benchmarks/versions.py neighbors` runs `axolotl train` with it.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from pydantic import BaseModel, ValidationError
from repo import ROOT
from tiny_runs import arguments, new_model, rows

from moq_hf import MoQCallback, MoQConfig

NAME = "moq_hf.integrations.axolotl.MoQPlugin"


class Mapping(dict):
    """Like axolotl's: what is not there is None."""

    def __missing__(self, key: str) -> None:
        return None


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As axolotl's `load_plugin` makes it of its name."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", type("BasePlugin", (), {}), False)
    module, _, cls = NAME.rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    made = getattr(importlib.import_module(module), cls)()
    yield made
    del sys.modules[module]


def keys_of(plugin: Any) -> type[BaseModel]:
    """The class of its keys, which axolotl imports by the name that the plugin gives."""
    module, _, name = plugin.get_input_args().rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert issubclass(cls, BaseModel)
    return cls


def test_the_callback_trains_and_delivers(plugin: Any, tmp_path: Path) -> None:
    model = new_model()
    callbacks = plugin.add_callbacks_pre_trainer(Mapping(moq=Mapping(bits=4, group_size=16)), model)
    hf.Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=callbacks).train()
    (callback,) = callbacks
    assert isinstance(callback, MoQCallback) and callback.config == MoQConfig(bits=4, group_size=16)
    packed = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized")
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    assert torch.equal(packed(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "Field required"),
        ({"moq": {"bitz": 4}}, "bitz: unknown key"),
        ({"moq": "w44"}, "did you mean w4"),
        ({"moq": 4}, "valid string"),
    ],
)
def test_wrong_keys_are_told_with_those_of_axolotl(plugin: Any, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        keys_of(plugin)(**keys)


def test_the_page(plugin: Any) -> None:
    source = (ROOT / "docs" / "guide" / "axolotl.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(block) for block in re.findall(r"(?s)```yaml\n(.*?)```", source)]
    assert shown[0]["plugins"] == [NAME]
    for document in shown:
        assert MoQConfig.load(keys_of(plugin)(**document).moq).bits == 4
