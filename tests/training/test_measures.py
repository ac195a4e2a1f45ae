"""What rounding costs: compared with NumPy, with the model itself quantized, and with the rule in words."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertForSequenceClassification

from moq_hf import MoQConfig, quantize_model
from moq_hf.grid import Grid, PerChannel
from moq_hf.quantizer import Draw
from moq_hf.training.choice import _falling
from moq_hf.training.controller import MoQController
from moq_hf.training.measures import ROUND, Weight, at_bits, loss_rises, predicted, squared_changes, work
from moq_hf.training.measuring import measuring
from moq_hf.training.sensitivity import _places


@given(st.integers(2, 8), st.integers(0, 5))
def test_the_squared_change_is_that_of_the_grid(bits: int, seed: int) -> None:
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    weight = Weight(values, "linear", Grid(PerChannel(), search="absmax", full=True), Draw(), False)
    found = squared_changes({"a": weight}, {"unit": ["a"]}, {"unit": [bits]})["unit"][bits]
    x = values.double().numpy()
    extreme = x[numpy.arange(3), numpy.abs(x).argmax(1)][:, None]
    scale = -extreme / 2 ** (bits - 1)
    codes = numpy.clip(numpy.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert found == pytest.approx(((codes * scale - x) ** 2).sum(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("groups", [{"quantize_groups": "per_channel"}, {"quantize_group_size": 16}])
def test_a_rise_of_the_loss_is_that_of_the_quantized_model(
    groups: dict[str, Any], tiny_bert: BertForSequenceClassification, tiny_batch: dict[str, torch.Tensor]
) -> None:
    tiny_bert.eval()
    with torch.no_grad():
        for parameter in tiny_bert.parameters():
            parameter.mul_(4)
        before = float(tiny_bert(**tiny_batch).loss)
    config = MoQConfig.from_dict({"quantize_bits": {"start_bits": 8, "target_bits": 3}, **groups})
    controller = MoQController(tiny_bert, config, 300)
    unit = ["bert.encoder.layer.1.intermediate.dense", "bert.encoder.layer.1.output.dense"]
    weights = {name: Weight.of(controller.layers[name]) for name in unit}
    parameters = {name: [controller.layers[name].float_weight] for name in unit}
    losses = [lambda: tiny_bert(**tiny_batch).loss]
    with measuring(tiny_bert, parameters) as stand_ins:  # type: ignore[arg-type]

        def at(names: Sequence[str], bits: int) -> contextlib.AbstractContextManager[None]:
            return at_bits(bits, {name: stand_ins[name] for name in names}, weights)

        found = loss_rises(losses, at, {"unit": unit}, {"unit": [2, 3, 8]})["unit"]
        again = loss_rises(losses, at, {"unit": unit}, {"unit": [8, 3, 2]})["unit"]
    assert again == found
    others = [name for name in controller.layers if name not in unit]
    for bits, rise in found.items():
        left = {"modules_to_not_convert": [*others, "classifier"]}
        quantize_model(tiny_bert, {"quantize_bits": {"start_bits": bits, "target_bits": bits}, **groups, **left})
        with torch.no_grad():
            assert max(0.0, float(tiny_bert.eval()(**tiny_batch).loss) - before) == pytest.approx(rise, abs=1e-6)
    assert max(found.values()) > 1e-4


def test_a_divergence_is_that_of_the_quantized_model(
    tiny_bert: BertForSequenceClassification, tiny_batch: dict[str, torch.Tensor]
) -> None:
    """By SciPy's relative entropy, over two batches of unequal size."""
    tiny_bert.eval()
    with torch.no_grad():
        for parameter in tiny_bert.parameters():
            parameter.mul_(4)
        before = tiny_bert(**tiny_batch).logits.softmax(-1).double().numpy()
    config = MoQConfig.from_dict(
        {"quantize_bits": {"start_bits": 2, "target_bits": {"mean": 3.0}}, "quantize_groups": "per_channel"}
    )
    assert config.measure == "divergence"
    controller = MoQController(tiny_bert, config, 300)
    sensitivity = controller.sensitivity
    assert sensitivity is not None
    for part in (slice(0, 1), slice(1, None)):
        sensitivity.samples.add({name: value[part] for name, value in tiny_batch.items()})
    sensitivity.samples.end_step()
    found = sensitivity.costs(1, [2, 3])
    assert [unit for unit, own in found.items() if own[2] <= own[3]] == []
    unit, own = next((unit, own) for unit, own in found.items() if "layer.1" in unit)
    others = [name for name in controller.layers if name not in controller.blocks[unit]]
    for bits, divergence in own.items():
        bare = {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_groups": "per_channel"}
        quantize_model(tiny_bert, {**bare, "modules_to_not_convert": [*others, "classifier"]})
        with torch.no_grad():
            after = tiny_bert.eval()(**tiny_batch).logits.softmax(-1).double().numpy()
        expected = scipy.stats.entropy(before, after, axis=1).mean()
        assert divergence == pytest.approx(expected, rel=1e-3) and expected > 1e-6


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 60), st.booleans(), st.integers(0, 9))
def test_answers_that_are_compared_have_a_label_and_room(
    batch: int, tokens: int, size: int, labeled: bool, seed: int
) -> None:
    logits = torch.zeros(batch, tokens, 7)
    labels = torch.randint(-1, 2, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    labels[labels == -1] = -100
    found = _places(logits, labels if labeled else None, size).tolist()
    kept = [i for i, label in enumerate(labels.flatten().tolist()) if label != -100] if labeled else []
    kept = kept or list(range(batch * tokens))
    # Whole where they fit, else as many as do, or every second one of a few more.
    room = max(1, size // 7)
    assert found == (kept if len(kept) <= room else kept[:: -(-len(kept) // room)])
    assert room / 2 <= len(found) <= room or found == kept


@pytest.mark.parametrize("before", [math.inf, math.nan])
def test_no_rise_is_finite_where_the_loss_is_not(before: float) -> None:
    losses = iter([before, 1.0, 2.0])
    found = loss_rises(
        [lambda: torch.tensor(next(losses))], lambda names, bits: contextlib.nullcontext(), {"a": ["a"]}, {"a": [2, 4]}
    )
    assert not any(map(math.isfinite, found["a"].values()))


def test_what_is_not_finite_counts_as_the_largest_and_nothing_is_below_zero() -> None:
    changes = {"a": {2: 1.0}, "b": {2: 4.0}, "c": {2: 1.0}}
    assert predicted({"a": 3.0, "b": -2.0, "c": math.inf}, changes) == {"a": {2: 1.5}, "b": {2: 0.0}, "c": {2: 1.5}}
    assert predicted(dict.fromkeys("abc", math.nan), changes)["b"] == {2: 2.0}


@given(st.dictionaries(st.integers(1, 8), st.floats(0, 10), min_size=1))
def test_more_bits_never_cost_more(costs: dict[int, float]) -> None:
    found = _falling(costs)
    ordered = [found[bits] for bits in sorted(found)]
    assert ordered == sorted(ordered, reverse=True)
    # The least that does it: each is its own cost, or that of more bits.
    assert all(found[bits] == max(costs[b] for b in costs if b >= bits) for bits in costs)


def test_work_is_counted_by_what_is_done() -> None:
    how: dict[str, Any] = {"rows": 10, "one_batch": True, "products": 8, "blocks": 5, "finite_difference": False}
    trace, eigenvalue, loss = (work(m, levels=20, **how) for m in ("trace", "eigenvalue", "loss"))  # type: ignore[arg-type]
    assert eigenvalue == 10 * (1 + 0.6 * 8 * 5)
    assert trace == 10 * 8 * (4.4 + 1 / ROUND)
    assert loss == 10 * 0.4 * 21
