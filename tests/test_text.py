"""What in a log is a metric, in the card as in the report."""

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
