"""The model card shows every name as it is, and what of a folder and its run is known."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt
from packed_bert import SHAPE, checkpoint, config_of
from repo import ROOT
from tiny_runs import arguments, new_model, rows
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

from moq_hf import MoQCallback, MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.packed.card import write_card
from moq_hf.packed.load_check import Proof
from moq_hf.packed.state import read_state, record_metrics, write_state
from moq_hf.packed.verify import Verification

STRANGE = [
    "a|b",
    "`",
    "a`b``c",
    "<i>",
    "<script>",
    "two\nlines",
    "a\n\n# b\n| c |",
    "*a* and _b_ and __c__",
    "~~a~~",
    "$a$",
    "[a](b)",
    "![a](b)",
    "a\\|b\\",
    "&lt;",
    "layer_1.query",
]
DEMO = ROOT / "examples" / "demo"
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
OF_THE_TEMPLATE = {"h1", "h2", "p", "pre", "code", "ul", "li", "details", "summary"}
OF_THE_TEMPLATE |= {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed checkpoint, whose state says that it was trained for four steps."""
    folder = tmp_path_factory.mktemp("card") / "quantized"
    checkpoint(folder, BertForSequenceClassification(BertConfig(**SHAPE)), config_of())
    write_state(folder, {**read_state(folder), "step": 4})
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Verification:
    return verify_quantized(folder)


class Shown(HTMLParser):
    """What a reader of a page sees: the text of each cell, item and so on, and the tags."""

    def __init__(self, card: Path) -> None:
        super().__init__()
        self.texts = [""]
        self.tags: set[str] = set()
        self.feed(MarkdownIt("commonmark").enable("table").render(ModelCard.load(card).text))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "code":
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data.strip("\n")


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_shown_as_they_are(name: str, folder: Path, found: Verification) -> None:
    (layer, *_) = found.layers.values()
    state = found.state | {"metrics": {f"eval_{name}": 0.5}, "float_metrics": {}, "reason": name}
    state["config"] = {**state["config"], "distillation": {**state["config"]["distillation"], "teacher": name}}
    strange = replace(found, layers={name: replace(layer, tied=(name,))}, state=state)
    card = write_card(
        folder, ModelCardData(model_name=name), dataset={"dataset_name": name}, training={name: name}, found=strange
    )
    shown, name = Shown(card), " ".join(name.split())
    assert shown.tags == OF_THE_TEMPLATE
    for text in (name, f"{name}: the weight of {name}, which is stored once.", f"{name}: {name}"):
        assert text in shown.texts
    # The metric and the layer each have a row.
    assert shown.texts.count(name) == 3
    for text in (f" on {name} with Mixture", f"the float model {name}, not", f"not packed otherwise: {name}."):
        assert text in "\n".join(shown.texts)


def test_when_and_how_the_weights_were_rounded(folder: Path, tmp_path: Path) -> None:
    callbacks = [MoQCallback(bits=3, offset=0.75, gptq=4, group_size=8, embeddings=None)]
    Trainer(new_model(), arguments(tmp_path, max_steps=16), train_dataset=rows(), callbacks=callbacks).train()
    card = (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    assert "were quantized in the last 4 of its 16 training steps, to 3 bits" in card
    assert "GPTQ rounded the weights of linear layers by 4 examples, or as many as there were; training went on" in card
    assert "were quantized while it trained, to" in write_card(folder).read_text(encoding="utf-8")
    quantize_model(model := new_model(), bits=4, group_size=8, embeddings=None)
    save_quantized(model, tmp_path / "rounded")
    assert "were quantized to 4 bits" in (tmp_path / "rounded" / "README.md").read_text(encoding="utf-8")


def test_the_command_that_serves_it(tmp_path: Path) -> None:
    model, tokenizer = LlamaForCausalLM(LlamaConfig(**TINY)), AutoTokenizer.from_pretrained(DEMO / "model")
    save_quantized(quantize_model(model, "lm-w4", serve=["vllm"]), tmp_path / "small", processing_class=tokenizer)
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "Serve or convert it: `vllm serve path/to/this/folder`" in card and str(tmp_path) not in card


def test_it_has_metrics_alone(folder: Path) -> None:
    record_metrics(folder, {"eval_lead_time": 2.5, "eval_f1": 0.75, "eval_model_preparation_time": 0.125})
    card = write_card(folder).read_text(encoding="utf-8")
    assert "| lead_time | 2.5000 |" in card and "preparation" not in card


def test_without_codes_it_does_not_speak_of_packing(folder: Path, found: Verification) -> None:
    layers = {name: replace(layer, stored="dense", bits=1) for name, layer in found.layers.items()}
    card = write_card(folder, found=replace(found, layers=layers)).read_text(encoding="utf-8")
    assert "to 1 bit." in card and "The quantized weights are saved as floats, at full size: " in card


@pytest.mark.parametrize("proof", [None, Proof(True, 4, 0.0, None, None, autocast="bfloat16")])
def test_autocast_is_shown_where_it_was_proven(proof: Any, folder: Path, found: Verification) -> None:
    card = write_card(folder, found=replace(found, proof=proof)).read_text(encoding="utf-8")
    assert ("\nimport torch\n" in card) == ("torch.autocast(" in card) == ("## Proof" in card) == bool(proof)


def test_a_folder_with_an_adapter_is_loaded_with_it(folder: Path, found: Verification) -> None:
    config = folder / "adapter" / "second" / "adapter_config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    card = write_card(folder, found=found).read_text(encoding="utf-8")
    config.unlink()
    assert re.search(r"^from peft import PeftModel$", card, re.MULTILINE) and '"peft>=0.17"' in card
    assert '("path/to/this/folder"), "path/to/this/folder", subfolder="adapter/second")' in card


def test_a_choice_under_a_budget_is_in_it(folder: Path, found: Verification) -> None:
    block = {"bits": 4, "weights": 64, "cost": 0.5, "saved": 0.25}
    choice = {"measure": "divergence", "step": 3, "blocks": {"layer.0": block}, "limit": 4.0, "reached": 4.0}
    state = found.state | {"choice": choice | {"in_file": False}}
    card = write_card(folder, found=replace(found, state=state)).read_text(encoding="utf-8")
    assert "## Bits under a budget" in card and "| layer.0 | 64 | 4 | 0.5 | 0.250 |" in card
    with pytest.raises(MoQError, match=r"moq_state\.json: choice.in_file is missing"):
        write_card(folder, found=replace(found, state=found.state | {"choice": choice}))
