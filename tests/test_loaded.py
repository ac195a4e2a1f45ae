"""A model that was loaded with a MoQConfig trains in a stock Trainer as with a callback, and is saved packed."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from sentences import encoder
from tiny_runs import arguments, assert_same, callback_of, moq, new_model, rows, trained, weights

from moq_hf import MoQCallback, MoQConfig, MoQError, MoQTrainer, dequantize_model, quantize_model
from moq_hf.loaded import AttachesCallback
from moq_hf.model.convert import quant_layers
from moq_hf.seams.engines import ZERO_3

BERT = hf.BertForSequenceClassification
INPUTS = {"input_ids": torch.arange(5, 25).view(2, 10)}
# What counts optimizer steps, each in its way.
CONFIG = MoQConfig("w4", rounding="stochastic", scale_refresh=3, activations={"enabled": True})  # type: ignore[call-arg]
RUN: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
FILES = ("model.safetensors", "config.json", "moq_state.json")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    new_model().save_pretrained(folder)
    return folder


def loaded(base: Path, config: MoQConfig | None = CONFIG) -> Any:
    model = BERT.from_pretrained(base, quantization_config=config)
    # The loss of a stock Trainer is multiplied otherwise.
    model.accepts_loss_kwargs = False
    return model


def stock(base: Path, folder: Path, config: MoQConfig | None = CONFIG, callbacks: Any = (), **more: Any) -> hf.Trainer:
    settings = arguments(folder, **{**RUN, **more})
    data = {"train_dataset": rows(), "eval_dataset": rows(8)}
    return hf.Trainer(loaded(base, config), settings, callbacks=list(callbacks), **data)


def own(base: Path, folder: Path, config: MoQConfig | None, **more: Any) -> MoQTrainer:
    with_config = {} if config is not None else {"moq_config": CONFIG}
    return MoQTrainer(loaded(base, config), arguments(folder, **RUN, **more), train_dataset=rows(), **with_config)


RUNS: dict[str, Callable[..., hf.Trainer]] = {
    "callback": lambda base, folder, **more: stock(base, folder, None, [MoQCallback(CONFIG)], **more),
    "both": lambda base, folder, **more: stock(base, folder, CONFIG, [MoQCallback(CONFIG)], **more),
    "MoQTrainer": lambda base, folder, **more: own(base, folder, CONFIG, **more),
    "MoQTrainer's own": lambda base, folder, **more: own(base, folder, None, **more),
    "model_init": lambda base, folder, **more: hf.Trainer(
        args=arguments(folder, **RUN, **more), train_dataset=rows(), model_init=lambda: loaded(base)
    ),
}


@pytest.mark.parametrize("accumulated", [1, 4])
def test_however_it_comes_to_the_trainer_weights_and_files_are_equal(
    accumulated: int, base: Path, tmp_path: Path
) -> None:
    expected = trained(stock(base, tmp_path / "stock", gradient_accumulation_steps=accumulated))
    written = {name: (tmp_path / "stock" / "quantized" / name).read_bytes() for name in FILES}
    assert callback_of(expected).delivered.proof.agrees
    for name in RUNS if accumulated > 1 else ["callback"]:
        trainer = trained(RUNS[name](base, tmp_path / name, gradient_accumulation_steps=accumulated))
        assert_same(weights(trainer), weights(expected))
        # Of a model that `model_init` makes for a run, the Trainer does not change the config.
        files = FILES[:1] if name == "model_init" else FILES
        assert all((tmp_path / name / "quantized" / file).read_bytes() == written[file] for file in files), name
        assert callback_of(trainer).config == CONFIG


def test_checkpoints_hold_floats_and_a_run_goes_on_from_them(base: Path, tmp_path: Path) -> None:
    whole = trained(stock(base, tmp_path, eval_strategy="steps", eval_steps=4, load_best_model_at_end=True))
    assert whole.state.best_model_checkpoint is not None
    checkpoint = tmp_path / "checkpoint-4"
    assert "quantization_config" not in json.loads((checkpoint / "config.json").read_text())
    assert load_file(checkpoint / "model.safetensors").keys() == new_model().state_dict().keys()
    whole = trained(stock(base, tmp_path))
    for callbacks in ([], [MoQCallback(CONFIG)]):
        again = stock(base, tmp_path, callbacks=callbacks)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert_same(weights(again), weights(whole))


def test_a_callback_of_ones_own_goes_before(base: Path, tmp_path: Path) -> None:
    trainer = stock(base, tmp_path, max_steps=2)
    trainer.add_callback(MoQCallback(bits=2))
    trained(trainer)
    assert {layer.moq.bits for layer in quant_layers(trainer.model).values()} == {2}
    # The next Trainer goes on with that.
    again = trained(hf.Trainer(trainer.model, arguments(tmp_path, max_steps=2), train_dataset=rows()))
    assert callback_of(again).config == MoQConfig(bits=2)
    # Falling bits are over.
    falling = trained(moq(tmp_path / "falling", max_steps=16))
    falling.model.save_pretrained(tmp_path / "floats")
    again = trained(hf.Trainer(falling.model, arguments(tmp_path, max_steps=2), train_dataset=rows()))
    assert not any(isinstance(callback, MoQCallback) for callback in again.callback_handler.callbacks)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    for model in (new_model(), quantize_model(new_model(), "w4")):
        trainer = trained(hf.Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows()))
        kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
        assert kinds.count(AttachesCallback) == 1 and MoQCallback not in kinds


def through_a_trainer(model: Any, folder: Path) -> None:
    hf.Trainer(model, arguments(folder)).save_model(str(folder))


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "a state dict": lambda model, folder: model.save_pretrained(folder, state_dict=copy.deepcopy(model.state_dict())),
    "a copy": lambda model, folder: copy.deepcopy(model).save_pretrained(folder),
    "a pickle": lambda model, folder: pickle.loads(pickle.dumps(model)).save_pretrained(str(folder)),
    "torch.compile": lambda model, folder: torch.compile(model, backend="eager").save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="5KB"),
    "a Trainer": through_a_trainer,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_what_is_saved_is_packed_and_loads_without_moq_hf(
    save: Callable[[Any, Path], Any], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = loaded(base, MoQConfig("w4"))  # type: ignore[call-arg]
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "compressed-tensors"
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (save is SAVES["shards"])
    assert f"moq_hf: saved in {tmp_path}" in capsys.readouterr().out
    assert torch.equal(BERT.from_pretrained(tmp_path)(**INPUTS).logits, model(**INPUTS).logits)
    dequantize_model(model)
    save(model, tmp_path / "floats")
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())


def test_a_part_of_it_is_saved_packed_too(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    model.bert.save_pretrained(tmp_path)
    found = hf.BertModel.from_pretrained(tmp_path)(**INPUTS).last_hidden_state
    dequantized: Any = dequantize_model(model.bert)
    assert torch.equal(found, dequantized(**INPUTS).last_hidden_state)


def test_what_it_does_not_write(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    for asked in ({"variant": "fp16"}, {"distributed_checkpoint": True}):
        with pytest.raises(MoQError, match="knows neither variant nor distributed_checkpoint"):
            model.save_pretrained(tmp_path / "none", **asked)
    # A mark of ZeRO-3, which hands over an empty state dict where it does not gather.
    setattr(model.classifier.weight, ZERO_3, 0)
    with pytest.raises(MoQError, match=r"spread over processes .FSDP2, ZeRO-3."):
        model.save_pretrained(tmp_path / "none", state_dict={})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora", [None, "merged"])
def test_adapters_train_on_it(lora: Any, base: Path, tmp_path: Path) -> None:
    config = MoQConfig(bits=4, lora=lora)
    settings = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "dense"], exclude_modules=["pooler.dense"]
    )
    found = []
    for given, callbacks in ((config, []), (None, [MoQCallback(config)])):
        hf.set_seed(5)
        model = peft.get_peft_model(loaded(base, given), settings)
        folder = tmp_path / str(len(found))
        trainer = hf.Trainer(model, arguments(folder, max_steps=4), train_dataset=rows(), callbacks=callbacks)
        found.append(trained(trainer))
        assert callback_of(trainer).delivered.proof.agrees
    assert_same(*map(weights, found))
    if lora:
        merged: Any = found[0].model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        answers = BERT.from_pretrained(tmp_path / "merged")(**INPUTS).logits
        assert torch.equal(answers, merged.eval()(**INPUTS).logits)


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_saves_floats_and_says_so(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder(tmp_path / "start").save(str(tmp_path / "float"))
    config = {"quantization_config": MoQConfig("w4")}  # type: ignore[call-arg]
    model = library.SentenceTransformer(str(tmp_path / "float"), model_kwargs=config, device="cpu")
    assert quant_layers(model)
    model.save(str(tmp_path / "again"))
    assert "save_pretrained wrote the float weights" in caplog.text
    assert library.SentenceTransformer(str(tmp_path / "again"), device="cpu").encode("one two").shape == (32,)
