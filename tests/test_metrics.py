"""What in a log is a metric, in the card as in the report."""

from pathlib import Path

from packed_bert import SHAPE, checkpoint, config_of
from transformers import BertConfig, BertForSequenceClassification

from moq_hf.packed.card import write_card
from moq_hf.packed.state import read_state, record_metrics, write_state
from moq_hf.text import metrics_in

METRICS = "eval_f1 eval_loss f1_mm lead_time eval_lead_time epochs_to_converge eval_steps"
OTHERS = (
    "epoch step total_flos epoch_mm eval_runtime test_runtime train_samples_per_second eval_steps_per_second_mm "
    "eval_samples eval_model_preparation_time"
)


def test_what_is_a_metric_and_what_is_logged_beside_them() -> None:
    assert [name for name in METRICS.split() if not metrics_in({name: 1.0})] == []
    assert not metrics_in(dict.fromkeys(OTHERS.split(), 1.0))


def test_values_are_finite_numbers() -> None:
    logged = {"a": 1, "b": 0.5, "c": float("inf"), "d": 10**400, "e": "0.5", "f": None, "g": True}
    assert metrics_in(logged) == {"a": 1, "b": 0.5}


def test_the_card_has_metrics_alone(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    checkpoint(folder, BertForSequenceClassification(BertConfig(**SHAPE)), config_of())
    write_state(folder, {**read_state(folder), "step": 4})
    record_metrics(folder, {"eval_lead_time": 2.5, "eval_f1": 0.75, "eval_model_preparation_time": 0.125})
    card = write_card(folder).read_text(encoding="utf-8")
    assert "| lead_time | 2.5000 |" in card and "preparation" not in card
