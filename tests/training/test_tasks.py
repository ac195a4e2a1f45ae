"""Ways to train beside a stock Trainer on a stock model: Trainers of one's own, searches, PEFT, TRL, SetFit."""

import contextlib
import copy
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset
from long_tests import long_but_for
from model_zoo import CONFIG, ROWS, STEPS, Stranger, arguments, inputs_of, new_model, rows_of
from safetensors.torch import load_file
from stranger import outputs_of
from tables import quant_embeddings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import assert_same
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, HyperParamSearchBackendBase
from transformers.trainer_utils import BestRun, HPSearchBackend

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQError,
    MoQTrainer,
    dequantize_model,
    quantize_model,
    save_quantized,
    verify_quantized,
)
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import LINEARS
from moq_hf.seams.transformers import start_in_base, without_start

TASK = "sequence classification"
TARGET = {CONFIG["quantize_bits"]["target_bits"]}
SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def bits_of(model: nn.Module) -> set[int]:
    return {layer.moq.bits for layer in quant_layers(model).values()}


def trained(model: Any, folder: Path, task: str = TASK, config: Any = CONFIG, **more: Any) -> MoQCallback:
    """A stock Trainer's run, whose delivered model was proven."""
    callback = MoQCallback(config)
    hf.Trainer(model, arguments(folder, **more), train_dataset=rows_of(task), callbacks=[callback]).train()
    assert callback.delivered.proof.agrees
    return callback


def equal(one: nn.Module, other: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    pairs = zip(outputs_of(one, inputs), outputs_of(other, inputs), strict=True)
    return all([torch.equal(a, b) for a, b in pairs])


def test_generation_while_training(tmp_path: Path, stranger: Stranger) -> None:
    task = "sequence to sequence"
    model = new_model("T5", task)
    seen = []
    trainer = hf.Seq2SeqTrainer(
        model,
        arguments(tmp_path, hf.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6),
        train_dataset=rows_of(task),
        eval_dataset=rows_of(task),
        compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {"score": 1.0},
        callbacks=[MoQCallback(CONFIG)],
    )
    trainer.train()
    assert trainer.evaluate()["eval_score"] == 1.0
    assert seen and seen[0][0] == ROWS and bits_of(model) == TARGET
    assert stranger.load(tmp_path / "quantized", model, inputs_of(task, model))["equal"]


class Pruned(Exception):
    """As a library that searches ends a trial."""


class Trials(HyperParamSearchBackendBase):
    """Trains once for each learning rate; stands in for a library that searches."""

    name = "wandb"

    @staticmethod
    def is_available() -> bool:
        return True

    def run(self, trainer: hf.Trainer, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
        for rate in (1e-3, 2e-3, 3e-3)[:n_trials]:
            trainer.objective = None
            sys.modules["wandb"].run.id += 1
            with contextlib.suppress(Pruned):
                trainer.train(trial={"learning_rate": rate})
        return BestRun("2", 0.0, {"learning_rate": rate})

    def default_hp_space(self, trial: Any) -> Any:
        return trial


class Diary(hf.TrainerCallback):
    """Of each run: the model, its bits before the first step, and the learning rate. The second run is pruned."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.first_bits: list[set[int]] = []
        self.last_bits: list[set[int]] = []
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.models.append(model)
            self.first_bits.append(bits_of(model))
            self.rates.append(args.learning_rate)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Before anything is at the target.
        if len(self.models) == 2:
            raise Pruned

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.last_bits.append(bits_of(model))


def searching(folder: Path, **more: Any) -> tuple[hf.Trainer, Diary]:
    diary = Diary()
    trainer = hf.Trainer(
        model_init=lambda: new_model("BERT", TASK),
        args=arguments(folder, eval_strategy="steps", eval_steps=2, **more),
        train_dataset=rows_of(TASK),
        eval_dataset=rows_of(TASK),
        callbacks=[MoQCallback(CONFIG), diary],
    )
    return trainer, diary


def test_a_search_begins_each_trial_anew_and_a_pruned_one_leaves_nothing_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.WANDB, Trials)
    # The Trainer asks the library for the name of the run.
    library = ModuleType("wandb")
    library.__spec__ = ModuleSpec("wandb", None)
    # A name for each trial.
    library.run = SimpleNamespace(id=-1)
    monkeypatch.setitem(sys.modules, "wandb", library)
    trainer, diary = searching(tmp_path)
    trainer.hyperparameter_search(backend="wandb", n_trials=3)
    # Each begins with a float model of its own.
    assert len({id(model) for model in diary.models}) == 3 and diary.first_bits == [{32}] * 3
    assert diary.rates == [1e-3, 2e-3, 3e-3] and diary.last_bits == [TARGET] * 2
    # The plan is told once; then each trial that ends has one line, which ends with a folder of its own.
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("moq_hf")]
    assert [line.partition(":")[0] for line in told] == ["moq_hf", "moq_hf plan", "moq_hf", "moq_hf"]
    for trial, line in zip((0, 2), told[2:], strict=True):
        folder = tmp_path / f"run-{trial}" / "quantized"
        assert line.startswith("moq_hf: All ") and line.endswith(f" MB, float 0.0851. In {folder}")
        assert json.loads((folder / "moq_state.json").read_text())["proof"]["agrees"] is True
        assert (folder.parent / "trainer_state.json").is_file()
    assert not (tmp_path / "quantized").exists() and not (tmp_path / "run-1" / "quantized").exists()
    # What one trial leaves behind is no part of the next: it is as if it had been the only one.
    alone, only = searching(tmp_path, learning_rate=3e-3)
    alone.train()
    assert equal(only.models[0], diary.models[2], inputs_of(TASK, only.models[0]))


def left_in_float(model: nn.Module) -> list[str]:
    quantized = quant_layers(model)
    return [name for name, part in model.named_modules() if isinstance(part, LINEARS) and name not in quantized]


class Tower(nn.Module):
    """A body of transformers in a module of one's own, with two layers on top."""

    def __init__(self) -> None:
        super().__init__()
        self.body = hf.BertModel(hf.BertConfig(**SMALL))
        self.between = nn.Linear(32, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(torch.tanh(self.between(self.body(input_ids, attention_mask)[1])))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_body_in_a_module_of_one_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture, stranger: Stranger) -> None:
    hf.set_seed(0)
    model = Tower()
    trainer = hf.Trainer(model, arguments(tmp_path), train_dataset=rows_of(TASK), callbacks=[MoQCallback(CONFIG)])
    trainer.train()
    assert left_in_float(model) == ["between", "head"]
    told = "holds rounded floats, not packed: only models of transformers can be saved packed, got Tower"
    assert told in caplog.text and "no model card" not in caplog.text
    assert "## Bits per layer" in (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    delivered = Tower()
    delivered.load_state_dict(load_file(tmp_path / "quantized" / "model.safetensors"))
    batch = {name: tensor for name, tensor in inputs_of(TASK, model.body).items() if name != "token_type_ids"}
    batch["labels"] = torch.tensor([0, 1] * 2)
    with torch.no_grad():
        assert torch.equal(delivered.eval()(**batch)["logits"], model.eval()(**batch)["logits"])
    verify_quantized(tmp_path / "quantized")
    save_quantized(model.body, tmp_path / "body")
    inputs = inputs_of(TASK, model.body)
    assert stranger.load(tmp_path / "body", model.body, inputs) == {"equal": True, "tied": []}


def test_the_heads_of_models_in_a_module_stay_float() -> None:
    pair = nn.ModuleDict({"one": new_model("BERT", TASK), "two": new_model("DistilBERT", TASK), "top": nn.Linear(4, 2)})
    quantize_model(pair, CONFIG)
    assert left_in_float(pair) == ["one.classifier", "two.pre_classifier", "two.classifier", "top"]


ADAPTED = [("GPT-2", "causal LM", ["c_attn"]), ("Llama", "causal LM", "all-linear")]
# peft 0.21 asks transformers for an attribute by its old name.
from_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(family: str, task: str, targets: Any) -> Any:
    """The model with LoRA; its adapters are not zero, as they would be at first."""
    peft = pytest.importorskip("peft")
    kind = "SEQ_CLS" if task == TASK else "CAUSAL_LM"
    lora = peft.LoraConfig(task_type=kind, target_modules=targets, r=4, fan_in_fan_out=family == "GPT-2")
    return peft.get_peft_model(new_model(family, task), lora)


@from_peft
@pytest.mark.parametrize(("family", "task", "targets"), ADAPTED)
def test_lora_on_quantized_layers(
    family: str, task: str, targets: Any, tmp_path: Path, stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted(family, task, targets)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained(model, tmp_path, task)
    layers = quant_layers(model)
    # What LoRA wraps is quantized as well as what it leaves alone; the adapters are neither.
    assert any(name.endswith(".base_layer") for name in layers) and bits_of(model) == TARGET
    assert not any(part in name for name in layers for part in ("lora_", "modules_to_save"))
    assert len(layers) == len(quant_layers(quantize_model(new_model(family, task), CONFIG)))
    assert capsys.readouterr().out.count("PEFT's adapters") == 1
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # In the folder lie the base model, packed, for anyone, and the adapters for PEFT.
    folder = tmp_path / "quantized"
    found = verify_quantized(folder, model)
    # The packed format has no place for the transposed weights of Conv1D.
    stored = "dense" if family == "GPT-2" else "packed"
    assert {layer.stored for layer in found.layers.values()} == {stored} and len(found.layers) == len(layers)
    inputs = inputs_of(task, model)
    with model.disable_adapter():
        assert stranger.load(folder, model.get_base_model(), inputs)["equal"]
    check_adapter(model, folder, task)


def check_adapter(model: Any, folder: Path, task: str = TASK, name: str = "") -> None:
    """The adapters on the loaded base model compute the same; its first forward pass unpacks it, which PEFT needs."""
    peft = pytest.importorskip("peft")
    base, inputs = type(model.get_base_model()).from_pretrained(folder), inputs_of(task, model)
    outputs_of(base, inputs)
    assert equal(peft.PeftModel.from_pretrained(base, folder / "adapter" / name), model, inputs)


def stir(model: nn.Module) -> None:
    """Give adapters something to say, which they have not at first."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)


@from_peft
def test_merging_is_refused_until_the_layers_are_float(tmp_path: Path) -> None:
    model = adapted("BERT", TASK, ["query"])
    stir(model)
    quantize_model(model, CONFIG)
    inputs = inputs_of(TASK, model)
    expected = outputs_of(model, inputs)
    for merge in (model.merge_adapter, copy.deepcopy(model).merge_and_unload):
        with pytest.raises(MoQError, match=r"call moq_hf\.dequantize_model\(model\) first"):
            merge()
    assert all([torch.equal(a, b) for a, b in zip(outputs_of(model, inputs), expected, strict=True)])
    dequantize_model(model)
    assert all([torch.equal(a, b) for a, b in zip(outputs_of(model, inputs), expected, strict=True)])
    merged = model.merge_and_unload()
    assert type(merged) is hf.BertForSequenceClassification
    torch.testing.assert_close(outputs_of(merged, inputs), expected)


class Named(nn.Module):
    """Has a part of the name that PEFT uses, and is none of PEFT's."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.beside = nn.Linear(8, 8)


def test_a_name_alone_makes_no_adapter() -> None:
    model = quantize_model(nn.Sequential(Named(), nn.Linear(8, 2)), CONFIG)
    assert list(quant_layers(model)) == ["0.base_layer", "0.beside"]
    assert not hasattr(model[0], "merge")


@from_peft
def test_copies_to_be_trained_stay_float(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    names = ["pooler", "word_embeddings", "classifier"]
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], modules_to_save=names)
    model = peft.get_peft_model(new_model("BERT", TASK), lora)
    trained(model, tmp_path, config={**CONFIG, "quantize_embeddings": 8})
    quantized = [*quant_layers(model), *quant_embeddings(model)]
    assert not any("modules_to_save" in name for name in quantized)
    # PEFT asks for the weights as soon as it is given the model, so that they are unpacked while loading.
    check_adapter(model, tmp_path / "quantized")


@from_peft
def test_adapters_of_a_quantized_table_leave_it_to_the_base(tmp_path: Path) -> None:
    model = adapted("BERT", TASK, ["query", "word_embeddings"])
    stir(model)
    folder = trained(model, tmp_path, config={**CONFIG, "quantize_embeddings": 8}).delivered.path
    assert not any("base_layer" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))
    check_adapter(model, folder)


@from_peft
def test_the_active_adapter_is_the_one_that_is_proven(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted("BERT", TASK, ["query"])
    model.add_adapter("second", peft.LoraConfig(task_type="SEQ_CLS", target_modules=["value"], r=2))
    stir(model)
    model.set_adapter("second")
    delivered = trained(model, tmp_path).delivered
    assert 'subfolder="adapter/second"' in delivered.how_to_load
    check_adapter(model, delivered.path, name="second")


STARTS = ["pissa", "pissa_niter_4", "olora", "orthogonal", "gaussian", "mica"]


def started(start: str, family: str = "Llama") -> Any:
    """A model whose adapters, and for some also the base, PEFT has begun with."""
    peft = pytest.importorskip("peft")
    targets = ["c_attn"] if family == "GPT-2" else ["q_proj", "v_proj"]
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, r=4, init_lora_weights=start, fan_in_fan_out=family == "GPT-2"
    )
    model = new_model(family, "causal LM")
    model.name_or_path = "someone/model"
    return peft.get_peft_model(model, lora)


@from_peft
@pytest.mark.filterwarnings("ignore:Could not find a config file in someone/model")
@pytest.mark.parametrize(
    ("family", "start"),
    long_but_for(
        {("Llama", "pissa"), ("Llama", "gaussian"), ("GPT-2", "pissa")},
        [*(("Llama", start) for start in STARTS), ("GPT-2", "pissa")],
    ),
)
def test_a_delivered_adapter_does_not_start_again(family: str, start: str, tmp_path: Path) -> None:
    model = started(start, family)
    takes = not equal(new_model(family, "causal LM"), model.unload(), inputs_of("causal LM", model))
    assert takes == start.startswith(("pissa", "olora"))
    model = started(start, family)
    folder = trained(model, tmp_path, "causal LM", save_strategy="steps", save_steps=3).delivered.path
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["init_lora_weights"] is True and start not in json.dumps(config)
    # On another base than the delivered one the adapter would be wrong then.
    assert config["base_model_name_or_path"] == (None if takes else "someone/model")
    assert model.peft_config["default"].init_lora_weights == start
    check_adapter(model, folder, "causal LM")
    # A resumed run starts again with the user's own base, and goes on with the adapter of the checkpoint.
    again = started(start, family)
    rows, callbacks = rows_of("causal LM"), [MoQCallback(CONFIG)]
    trainer = hf.Trainer(again, arguments(tmp_path / "again"), train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


@from_peft
def test_several_adapters_that_took_parts_of_one_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = started("pissa")
    second = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, init_lora_weights="olora")
    model.add_adapter("second", second)
    folder = trained(model, tmp_path, "causal LM").delivered.path
    for name, place in (("default", ""), ("second", "second")):
        model.set_adapter(name)
        check_adapter(model, folder, "causal LM", place)


def test_no_setting_of_a_start_is_left() -> None:
    """As of LoftQ, which wants bitsandbytes, and of LoRA-GA, which wants gradients, to start with."""
    peft = pytest.importorskip("peft")
    settings = {"loftq_config": {"loftq_bits": 4}, "corda_config": {}, "eva_config": {}, "lora_ga_config": {}, "r": 2}
    config = without_start({"peft_type": "LORA", "init_lora_weights": "loftq", **settings})
    assert config == {"peft_type": "LORA", "init_lora_weights": True, "r": 2}
    assert without_start({"peft_type": "HIRA", "init_weights": "gaussian"})["init_weights"] is True
    # Of MiSS it is the form.
    assert without_start({"peft_type": "MISS", "init_weights": "bat"})["init_weights"] == "bat"
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "one", "tokenizer_name_or_path": "/home/me"}
    config = json.loads(json.dumps(without_start({"peft_type": "PROMPT_TUNING", **text})))
    assert [config[key] for key in text] == ["RANDOM", None, None]
    for name in ("loftq", "lora_ga", "corda"):
        adapter = SimpleNamespace(init_lora_weights=name)
        model = SimpleNamespace(peft_config={"one": peft.IA3Config(), "two": adapter})
        assert start_in_base(model) == name


@from_peft
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("tuner", "settings"), [("OSF", {}), ("Psoft", {"r": 4}), ("Adamss", {}), ("Frod", {})])
def test_adapters_of_factors_of_the_weight_are_refused(tuner: str, settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    lora = getattr(peft, f"{tuner}Config")(target_modules=["q_proj", "v_proj"], **settings)

    def made() -> Any:
        return peft.get_peft_model(new_model("Llama", "causal LM"), copy.deepcopy(lora))

    told = rf"{tuner.lower()} recomputes its adapters from the weights .*q_proj\.base_layer"
    with pytest.raises(MoQError, match=told):
        quantize_model(made(), CONFIG)
    quantize_model(made(), {**CONFIG, "modules_to_not_convert": ["q_proj", "v_proj"]})


def test_a_module_in_two_places_is_delivered_quantized_in_both(tmp_path: Path) -> None:
    model = new_model("BERT", TASK)
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    hf.Trainer(model, arguments(tmp_path), train_dataset=rows_of(TASK), callbacks=[MoQCallback(CONFIG)]).train()
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    for name, layer in quant_layers(model).items():
        for place in (name, name.replace("layer.0", "layer.1")):
            assert torch.equal(tensors[f"{place}.weight"], layer.quantized_weight())


def test_a_file_where_the_model_goes_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "quantized").write_text("notes")
    trainer = hf.Trainer(
        new_model("BERT", TASK), arguments(tmp_path), train_dataset=rows_of(TASK), callbacks=[MoQCallback(CONFIG)]
    )
    with pytest.raises(MoQError, match=r"quantized is a file, .* take another output_dir"):
        trainer.train()
    assert trainer.state.global_step == 0


@from_peft
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_dora": True}, r"DoRA on quantized layers .*layer\.\*\.attention\.self\.query\.base_layer"),
        (
            {"trainable_token_indices": [1, 2]},
            r"PEFT: trainable_token_indices \(.*word_embeddings\).* in modules_to_save",
        ),
    ],
)
def test_adapters_that_quantized_layers_cannot_have_are_refused(settings: dict[str, Any], told: str) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], **settings)
    with pytest.raises(MoQError, match=told):
        quantize_model(peft.get_peft_model(new_model("BERT", TASK), lora), CONFIG)


@from_peft
def test_dora_on_layers_that_stay_float_is_fine() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], use_dora=True)
    model = peft.get_peft_model(new_model("BERT", TASK), lora)
    quantize_model(model, {**CONFIG, "modules_to_not_convert": ["query", "classifier"]})
    assert len(quant_layers(model)) == 11


@from_peft
@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        ("GPT-2", "IA3Config", {"target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True}),
        ("GPT-2", "PromptTuningConfig", {"num_virtual_tokens": 4}),
        ("Llama", "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
        ("Llama", "OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 8}),
        ("Llama", "MissConfig", {"target_modules": ["q_proj"], "r": 4, "init_weights": "bat"}),
    ],
)
def test_other_adapters(family: str, kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    task = "causal LM"
    model = peft.get_peft_model(new_model(family, task), getattr(peft, kind)(task_type="CAUSAL_LM", **settings))
    folder = trained(model, tmp_path, task).delivered.path
    assert bits_of(model) == TARGET
    check_adapter(model, folder, task)


@from_peft
def test_a_moq_trainer_saves_the_base_and_the_adapters(tmp_path: Path) -> None:
    model = adapted("BERT", TASK, "all-linear")
    trainer = MoQTrainer(model, arguments(tmp_path), train_dataset=rows_of(TASK), moq_config=CONFIG)
    trainer.train()
    trainer.save_model()
    check_adapter(model, tmp_path)


@from_peft
def test_adapters_that_transformers_added_are_not_packed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = new_model("BERT", TASK)
    model.add_adapter(peft.LoraConfig(target_modules=["query"], r=4))
    quantize_model(model, CONFIG)
    assert not any("lora_" in name for name in quant_layers(model))
    with pytest.raises(MoQError, match=r"use peft\.get_peft_model"):
        save_quantized(model, tmp_path / "packed")


def tokenizer() -> hf.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(57))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = dict.fromkeys(["eos_token", "cls_token", "sep_token"], "<eos>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", **marks)


SENTENCES = [" ".join(f"w{first * word % 57}" for word in range(8)) for first in range(1, 17)]
# Smoke tests of libraries that come with warnings of their own.
noisy = pytest.mark.filterwarnings("ignore")


@noisy
@pytest.mark.parametrize("lora_is", ["beside", "merged"])
def test_sft_of_trl(lora_is: str, tmp_path: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LoRA it is the example in examples/sft."""
    trl = pytest.importorskip("trl")
    lora = pytest.importorskip("peft").LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trl.SFTTrainer(
        new_model("Llama", "causal LM"),
        args=arguments(
            tmp_path, trl.SFTConfig, max_length=16, bf16=False, report_to="tensorboard", logging_steps=STEPS
        ),
        train_dataset=Dataset.from_list([{"text": sentence} for sentence in SENTENCES]),
        processing_class=tokenizer(),
        peft_config=lora,
        callbacks=[MoQCallback({**CONFIG, "lora": "merged" if lora_is == "merged" else None})],
    )
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert events.Scalars("train/moq/bits")[-1].value == min(TARGET)
    # Blocks are named as without PEFT.
    assert "train/moq/bits/model.layers.0" in events.Tags()["scalars"]
    # TRL takes the mean of its own metrics from log to log, to which a drop is none.
    assert len(events.Scalars("train/mean_token_accuracy")) == len(events.Scalars("train/loss")) == 1
    model = trainer.model
    assert bits_of(model) == TARGET and len(quant_layers(model)) == 14
    folder, inputs = tmp_path / "quantized", inputs_of("causal LM", model)
    state = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    assert (state["layout"], state["proof"]["agrees"]) == ("unpacked" if lora_is == "beside" else "packed", True)
    if lora_is == "beside":
        check_adapter(model, folder, "causal LM")
    else:
        assert stranger.load(folder, model.get_base_model(), inputs)["equal"]


@noisy
def test_sft_of_trl_loads_the_model_quantized(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    new_model("Llama", "causal LM").save_pretrained(tmp_path / "base")
    config, found = MoQConfig(bits=4, rounding="stochastic"), []
    for kwargs, callbacks in (({"quantization_config": config}, []), ({}, [MoQCallback(config)])):
        settings = {"max_length": 16, "bf16": False, "gradient_accumulation_steps": 2}
        args = arguments(tmp_path, trl.SFTConfig, model_init_kwargs=kwargs, **settings)
        trainer = trl.SFTTrainer(
            str(tmp_path / "base"),
            args=args,
            train_dataset=Dataset.from_list([{"text": sentence} for sentence in SENTENCES]),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        trainer.train()
        assert len(quant_layers(trainer.model)) == 14
        found.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *found))


def sentence_model(folder: Path) -> Any:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Pooling, Transformer

    hf.set_seed(0)
    hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return library.SentenceTransformer(modules=[Transformer(str(folder), max_seq_length=16), Pooling(32)], device="cpu")


@noisy
def test_setfit(tmp_path: Path) -> None:
    setfit = pytest.importorskip("setfit")
    head = pytest.importorskip("sklearn.linear_model").LogisticRegression()
    model = setfit.SetFitModel(model_body=sentence_model(tmp_path / "body"), model_head=head)
    trainer = setfit.Trainer(
        model=model,
        args=setfit.TrainingArguments(output_dir=str(tmp_path), batch_size=4, max_steps=STEPS, report_to="none"),
        train_dataset=Dataset.from_dict({"text": SENTENCES, "label": [index % 2 for index in range(16)]}),
        callbacks=[MoQCallback(CONFIG)],
    )
    trainer.train()
    assert bits_of(model.model_body) == TARGET
    body = model.model_body[0].auto_model
    save_quantized(body, tmp_path / "packed")
    assert equal(hf.AutoModel.from_pretrained(tmp_path / "packed"), body, inputs_of(TASK, body))


@noisy
def test_a_reference_that_is_asked_when_the_model_is_quantized(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = [{"prompt": "one", "chosen": " two" * count, "rejected": " three" * count} for count in range(1, 9)]

    def callback(offset: int) -> MoQCallback:
        return MoQCallback({**CONFIG, "quantize_schedule": {"quantize_period": 1, "schedule_offset": offset}})

    def trainer(*callbacks: MoQCallback, **settings: Any) -> Any:
        return trl.DPOTrainer(
            new_model("Llama", "causal LM"),
            args=arguments(tmp_path, trl.DPOConfig, bf16=False, precompute_ref_log_probs=True),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[*callbacks],
            **settings,
        )

    with pytest.raises(MoQError, match=r"precompute_ref_log_probs: .* give the trainer a ref_model"):
        trainer(callback(0)).train()
    late = trainer()
    late.add_callback(callback(0))
    for fine in (trainer(callback(0), ref_model=new_model("Llama", "causal LM")), trainer(callback(1)), late):
        fine.train()
        assert fine.state.global_step > 0
