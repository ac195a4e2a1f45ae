"""Runs that start from GPTQ: what it makes of weights, from which inputs, when, and what it refuses."""

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from sentences import TEXTS, encoder
from tiny_runs import arguments, assert_same, callback_of, moq, new_model, no_dropout, rows, trained, weights
from torch import nn
from transformers import DataCollatorWithPadding, Trainer

from moq_hf import MoQCallback, MoQConfig, MoQError, MoQTrainer, quantize_model, quantizer
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.model.convert import quant_layers
from moq_hf.training import replay
from moq_hf.training.samples import first_batches

Calls = list[tuple[torch.Tensor, int]]
PLAIN: dict[str, Any] = {"bits": 3, "group_size": 8, "embeddings": None}


def moment_of(columns: int, seed: int = 0) -> torch.Tensor:
    """Of inputs some of which say nearly the same."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, columns, generator=generator)
    inputs[:, 1::2] = inputs[:, ::2] + 0.3 * inputs[:, 1::2]
    return inputs.t() @ inputs


def by_hand(weight: torch.Tensor, moment: torch.Tensor, bits: int, grid: Grid) -> np.ndarray:
    """As in "Optimal Brain Quantization": the inverse of what is left, anew for each column."""
    left = weight.double().numpy().copy()
    hessian = moment.double().numpy()
    hessian = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    result = np.zeros_like(left)
    size = grid.grouping.row_size or left.shape[1]
    own = replace(grid, grouping=PerChannel()) if grid.grouping.row_size else grid
    precision = grid.at(bits)
    for column in range(left.shape[1]):
        if column % size == 0:
            group = torch.from_numpy(left[:, column : column + size]).float()
            ratio = quantizer.least_squares_ratio(group, bits, own) if own.at(bits).searches else None
            _, scale, zero = quantizer.quantize(group, bits, own, ratio=ratio)
            scales = np.repeat(scale.double().numpy()[:, 0], len(left) // len(scale))
            zeros = np.zeros(len(left)) if zero is None else np.repeat(zero.numpy()[:, 0], len(left) // len(zero))
        codes = np.clip(np.round(left[:, column] / scales) + zeros, precision.low, precision.high)
        result[:, column] = (codes - zeros) * scales
        inverse = np.linalg.inv(hessian[column:, column:])
        error = (left[:, column] - result[:, column]) / inverse[0, 0]
        left[:, column:] -= np.outer(error, inverse[0])
    return result


@pytest.mark.parametrize("grouping", [RowBlocks(3), PerChannel(), PerGroup(4)])
@pytest.mark.parametrize(
    ("bits", "more"), [(3, {}), (4, {"full": True}), (3, {"symmetric": False}), (8, {"scale_dtype": "bfloat16"})]
)
def test_columns_make_up_for_each_other(grouping: Grouping, bits: int, more: dict[str, Any]) -> None:
    grid = Grid(grouping=grouping, **more)
    torch.manual_seed(bits)
    weight = torch.randn(6, 16)
    made = quantizer.gptq(weight, moment_of(16), bits, grid)
    torch.testing.assert_close(made, torch.from_numpy(by_hand(weight, moment_of(16), bits, grid)).float())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_products_change_less_than_by_rounding(bits: int) -> None:
    torch.manual_seed(0)
    grid = Grid(grouping=PerGroup(16))
    weight, moment = torch.randn(32, 64), moment_of(64)

    def change(values: torch.Tensor) -> float:
        ratio = quantizer.least_squares_ratio(values, bits, grid) if grid.at(bits).searches else None
        error = (quantizer.fake_quantize(values, bits, grid, ratio=ratio) - weight).double()
        return float(((error @ moment.double()) * error).sum())

    assert change(quantizer.gptq(weight, moment, bits, grid)) < 0.75 * change(weight)


def padded_rows() -> list[dict[str, Any]]:
    return [{**row, "input_ids": row["input_ids"][: 4 + index % 6]} for index, row in enumerate(rows())]


class Collator(DataCollatorWithPadding):
    """Pads without a tokenizer."""

    def __init__(self) -> None:
        pass

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in features], batch_first=True)
        labels = torch.tensor([row["labels"] for row in features])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Moment and bits of each call of GPTQ."""
    calls: Calls = []
    gptq = quantizer.gptq

    def spy(weight: torch.Tensor, moment: torch.Tensor, bits: int, grid: Grid) -> torch.Tensor:
        calls.append((moment, bits))
        return gptq(weight, moment, bits, grid)

    monkeypatch.setattr(quantizer, "gptq", spy)
    return calls


def test_inputs_are_those_of_training_without_padding(used: Calls, tmp_path: Path) -> None:
    settings = arguments(tmp_path, max_steps=1, train_sampling_strategy="sequential", learning_rate=0.0)
    model = new_model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    callback = MoQCallback(**PLAIN, gptq=6)
    trainer = Trainer(model, settings, train_dataset=padded_rows(), data_collator=Collator(), callbacks=[callback])
    trained(trainer)
    # What the first layer of a model that nothing has touched takes in, of the two batches that have 6 examples.
    plain = new_model().eval()
    inputs: list[torch.Tensor] = []
    plain.bert.encoder.layer[0].attention.self.query.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for first in (0, 4):
        batch = Collator()(padded_rows()[first : first + 4])
        plain(**batch)
        inputs[-1] = inputs[-1][batch["attention_mask"].bool()]
    seen = torch.cat(inputs)
    torch.testing.assert_close(used[0][0], seen.t() @ seen)
    # All but a few are on the grid already: a group of eight that misses the last code gets another scale.
    layers = {name: layer for name, layer in quant_layers(model).items() if "classifier" not in name}
    assert len(used) == len(layers)
    for name, layer in layers.items():
        near = torch.isclose(layer.quantized_copy(torch.float32), layer.float_weight)
        assert near.float().mean() > 0.95 and not torch.equal(layer.float_weight, start[f"{name}.weight"])
    assert torch.equal(start["classifier.weight"], model.classifier.weight)


def test_padding_of_texts_does_not_count(used: Calls, tmp_path: Path) -> None:
    """Sentence Transformers calls the model inside without its hooks."""
    model = encoder(tmp_path)
    query = next(part for name, part in model.named_modules() if name.endswith("layer.0.attention.self.query"))
    features = model.preprocess(TEXTS)
    inputs: list[torch.Tensor] = []
    handle = query.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model.eval()(dict(features))
    handle.remove()
    quantize_model(model, **PLAIN, gptq=len(TEXTS), inputs=TEXTS)
    is_text = features["attention_mask"].bool()
    assert not is_text.all()
    seen = inputs[0][is_text]
    torch.testing.assert_close(used[0][0], seen.t() @ seen)


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("length", [8, 6])
def test_an_encoder_and_a_decoder_have_padding_of_their_own(length: int, has_mask: bool, used: Calls) -> None:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 8, "vocab_size": 40}
    hf.set_seed(0)
    model = hf.BartModel(hf.BartConfig(**sizes, **widths, max_position_embeddings=16)).eval()
    batch = {"input_ids": torch.randint(5, 40, (4, 8)), "attention_mask": (torch.arange(8) < 5).expand(4, 8).long()}
    batch["decoder_input_ids"] = torch.randint(5, 40, (4, length))
    is_answer = torch.ones(4, length, dtype=torch.bool)
    if has_mask:
        is_answer[:, 3:] = False
        batch["decoder_attention_mask"] = is_answer.long()
    quantize_model(model, **PLAIN, gptq=4, inputs=batch)
    names = [name for name, layer in quant_layers(model).items() if layer.kind == "linear"]
    # The weights that a layer's inputs depend on are as they were when it was rounded: those of earlier layers.
    inputs: dict[str, torch.Tensor] = {}
    for name in ("decoder.layers.0.self_attn.k_proj", "decoder.layers.0.encoder_attn.k_proj"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.__setitem__(name, args[0])
        )
    with torch.no_grad():
        model(**batch)
    for name, kept in zip(inputs, (is_answer, batch["attention_mask"].bool()), strict=True):
        seen = inputs[name][kept]
        torch.testing.assert_close(used[names.index(name)][0], seen.t() @ seen)


class Uneven(nn.Module):
    """Texts with pictures, of which one text has two and another none; a layer is called by name, on flat tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, texts: torch.Tensor, pictures: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if int((texts[..., 0] > 0).sum()) != len(pictures):
            raise ValueError("a picture for each mark")
        return self.head(self.first(input=texts.flatten(0, 1)))


def test_a_batch_that_is_no_list_of_rows_is_read_whole(used: Calls) -> None:
    texts = torch.rand(20, 3, 8)
    texts[..., 0] = -1
    texts[:, 0, 0] = 1
    texts[0, 0, 0], texts[19, 1, 0] = -1, 1
    mask = torch.arange(3).expand(20, 3) < 2
    batch = defaultdict(torch.Tensor, texts=texts, pictures=torch.rand(20, 8), attention_mask=mask)
    options: dict[str, Any] = {"bits": 4, "modules_to_not_convert": ["head"]}
    quantize_model(Uneven(), **options, gptq=20, inputs=batch)
    seen = texts[mask]
    torch.testing.assert_close(used[0][0], seen.t() @ seen)


class TakesLabelsOut(Trainer):
    """As Trainers with a loss of their own do; those of Sentence Transformers take out more."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(model(**inputs).logits, labels)


def test_a_loss_may_take_its_batch_apart(tmp_path: Path) -> None:
    callback = MoQCallback(**PLAIN, gptq=4)
    settings = arguments(tmp_path, max_steps=32, logging_steps=16)
    trainer = trained(TakesLabelsOut(new_model(), settings, train_dataset=rows(), callbacks=[callback]))
    first, last = (log["loss"] for log in trainer.state.log_history if "loss" in log)
    assert last < first
    assert callback.delivered.proof.agrees


def test_a_layer_that_is_not_called_stays_and_no_loss_is_asked_for(tmp_path: Path) -> None:
    def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    model = new_model()
    model.bert.spare = nn.Linear(16, 16)
    start = model.bert.spare.weight.detach().clone()
    callback = MoQCallback(**PLAIN, gptq=4)
    settings = arguments(tmp_path, max_steps=2)
    trained(Trainer(model, settings, train_dataset=rows(), compute_loss_func=summed, callbacks=[callback]))
    assert torch.equal(model.bert.spare._parameters["weight"], start)


def test_batches_of_texts_count_as_many_examples_as_they_have_texts() -> None:
    batches = [{"prompt": "query: ", "anchor": ["one", "two"], "positive": ["three", "four"]} for _ in range(5)]
    assert len(first_batches(batches, 3)) == 2


def test_without_it_weights_stay_and_data_and_random_numbers_are_the_same(tmp_path: Path) -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    for examples in (0, 8):
        trainer = Trainer(
            new_model(),
            arguments(tmp_path / str(examples), max_steps=16, learning_rate=0.0),
            train_dataset=rows(),
            callbacks=[MoQCallback(**PLAIN, gptq=examples)],
        )
        batches: list[torch.Tensor] = []

        def watch(module: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                batches.extend([kwargs["input_ids"], torch.rand(2)])  # noqa: B023

        trainer.model.register_forward_pre_hook(watch, with_kwargs=True)
        trainer.train()
        seen[examples] = batches
    assert len(seen[0]) == 2 * 16
    for plain, other in zip(*seen.values(), strict=True):
        assert torch.equal(plain, other)


def test_accelerate_knows_that_no_pass_over_the_data_is_under_way() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(rows(), batch_size=4))
    before = list(accelerator.gradient_state.dataloader_references)
    assert [len(batch["input_ids"]) for batch in first_batches(loader, 6)] == [4, 4]
    assert accelerator.gradient_state.dataloader_references == before
    assert len(first_batches(loader, 1000)) == 16


def test_at_each_fall_and_not_again_on_resuming(used: Calls, tmp_path: Path) -> None:
    config = MoQConfig.from_dict(
        {
            "quantize_bits": {"start_bits": 4, "target_bits": 3},
            "quantize_groups": "per_channel",
            "quantize_schedule": {"quantize_period": 3, "schedule_offset": 2},
            "quantize_algo": {"gptq": 8},
        }
    )
    saving = {"save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    whole = trained(no_dropout(moq(tmp_path, config, **saving)))
    layers = len(callback_of(whole).controller.layers)
    assert [bits for _, bits in used] == [4] * layers + [3] * layers
    used.clear()
    resumed = no_dropout(moq(tmp_path, config, **saving))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert {bits for _, bits in used} <= {3}
    assert_same(weights(whole), weights(resumed))
    assert callback_of(whole).delivered.proof.agrees


def test_after_a_float_phase_it_starts_from_the_float_model(used: Calls, tmp_path: Path) -> None:
    settings, config = arguments(tmp_path, max_steps=8), MoQConfig(**PLAIN, gptq=8)
    trainer = MoQTrainer(new_model(), settings, train_dataset=rows(), moq_config=config, float_first=True)
    no_dropout(trainer).train()
    assert {bits for _, bits in used} == {3}
    assert callback_of(trainer).delivered.proof.agrees


def test_data_with_fewer_examples_than_gptq_asks_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows()
    for lacking in (0, 1):
        callbacks = [MoQCallback(**PLAIN, gptq=len(data) + lacking)]
        Trainer(new_model(), arguments(tmp_path, max_steps=1), train_dataset=data, callbacks=callbacks).train()
        assert caplog.text.count(f"GPTQ reads {len(data)} training examples: the data has no more") == lacking


def test_what_cannot_be_rounded_so_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    model = new_model()
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight.fill_(torch.inf)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[MoQCallback(**PLAIN, gptq=4)])
    with pytest.raises(MoQError, match=r"gptq: the inputs of .*query hold NaN or Inf"):
        trainer.train()
    model = new_model()
    model.bert.requires_grad_(False)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[MoQCallback(**PLAIN, gptq=4)])
    with pytest.raises(MoQError, match="no linear layer is both quantized and trained"):
        trainer.train()
    with pytest.raises(MoQError, match="gptq"):
        MoQConfig(gptq=-1)


SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
# DeBERTa's convolution, after its second block, reads what the first one answered.
SKIPS = hf.DebertaV2Config(**SMALL, conv_kernel_size=3)


@pytest.mark.parametrize(
    ("config", "skips"),
    [
        (hf.LlamaConfig(**SMALL), False),
        (hf.AlbertConfig(**SMALL, embedding_size=16), False),
        (hf.T5Config(**T5, decoder_start_token_id=0), False),
        (SKIPS, True),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_blocks_that_are_done_are_not_computed_again(config: Any, skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the weights are those that whole passes give, bit for bit."""
    hf.set_seed(0)
    model = hf.AutoModel.from_config(config)
    whole = copy.deepcopy(model)
    words = torch.randint(5, 90, (3, 2, 16))
    names = ("input_ids", "decoder_input_ids")[: 1 + config.is_encoder_decoder]
    batches = [dict.fromkeys(names, ids) for ids in words]
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    gave_up: list[bool] = []
    give_up = replay.Replay.give_up

    def noted(self: replay.Replay) -> None:
        gave_up.append(True)
        give_up(self)

    monkeypatch.setattr(replay.Replay, "give_up", noted)
    quantize_model(model, bits=3, embeddings=None, inputs=batches, gptq=6)
    assert bool(gave_up) == skips
    monkeypatch.setattr(replay, "_outermost_lists", lambda model: [])
    quantize_model(whole, bits=3, embeddings=None, inputs=batches, gptq=6)
    assert_same(model.state_dict(), whole.state_dict())
    if config.model_type == "llama":
        # Once to try the batches, once for each of the four inputs in a block, and once to be kept; and a whole pass
        # over the first batch for each of the first two blocks, which are compared.
        assert calls["layers.0.self_attn.q_proj"] == len(batches) * 6 + 2


def test_a_large_batch_is_read_in_parts() -> None:
    """So that what checks each new block is a small one."""
    hf.set_seed(0)
    large = hf.AutoModel.from_config(hf.LlamaConfig(**SMALL))
    small = copy.deepcopy(large)
    words, size = torch.randint(5, 90, (40, 8)), 16
    calls: list[int] = []
    large.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    quantize_model(large, bits=3, embeddings=None, inputs={"input_ids": words}, gptq=40)
    parts = [{"input_ids": part} for part in words.split(size)]
    quantize_model(small, bits=3, embeddings=None, inputs=parts, gptq=40)
    # The first pass tries the whole batch.
    assert (calls[0], max(calls[1:])) == (40, size)
    assert_same(large.state_dict(), small.state_dict())


class Branch(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Blocks(nn.Module):
    """Branches in a list, whose answers are not handed on alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks, self.head = nn.ModuleList(Branch() for _ in range(4)), nn.Linear(16, 4)
        if kind == "with an empty entry":
            self.blocks.append(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = torch.zeros_like(x)
        left = {"x": x}
        for block in self.blocks:
            if self.kind == "summed in place":
                summed += block(x)
            elif self.kind == "added in place":
                x = x.clone()
                x += block(x)
            elif self.kind == "left behind":
                x = block(x) + left.get("y", 0)
                left["y"] = x
            elif block is not None:
                x = block(x)
        return self.head(x + summed)


class Writing(Branch):
    """Hands a mapping on, and writes to it."""

    def forward(self, values: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        values["x"] = values["x"] + super().forward(values["x"])


class Writers(nn.Module):
    """Blocks that answer nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Writing() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {"x": x}
        for block in self.blocks:
            block(values)
        return self.head(values["x"])


@pytest.mark.parametrize(
    "make",
    [
        *(
            functools.partial(Blocks, kind)
            for kind in ("summed in place", "added in place", "left behind", "with an empty entry")
        ),
        Writers,
    ],
    ids=str,
)
def test_blocks_that_do_more_than_answer_are_computed_each_time(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf.set_seed(0)
    model = make().eval()
    whole = copy.deepcopy(model)
    batches = [{"x": torch.randn(4, 16)} for _ in range(3)]
    options: dict[str, Any] = {
        "bits": 3,
        "embeddings": None,
        "gptq": 12,
        "heads": True,
        "modules_to_not_convert": ["blocks.0"],
    }
    quantize_model(model, inputs=batches, **options)
    monkeypatch.setattr(replay, "_outermost_lists", lambda model: [])
    quantize_model(whole, inputs=batches, **options)
    assert_same(model.state_dict(), whole.state_dict())
