"""A model with quantized layers says when its float weights are saved, however they are, and never for a checkpoint."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from sentences import encoder
from tiny_runs import CONFIG, arguments, moq, new_model, rows, stock, trained
from torch import nn
from transformers.utils import hub

from moq_hf import dequantize_model, quantize_model, save_quantized

SENTENCE = "save_pretrained wrote the float weights, which do not answer as the quantized model in memory does"
Told = Callable[[], list[str]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The warnings since it was last called."""

    def take() -> list[str]:
        texts = [text for text in caplog.messages if "save_pretrained " in text and "wrote the" in text]
        caplog.clear()
        return texts

    return take


def pushed(model: Any, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "hf_api", lambda: Hub())
        patch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: ModelCard("---\n---\n"))
        patch.setattr(type(model), "_upload_modified_files", lambda *_, **__: None)
        model.push_to_hub("tester/model")


class Hub:
    """Makes every repository."""

    repo_id = "tester/model"

    def create_repo(self, *args: Any, **kwargs: Any) -> "Hub":
        return self


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "its state_dict": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
    "the model in it": lambda model, folder: model.bert.save_pretrained(folder),
    "a copy": lambda model, folder: copy.deepcopy(model).save_pretrained(folder),
    "a pickle": lambda model, folder: pickle.loads(pickle.dumps(model)).save_pretrained(folder),
    "torch.compile": lambda model, folder: torch.compile(model, backend="eager").save_pretrained(folder),
    "a Trainer": lambda model, folder: hf.Trainer(model, arguments(folder)).save_model(str(folder)),
    "the Hub": pushed,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_each_way_of_saving_is_told_once(save: Callable[[Any, Path], Any], tmp_path: Path, told: Told) -> None:
    model = quantize_model(new_model(), "w4")
    assert model.state_dict().keys() == new_model().state_dict().keys()
    save(model, tmp_path)
    (text,) = told()
    assert SENTENCE in text and "save_quantized(model, folder) writes that one" in text
    dequantize_model(model)
    save(model, tmp_path)
    assert told() == []


def test_a_model_around_a_quantized_part_is_told_of(tmp_path: Path, told: Told) -> None:
    model = new_model()
    for part, name in (
        (model.bert, "bert"),
        (model.bert.encoder, "bert.encoder"),
        (model.bert.encoder, "bert.encoder"),
    ):
        dequantize_model(model)
        quantize_model(part, "w4")
        for outer in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            outer.save_pretrained(tmp_path)
            (text,) = told()
            assert f"BertForSequenceClassification wrote the float weights of {name}, which" in text
    settings = arguments(tmp_path, save_strategy="steps", save_steps=8)
    trainer = trained(hf.Trainer(model, settings, train_dataset=rows()))
    assert (tmp_path / "checkpoint-16").is_dir() and told() == []
    trainer.save_model(str(tmp_path / "whole"))
    assert len(told()) == 1
    dequantize_model(model.bert.encoder)
    model.save_pretrained(tmp_path)
    assert told() == []


def test_a_copy_saves_its_own_weights(tmp_path: Path) -> None:
    model = quantize_model(new_model(), "w4")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.ones_(other.classifier.weight)
        other.save_pretrained(tmp_path)
        loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path)
        assert torch.equal(loaded.classifier.weight, other.classifier.weight)


def test_only_the_process_that_writes_says_it(tmp_path: Path, told: Told) -> None:
    quantize_model(new_model(), "w4").save_pretrained(tmp_path, is_main_process=False)
    assert told() == []


@pytest.mark.parametrize("make", [stock, moq])
def test_a_run_says_it_of_what_is_saved_after_it_and_not_of_its_checkpoints(
    make: Any, tmp_path: Path, told: Told
) -> None:
    trainer = trained(make(tmp_path, save_strategy="steps", save_steps=4))
    assert (tmp_path / "checkpoint-16").is_dir() and told() == []
    trainer.save_model(str(tmp_path / "mine"))
    # A MoQTrainer has saved it packed.
    assert len(told()) == (make is stock)
    trainer.model.save_pretrained(tmp_path / "mine")
    assert len(told()) == 1


def test_nor_of_checkpoints_of_a_run_without_a_callback(tmp_path: Path, told: Told) -> None:
    settings = arguments(tmp_path, save_strategy="steps", save_steps=8)
    trained(hf.Trainer(quantize_model(new_model(), "w4"), settings, train_dataset=rows()))
    assert (tmp_path / "checkpoint-16").is_dir() and told() == []


def test_floats_are_saved_without_a_word(tmp_path: Path, told: Told) -> None:
    early = {**CONFIG, "quantize_schedule": {"schedule_offset": 8, "quantize_period": 1}}

    class Saves(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 3:
                model.save_pretrained(tmp_path / "early")

    trained(stock(tmp_path, early, [Saves()]))
    assert (tmp_path / "early").is_dir() and told() == []
    save_quantized(quantize_model(new_model(), "w4"), tmp_path / "packed")
    quantize_model(quantize_model(new_model(), "w4"), "w4", enabled=False).save_pretrained(tmp_path / "plain")
    assert told() == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_told_as_such(tmp_path: Path, told: Told) -> None:
    model = quantize_model(get_peft_model(new_model(), LoraConfig(target_modules=["query"])), "w4")
    model.save_pretrained(tmp_path / "adapter")
    (text,) = told()
    assert "wrote the adapters alone, which do not answer as the quantized model in memory does" in text
    save_quantized(model, tmp_path / "packed")
    assert told() == []


@pytest.mark.filterwarnings("ignore")
def test_models_of_sentence_transformers(tmp_path: Path, told: Told) -> None:
    pytest.importorskip("sentence_transformers")
    model: Any = quantize_model(encoder(tmp_path), "w4")
    model.save(str(tmp_path / "floats"))
    assert len(told()) == 1
    # It goes on to say so after a packed one was saved.
    save_quantized(model, tmp_path / "packed")
    assert told() == []
    model.save_pretrained(str(tmp_path / "floats"))
    assert len(told()) == 1
