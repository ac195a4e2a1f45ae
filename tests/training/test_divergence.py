"""What rounding a block costs: compared with NumPy and with the model itself quantized."""

import math
from typing import Any

import numpy
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertForSequenceClassification

from moq_hf import MoQConfig, block_eigenvalues, quantize_model
from moq_hf.schedule import FLOAT_BITS
from moq_hf.training.budget import _falling
from moq_hf.training.controller import MoQController
from moq_hf.training.measures import compared_rows, finite_costs
from moq_hf.training.measuring import measuring

BUDGET = {"quantize_bits": {"start_bits": 2, "target_bits": {"mean": 3.0}}, "quantize_groups": "per_channel"}


def test_a_divergence_is_that_of_the_quantized_model(
    tiny_bert: BertForSequenceClassification, tiny_batch: dict[str, torch.Tensor]
) -> None:
    """By SciPy's relative entropy, over two batches of unequal size."""
    tiny_bert.eval()
    with torch.no_grad():
        for parameter in tiny_bert.parameters():
            parameter.mul_(4)
        before = tiny_bert(**tiny_batch).logits.softmax(-1).double().numpy()
    config = MoQConfig.from_dict(BUDGET)
    assert config.measure == "divergence"
    controller = MoQController(tiny_bert, config, 300)
    sensitivity = controller.sensitivity
    for part in (slice(0, 1), slice(1, None)):
        sensitivity.samples.add({name: value[part] for name, value in tiny_batch.items()})
    found = sensitivity.costs([2, 3])
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
    found = compared_rows(logits, labels if labeled else None, size).tolist()
    kept = [i for i, label in enumerate(labels.flatten().tolist()) if label != -100] if labeled else []
    kept = kept or list(range(batch * tokens))
    # Whole where they fit, else as many as do, or every second one of a few more.
    room = max(1, size // 7)
    assert found == (kept if len(kept) <= room else kept[:: -(-len(kept) // room)])
    assert room / 2 <= len(found) <= room or found == kept


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_a_predicted_cost_is_an_eigenvalue_times_the_squared_change(bits: int, tiny_bert: Any, tiny_batch: Any) -> None:
    """The change by NumPy, for a symmetric grid of the full range."""
    config = {**BUDGET, "quantize_algo": {"scale": "absmax", "range": "full"}}
    controller = MoQController(
        tiny_bert, MoQConfig.from_dict({**config, "sensitivity": {"measure": "eigenvalue"}}), 300
    )
    sensitivity = controller.sensitivity
    sensitivity.samples.add(tiny_batch)
    found = sensitivity.costs([bits])["bert.pooler.dense"][bits]
    with measuring(tiny_bert, sensitivity.blocks) as blocks:
        value = block_eigenvalues(lambda: tiny_bert(**tiny_batch).loss, blocks)["bert.pooler.dense"].value
    x = tiny_bert.bert.pooler.dense.weight.detach().double().numpy()
    extreme = x[numpy.arange(len(x)), numpy.abs(x).argmax(1)][:, None]
    scale = -extreme / 2 ** (bits - 1)
    codes = numpy.clip(numpy.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert found == pytest.approx(abs(value) * ((codes * scale - x) ** 2).sum() / 2, rel=1e-3)
    assert {layer.moq.bits for layer in controller.layers.values()} == {FLOAT_BITS}


def test_what_is_not_finite_counts_as_the_largest(
    tiny_bert: Any, tiny_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensitivity = MoQController(tiny_bert, MoQConfig.from_dict(BUDGET), 300).sensitivity
    sensitivity.samples.add(tiny_batch)
    found = {"a": {2: math.nan}, "b": {2: 4.0}}
    monkeypatch.setattr(sensitivity.measure, "costs", lambda *_: found)
    assert sensitivity.costs([2]) == {"a": {2: 4.0}, "b": {2: 4.0}}
    assert finite_costs({"a": {2: math.nan}}) == {"a": {2: 1.0}}


@given(st.dictionaries(st.integers(1, 8), st.floats(0, 10), min_size=1))
def test_more_bits_never_cost_more(costs: dict[int, float]) -> None:
    found = _falling(costs)
    ordered = [found[bits] for bits in sorted(found)]
    assert ordered == sorted(ordered, reverse=True)
    # The least that does it: each is its own cost, or that of more bits.
    assert all(found[bits] == max(costs[b] for b in costs if b >= bits) for bits in costs)
