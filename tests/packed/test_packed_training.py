"""What a training run leaves behind: the packed model of the right step, with its history, metrics and card."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from repo import ROOT
from tables import quant_embeddings
from tiny_runs import ARRIVAL, CONFIG, Stop, arguments, assert_same, moq, new_model, rows, stock, trained, weights
from transformers import AutoTokenizer, BertForSequenceClassification, DataCollatorWithPadding, Trainer

from moq_hf import MoQCallback, MoQConfig, MoQTrainer, quantize_model, verify_quantized
from moq_hf.callback import last_metrics
from moq_hf.packed.card import write_card
from moq_hf.packed.state import STATE_NAME, record_metrics

IDS = torch.arange(5, 26).view(3, 7)
EMBEDDINGS = {**CONFIG, "quantize_embeddings": 8}
BEST: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True,
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(IDS).logits
    return result


def loaded(folder: Path) -> BertForSequenceClassification:
    return BertForSequenceClassification.from_pretrained(folder)


@pytest.mark.parametrize("make", [stock, moq])
def test_the_packed_model_is_that_of_the_best_checkpoint_with_its_tokenizer(make: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    # Scores fall: the best of the candidates is the first one at the target, at step 10 of 16.
    scores = iter([9, 8, 7, 6, 5, 4, 3, 2])
    data = {"train_dataset": rows(), "eval_dataset": rows(8), "compute_metrics": lambda p: {"score": next(scores)}}
    if make is stock:
        data |= {"processing_class": tokenizer, "callbacks": [MoQCallback(EMBEDDINGS)]}
        trainer = Trainer(new_model(), arguments(tmp_path, **BEST), **data)
    else:
        # It finds the tokenizer in the collator.
        data |= {"data_collator": DataCollatorWithPadding(tokenizer), "moq_config": EMBEDDINGS}
        trainer = MoQTrainer(new_model(), arguments(tmp_path, **BEST), **data)
    trainer.train()
    folder = tmp_path / "quantized"
    trainer.save_model()
    for place in (tmp_path, folder):
        assert AutoTokenizer.from_pretrained(place).get_vocab() == tokenizer.get_vocab()
    if make is moq:
        trainer.save_model(str(tmp_path / "final"))
        assert_same_files(folder, tmp_path / "final")
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{ARRIVAL}")
    assert torch.equal(logits(loaded(folder)), logits(trainer.model))
    state = verify_quantized(folder, trainer.model).state
    assert state["step"] == ARRIVAL and state["metrics"]["eval_score"] == 5 and state["versions"]["transformers"]
    assert {layer["bits"] for layer in state["layers"].values() if layer["kind"] == "linear"} == {3}
    saved = BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{ARRIVAL}")
    assert_same(weights(trainer), {name: p.detach() for name, p in saved.named_parameters()})
    steps = [(switch["step"], switch["before"], switch["bits"]) for switch in state["history"]]
    assert sorted(set(steps)) == [(2, 32, 6), (4, 6, 5), (6, 5, 4), (10, 4, 3)]


def trained_from(trainer: Any, checkpoint: Path) -> Any:
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def assert_same_files(folder: Path, other: Path) -> None:
    """Two deliveries of one model: the same weights and the same way to load them."""
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_checkpoints_stay_float_and_what_a_restored_callback_delivers_is_packed(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "restore_callback_states_from_checkpoint": True}
    trained(moq(tmp_path, callbacks=[Stop(5)], **settings))
    kept = tmp_path / "checkpoint-5"
    trainer = trained_from(moq(tmp_path, **settings), kept)
    # A second time over the first.
    for _ in range(2):
        trainer.save_model()
        assert_same_files(tmp_path / "quantized", tmp_path)
        assert {"config.json", "model.safetensors", STATE_NAME, "training_args.bin"} <= {
            path.name for path in tmp_path.iterdir()
        }
        verify_quantized(tmp_path, trainer.model)
    assert "quantization_config" in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(loaded(tmp_path)), logits(trainer.model))
    assert "quantization_config" not in (kept / "config.json").read_text() and not (kept / STATE_NAME).exists()


def test_before_the_offset_the_float_model_is_saved(tmp_path: Path) -> None:
    trainer = moq(tmp_path)
    trainer.save_model(str(tmp_path / "early"))
    assert not (tmp_path / "early" / STATE_NAME).exists()
    saved = loaded(tmp_path / "early")
    assert_same(weights(trainer), {name: p.detach() for name, p in saved.named_parameters()})


def test_layers_quantized_before_a_float_run_are_saved_packed(tmp_path: Path) -> None:
    model = quantize_model(new_model(), {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    trainer = trained(MoQTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows()))
    trainer.save_model()
    trainer.create_model_card()
    assert torch.equal(logits(loaded(tmp_path)), logits(model))
    assert "Bits per layer" in (tmp_path / "README.md").read_text()


def test_a_run_that_ends_early_packs_the_bits_it_has_and_its_card_says_what_was_trained(tmp_path: Path) -> None:
    trainer = trained(stock(tmp_path, max_steps=5, learning_rate=0.003, warmup_steps=0.4))
    folder = tmp_path / "quantized"
    found = verify_quantized(folder, trainer.model)
    assert {layer.bits for layer in found.layers.values()} == {5}
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert "- learning_rate: 0.003" in card.text and "- optimizer: adamw" in card.text
    # The steps once, as whole numbers.
    assert "- optimizer steps: 5\n" in card.text and "training_steps" not in card.text
    assert "- lr_scheduler_warmup_steps: 2\n" in card.text
    assert re.search(r"\d before \(\d+\.\d % of float\); ", card.text)
    # Only the keys that were changed; the bits always.
    written = json.loads(card.text.split("```json\n")[1].split("```")[0])
    config = MoQConfig.from_dict(CONFIG)
    assert written == config.changed() and MoQConfig.from_dict(written) == config
    assert "seed" not in written and "bits" in written
    text = write_card(folder).read_text()
    # Of a folder alone nothing is known of the data: the metadata must not claim a result.
    assert ModelCard(text).data.eval_results is None and "model-index" not in text.split("---")[1]
    assert 'from_pretrained("path/to/this/folder")' in text


def test_embedding_tables_are_quantized_from_the_offset_on(tmp_path: Path) -> None:
    seen = []

    class Watch(Stop):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append({table.moq.bits for table in quant_embeddings(model).values()})

    trainer = moq(tmp_path, EMBEDDINGS, callbacks=[Watch(99)], save_strategy="steps", save_steps=5, bf16=True)
    trainer.train()
    assert seen == [{32}] * 2 + [{8}] * 14
    tables = quant_embeddings(trainer.model)
    assert len(tables) == 3 and {table.quantized_weight().dtype for table in tables.values()} == {torch.float32}
    table = tables["bert.embeddings.word_embeddings"]
    assert len(table.quantized_weight()[7].unique()) <= 255
    # Tokens outside of the data keep the rows that they began with; those in it were trained.
    start = new_model().bert.embeddings.word_embeddings.weight
    assert torch.equal(table.float_weight[2], start[2]) and not torch.equal(table.float_weight[7], start[7])
    resumed = trained_from(moq(tmp_path, EMBEDDINGS, bf16=True), tmp_path / "checkpoint-5")
    assert_same(weights(resumed), weights(trainer))


def test_the_card_tells_metrics_sizes_bits_and_how_to_load(tmp_path: Path) -> None:
    trainer = moq(tmp_path / "tiny", EMBEDDINGS)
    trainer.eval_dataset = rows(8)
    trainer.compute_metrics = lambda p: {"accuracy": 0.75, "odd": float("nan")}
    trainer.float_metrics = {"eval_accuracy": 0.8, "eval_runtime": 1.0}
    trainer.train()
    trainer.save_model()
    trainer.evaluate()
    trainer.create_model_card(
        tasks="text-classification", dataset_tags="nyu-mll/glue", dataset="GLUE MRPC", dataset_args="mrpc",
        finetuned_from="bert-base-cased", language="en", license="apache-2.0",
    )  # fmt: skip
    text = (tmp_path / "tiny" / "README.md").read_text()
    card = ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.dataset_config, result.metric_type) == ("nyu-mll/glue", "mrpc", "accuracy")
    assert result.metric_value == 0.75 and card.data.base_model == "bert-base-cased"
    assert card.data.pipeline_tag == "text-classification" and card.data.license == "apache-2.0"
    assert "| accuracy | 0.8000 | 0.7500 | -0.0500 |" in text and "runtime" not in text and "odd" not in text
    assert "from transformers import BertForSequenceClassification" in text
    assert "BertForSequenceClassification.from_pretrained(" in text
    assert "| bert.encoder.layer.0.attention.self.query | 3 | packed | " in text
    assert "learning_rate: 0.01" in text and '"embeddings": 8' in text and str(tmp_path) not in text
    assert verify_quantized(tmp_path / "tiny").state["metrics"]["eval_odd"] is None
    record_metrics(tmp_path / "tiny", {"matrix": torch.ones(2), "count": 3, "score": torch.tensor(0.5), "no": None})
    recorded = verify_quantized(tmp_path / "tiny").state
    assert recorded["metrics"] == {"matrix": "tensor([1., 1.])", "count": 3, "score": 0.5, "no": None}
    assert recorded["float_metrics"]["eval_accuracy"] == 0.8


def test_the_metrics_are_those_of_the_last_evaluation_or_of_the_best_model() -> None:
    log: list[dict[str, Any]] = [{"loss": 1.0, "step": 1}]
    assert last_metrics(log) == {}
    log += [{"eval_a": 1.0, "step": 2}, {"eval_a": 2.0, "step": 4}]
    assert last_metrics(log)["eval_a"] == 2.0
    # The Trainer logs each of several data sets by itself.
    log.append({"eval_b": 3.0, "step": 4})
    assert last_metrics(log) == {"eval_a": 2.0, "eval_b": 3.0, "step": 4}
    assert last_metrics(log, 2) == {"eval_a": 1.0, "step": 2}
    assert last_metrics(log, 1) == last_metrics(log, None) == last_metrics(log)
