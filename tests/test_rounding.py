"""`quantize_model` with examples: GPTQ, ranges of inputs, the same keywords as everywhere, and what it refuses."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_zoo
import pytest
import torch
from sentences import body
from tiny_runs import new_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BatchEncoding, BertModel

from moq_hf import MoQConfig, MoQError, dequantize_model, quantize_model, save_quantized, verify_quantized
from moq_hf.model.convert import quant_layers
from moq_hf.processes import is_first_process

STATIC = {"activations": True}
Batch = dict[str, Tensor]


def error_of(model: nn.Module, float_model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        return float((model.eval()(**batch).logits - float_model.eval()(**batch).logits).square().mean())


def in_rows(batch: Batch) -> DataLoader[Batch]:
    rows: Any = [{name: tensor[i] for name, tensor in batch.items()} for i in range(8)]
    return DataLoader(rows, batch_size=3)


def lazily(batch: Batch) -> Iterator[Batch]:
    yield from in_rows(batch)


@pytest.mark.parametrize("given", [dict, BatchEncoding, in_rows, lazily])
@pytest.mark.parametrize("trains", [True, False])
def test_gptq_rounds_by_the_examples_that_are_given(
    given: Callable[[Batch], Any], trains: bool, tiny_bert: nn.Module, tiny_batch: Batch
) -> None:
    plain = quantize_model(copy.deepcopy(tiny_bert), "w2")
    model = copy.deepcopy(tiny_bert).requires_grad_(trains)
    random = torch.get_rng_state()
    assert quantize_model(model, "w2", gptq=8, inputs=given(tiny_batch)) is model
    assert torch.equal(torch.get_rng_state(), random) and model.training
    assert error_of(model, tiny_bert, tiny_batch) < 0.5 * error_of(plain, tiny_bert, tiny_batch)
    layers = quant_layers(model)
    start = dict(tiny_bert.named_parameters())
    assert all(not torch.equal(layer.float_weight, start[f"{name}.weight"]) for name, layer in layers.items())
    assert all(parameter.requires_grad is trains for parameter in model.parameters())


def test_layers_that_share_their_inputs_take_one_pass(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    calls: list[object] = []
    tiny_bert.register_forward_pre_hook(lambda *_: calls.append(None))
    quantize_model(tiny_bert, "w2", gptq=8, inputs=tiny_batch)
    blocks = tiny_bert.config.num_hidden_layers
    # Query, key and value together; the output of attention; both products of the feed-forward part. And the pooler,
    # and a first pass that finds faults of the examples; and two that show, of each block but the last, that what is
    # remembered of it is what it would answer.
    assert len(calls) == 4 * blocks + 2 + 2 * (blocks - 1)


def test_in_inference_mode_the_examples_do_the_same(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    other = copy.deepcopy(tiny_bert)
    quantize_model(other, "w4", gptq=8, inputs=tiny_batch, **STATIC)
    with torch.inference_mode():
        quantize_model(tiny_bert, "w4", gptq=8, inputs=tiny_batch, **STATIC)
    assert all(map(torch.equal, tiny_bert.parameters(), other.parameters()))
    for _ in range(2):
        tiny_bert.train()(**tiny_batch).logits.sum().backward()


def test_no_more_examples_are_read_than_the_config_asks_for(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    read = []

    def endless() -> Any:
        while True:
            read.append(tiny_batch)
            yield tiny_batch

    quantize_model(tiny_bert, MoQConfig.load("w4", gptq=9), inputs=endless())
    assert len(read) == 2


@pytest.mark.parametrize("more", [{}, {"gptq": 8}])
def test_static_ranges_are_the_largest_magnitudes_of_the_examples(
    more: dict[str, Any], tiny_bert: nn.Module, tiny_batch: Batch
) -> None:
    quantize_model(tiny_bert, "w8", inputs=in_rows(tiny_batch), **STATIC, **more)
    layers = quant_layers(tiny_bert)
    seen: dict[str, Tensor] = {}
    name = "bert.encoder.layer.0.attention.self.query"
    layers[name].module.register_forward_pre_hook(lambda _, args: seen.update({name: args[0].detach().abs().amax()}))
    ranges = {name: layer.moq.inputs.range.item() for name, layer in layers.items() if layer.moq.inputs is not None}
    tiny_bert.eval()(**tiny_batch)
    assert ranges.keys() == layers.keys() and ranges[name] == pytest.approx(float(seen[name]))
    # Training goes on from them.
    tiny_bert.train()
    assert layers[name].moq.inputs is not None and float(layers[name].moq.inputs.range) == ranges[name]


def test_with_a_window_a_range_is_the_mean_of_the_batches(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    name = "bert.encoder.layer.0.attention.self.query"
    ends = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        ends.append([-float(x.min()), float(x.max())])

    handle = tiny_bert.eval().get_submodule(name).register_forward_pre_hook(note)
    for batch in in_rows(tiny_batch):
        tiny_bert(**batch)
    handle.remove()
    seen = torch.tensor(ends)
    # The embeddings are not rounded.
    quantize_model(tiny_bert, "w8a8", activations={"window": 1000}, embeddings=None, inputs=in_rows(tiny_batch))
    inputs = quant_layers(tiny_bert)[name].moq.inputs
    assert inputs is not None and inputs.range is not None and len(seen) == 3 == int(inputs.steps or 0)
    torch.testing.assert_close(inputs.range, seen.mean(0))


class Called(nn.Module):
    """Two layers with one weight, a layer that is called by keyword, and one that gets nothing at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(100 * self.first(input=x))
        return self.head(torch.cat([self.third(x[x[:, 0] > 1e6]), x]))


def test_ranges_are_those_of_every_call() -> None:
    torch.manual_seed(0)
    model, x = Called(), torch.randn(6, 8)
    largest = float((100 * model.first(x)).detach().abs().max())
    options = {"bits": 8, "activations": True, "modules_to_not_convert": ["third"]}
    inputs = quant_layers(quantize_model(model, options, inputs={"x": x}))["first"].moq.inputs
    assert inputs is not None and float(inputs.range) == pytest.approx(largest, rel=0.02)  # type: ignore[arg-type]
    with pytest.raises(MoQError, match="third got no number other than 0, NaN and Inf"):
        quantize_model(Called(), bits=8, activations=True, inputs={"x": x})


def test_layers_with_scales_of_each_token_need_no_range(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    overrides = {"*.output.dense": {"activations": {"scale": "static"}}}
    quantize_model(tiny_bert, bits=8, activations={"scale": "per_token"}, overrides=overrides, inputs=tiny_batch)
    for name, layer in quant_layers(tiny_bert).items():
        assert layer.moq.inputs is not None
        assert (layer.moq.inputs.range is not None) == name.endswith("output.dense")


def test_keywords_are_those_of_a_config(tiny_bert: nn.Module) -> None:
    quantize_model(tiny_bert, bits=3, group_size=8)
    by_keywords = {name: layer.quantized_weight() for name, layer in quant_layers(tiny_bert).items()}
    dequantize_model(tiny_bert, weights="float")
    quantize_model(tiny_bert, MoQConfig(bits=3, group_size=8))
    assert all(torch.equal(by_keywords[name], x.quantized_weight()) for name, x in quant_layers(tiny_bert).items())
    quantize_model(tiny_bert, "w4", embeddings=None)
    assert {layer.moq.bits for layer in quant_layers(tiny_bert).values()} == {4}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"bits": 4},
            "13 linear layers go to 4 bits; 3 embedding tables to 8 bits; quantized: 92.8 % of the model's 6,034 "
            "parameters; left in float: classifier",
        ),
        (
            {"quantize_bits": {"target_bits": 4}},
            "13 linear layers go to 4 bits; quantized: 72.1 % of the model's 6,034 parameters; left in float: "
            "classifier, and the embedding tables, which are 20.7 % of the parameters "
            "\\(embeddings=8 quantizes them\\)",
        ),
        ({"bits": 4, "start_bits": 12, "embeddings": 8}, "13 linear layers go to 4 bits; 3 embedding tables to 8 bits"),
        # Without ranges, a folder would compute with float inputs.
        ({"bits": 8, **STATIC}, "(.*); the ranges of inputs are not known yet: give inputs=, or train$"),
        ({"enabled": False}, ""),
    ],
)
def test_it_says_what_is_quantized_and_what_stays_in_float(
    config: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_model(new_model(), config)
    out = capsys.readouterr().out
    assert re.match(f"moq_hf: {told}", out, re.MULTILINE) if told else not out
    assert out.count("\n") == bool(told)


def test_scales_too_coarse_for_a_language_model_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """An encoder loses next to nothing there (docs/results), and groups are the remedy."""
    for config, is_told in ({"bits": 4}, True), ({"bits": 8}, False), ("lm-w4", False), ({"format": "mxfp4"}, False):
        quantize_model(model_zoo.new_model("Llama", "causal LM"), config)
        assert ("one scale per channel loses much" in capsys.readouterr().out) == is_told


def test_one_process_says_it_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank, lines in enumerate((1, 0)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert is_first_process() is (rank == 0)
        monkeypatch.setattr("moq_hf.rounding.is_first_process", lambda rank=rank: rank == 0)
        with monkeypatch.context() as alone:
            alone.setattr(torch.distributed, "is_initialized", lambda: False)
            quantize_model(new_model(), "w4")
        assert capsys.readouterr().out.count("moq_hf: ") == lines


WANTED = r'as in tokenizer\(text, return_tensors="pt"\)'
TEXTS = r"inputs are texts, .*: tokenize them, as in inputs=\[tokenizer\(text, truncation=True, "
OTHER = "the model cannot answer them; give a batch as the model's forward pass takes it"
IDS = torch.ones(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "more", "message"),
    [
        (None, {"gptq": 64}, "gptq: GPTQ needs examples: give 64 of them .* as inputs="),
        ({"input_ids": IDS}, {"gptq": 3}, "hold 2 examples, and gptq asks for 3: .* set gptq to 2"),
        ([], {"gptq": 3}, "hold 0 examples, and gptq asks for 3: give as many$"),
        ([], STATIC, "inputs hold no example$"),
        ({"input_ids": IDS}, {}, "inputs: nothing uses them: they are for gptq and for static"),
        ("hi there", {"gptq": 2}, TEXTS),
        (["hi there", "you"], STATIC, TEXTS),
        ([1.0, 2.0], STATIC, f"{WANTED}; got float"),
        (IDS, {"gptq": 2}, f"{WANTED}; got Tensor"),
        (7, {"gptq": 1}, f"{WANTED}; got int"),
        ([(IDS, IDS)], {"gptq": 1}, f"{WANTED}; got tuple"),
        ({"input_ids": [[1, 2]]}, {"gptq": 1}, f"{WANTED}: input_ids is a list"),
        ({"input_ids": [[1, 2]]}, STATIC, f"{WANTED}: input_ids is a list"),
        ({}, {"gptq": 1}, f"{WANTED}: they are empty"),
        (
            {"pixels": IDS},
            {"gptq": 2},
            OTHER,
        ),
        ({"pixels": IDS}, STATIC, OTHER),
    ],
)
def test_wrong_inputs_are_one_error_that_leaves_the_model_as_it_was(
    inputs: Any, more: dict[str, Any], message: str, tiny_bert: nn.Module
) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_bert.state_dict().items()}
    with pytest.raises(MoQError, match=message):
        quantize_model(tiny_bert, "w4", inputs=inputs, **more)
    assert not quant_layers(tiny_bert)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_bert.state_dict().items())


@pytest.mark.parametrize("more", [{"gptq": 2}, STATIC])
def test_the_line_for_texts_works_when_followed(more: dict[str, Any], tmp_path: Path) -> None:
    texts = ["one two three", "four"]
    tokenizer = AutoTokenizer.from_pretrained(body(tmp_path / "float"))
    model = BertModel.from_pretrained(tmp_path / "float")
    with pytest.raises(MoQError) as told:
        quantize_model(model, "w4", inputs=texts, **more)
    _, _, line = str(told.value).partition("as in inputs=")
    inputs = eval(line, {"tokenizer": tokenizer, "texts": texts})
    quantize_model(model, "w4", inputs=inputs, **more)
    folder = save_quantized(model, tmp_path / "packed", inputs=inputs)
    assert verify_quantized(folder).proof.agrees


def test_gptq_without_a_linear_layer_is_an_error() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3))
    inputs = {"input": torch.ones(2, 4, 9)}
    with pytest.raises(MoQError, match=r"gptq: it rounds linear layers .*, and there are none"):
        quantize_model(model, bits=4, convolutions=True, gptq=2, inputs=inputs)
    assert not quant_layers(model)


def test_what_is_switched_off_needs_no_examples(tiny_bert: nn.Module, tiny_batch: Batch) -> None:
    for inputs in (None, tiny_batch):
        quantize_model(tiny_bert, "w4", enabled=False, gptq=8, inputs=inputs)
        assert not quant_layers(tiny_bert)
