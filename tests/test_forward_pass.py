"""A pass that makes all its quantized weights when it begins: with a kernel that is plain PyTorch, on a CPU."""

import contextlib
import copy
import inspect
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from model_zoo import arguments
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from moq_hf import MoQCallback, MoQError, dequantize_model, quantize_model, quantizer, triton_launch, triton_quant
from moq_hf.model.convert import check_scales, quant_layers
from moq_hf.triton_quant import Job, Results

FIXED: dict[str, Any] = {"bits": 4, "group_size": 8}
BERT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Launched(list[int]):
    """How many weights each launch made."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The CPU has a kernel that makes many weights at once."""
    calls = Launched()

    def launch(self: Any, jobs: list[Job]) -> Results:
        calls.append(len(jobs))
        values, scales = zip(*(quantizer.rounded(*job) for job in jobs), strict=True)
        ends = [0, *itertools.accumulate(map(len, scales))]
        return Results(
            list(values), torch.cat(scales).flatten(), list(itertools.starmap(slice, itertools.pairwise(ends)))
        )

    monkeypatch.setattr(triton_quant.Launcher, "__call__", launch)
    monkeypatch.setattr(triton_launch, "_triton", lambda: ("cpu", ""))
    monkeypatch.setattr(triton_quant, "rounded", quantizer.rounded)
    return calls


@pytest.fixture
def without_kernel(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From its call on a pass makes its weights one by one."""
    yield lambda: monkeypatch.setattr(triton_launch, "_triton", lambda: ("", ""))


class Net(nn.Module):
    """Two blocks, of which a pass may leave one out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.left_out: set[int] = set()
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x = x + self.run(block, x)
        return self.head(x)


def net() -> Any:
    torch.manual_seed(0)
    return quantize_model(Net(), FIXED)


def bert() -> Any:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT))


def evaluating_trainer(folder: Path, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A Trainer that has trained, and the data that it evaluates on."""
    data = [{"input_ids": torch.randint(0, 60, (5,)), "labels": index % 2} for index in range(6)]
    callback = MoQCallback({**FIXED, "prove": False})
    trainer = hf.Trainer(
        bert(), arguments(folder, max_steps=1, **more), train_dataset=data, eval_dataset=data, callbacks=[callback]
    )
    trainer.train()
    return trainer, data


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_a_pass_is_one_launch_and_trains_as_layers_do_by_themselves(
    launched: Launched, without_kernel: Callable[[], None]
) -> None:
    trained = []
    for alone in (False, True):
        if alone:
            without_kernel()
        model = quantize_model(bert(), {**FIXED, "embeddings": 8})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        ids = torch.randint(0, 60, (3, 7), generator=torch.Generator().manual_seed(1))
        for step in range(3):
            model.train()
            for _ in range(2):
                # Autocast inside of the pass and around it.
                with torch.autocast("cpu", torch.bfloat16, enabled=step > 0):
                    model(input_ids=ids, labels=torch.tensor([0, 1, 0])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        check_scales(quant_layers(model))
        trained.append([parameter.detach() for parameter in model.parameters()])
        if not alone:
            # Twelve layers of the encoder and the pooler.
            assert launched == [13] * 6
            launched.clear()
    assert not launched and all(map(torch.equal, *trained))


def test_autocast_inside_of_the_pass_is_known_from_the_pass_before(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    real = model.forward
    model.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(real)(x)
    by_themselves: list[int] = []
    real_rounded = quantizer.rounded
    monkeypatch.setattr(triton_quant, "rounded", lambda *args: by_themselves.append(1) or real_rounded(*args))
    for _ in range(3):
        model(torch.randn(3, 8)).float().sum().backward()
    # What the first pass made in float32 was for nothing.
    assert launched == [6, 6, 6] and len(by_themselves) == 6


@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_that_is_not_called_has_no_gradient(launched: Launched, hooked: bool) -> None:
    model = net()
    model.blocks[0][0].weight.requires_grad_(False)
    left = model.blocks[1][0].weight
    calls: list[Tensor | None] = []
    if hooked:
        left.register_hook(lambda grad: calls.append(grad))
    x = torch.randn(3, 8)
    for index in (set(), {1}, set(), {1}, {1}, set()):
        model.left_out = index
        model.zero_grad()
        model(x).sum().backward()
        assert (left.grad is None) == bool(index)
        assert model.blocks[0][0].weight.grad is None and model.blocks[2][0].weight.grad is not None
    assert all(grad is not None for grad in calls) and len(calls) == (3 if hooked else 0)


def test_gradients_have_memory_of_their_own(launched: Launched) -> None:
    model = net()
    model.run = lambda block, x: F.linear(x, block[0].quantized_weight()[:8] + block[2].quantized_weight()[:, :8])
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    grads = [grad for grad in gradients(model.blocks[0]) if grad is not None]
    before = grads[1].clone()
    grads[0].zero_()
    assert torch.equal(grads[1], before)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_gradients_of_a_layer_that_is_called_twice_are_summed_before_they_are_cast(
    launched: Launched, without_kernel: Callable[[], None], has_kernel: bool
) -> None:
    if not has_kernel:
        without_kernel()
    model = net()
    model.run = lambda block, x: block(block(x))
    # So does a float model under autocast.
    plain = dequantize_model(copy.deepcopy(model))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    trained = []
    for each in (plain, model, model):
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            each(x).float().pow(2).sum().backward()
        trained.append(gradients(each))
    assert same(trained[0], trained[1]) and same(trained[0], trained[2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_anew_and_trains_the_same(
    launched: Launched, without_kernel: Callable[[], None], reentrant: bool
) -> None:
    found = []
    for run in (None, lambda block, x: checkpoint(block, x, use_reentrant=reentrant)):
        model = net()
        model.run = run or model.run
        for _ in range(2):
            model(torch.ones(3, 8, requires_grad=True)).pow(2).sum().backward()
        found.append(gradients(model))
    without_kernel()
    model = net()
    for _ in range(2):
        model(torch.ones(3, 8, requires_grad=True)).pow(2).sum().backward()
    assert same(found[0], found[1]) and same(found[0], gradients(model))


def loss_with(parameters: dict[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()


def test_it_is_differentiable_twice_and_by_torch_func(launched: Launched, without_kernel: Callable[[], None]) -> None:
    found = []
    for alone in (False, True):
        if alone:
            without_kernel()
        model, x = net(), torch.ones(3, 8)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(x).pow(2).sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), parameters)
        given = dict(model.named_parameters())
        by_func = torch.func.grad(loss_with)(given, model, x)
        found.append([*grads, *second, *by_func.values()])
    assert all(map(torch.equal, *found))


def test_models_in_models_and_modules_called_alone(launched: Launched) -> None:
    model = quantize_model(bert(), FIXED)
    ids = torch.randint(0, 60, (3, 7))
    model(input_ids=ids)
    assert launched == [13]
    # The model of transformers inside of another has a pass of its own where it is called alone.
    model.bert(input_ids=ids)
    assert launched == [13, 13]
    layer = model.bert.encoder.layer[0]
    layer(torch.randn(2, 4, 32))
    assert launched == [13, 13]
    teacher = copy.deepcopy(model)
    student = net()
    student.run = lambda block, x: block(x) + teacher(input_ids=ids).logits.mean()
    student(torch.ones(3, 8))
    assert launched == [13, 13, 6, 13, 13, 13]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_passes_of_their_own(launched: Launched, how: str) -> None:
    model, x = net(), torch.ones(3, 8)
    model.run = None
    model.__class__ = Plain
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    states = [layer.moq for layer in quant_layers(other).values()]
    assert len({state.passes for state in states}) == 1 and states[0].passes is not model.blocks[0][0].moq.passes
    assert torch.equal(other(x), model(x)) and launched == [6, 6]
    # A part of a model comes without what lies around it.
    part = copy.deepcopy(model.blocks[0])
    assert torch.equal(part(x), model.blocks[0](x)) and launched == [6, 6]


class Plain(Net):
    """As `Net`, and can be pickled."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x) + self.blocks[1](x) + self.blocks[2](x))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_weight_behind(launched: Launched, error: type[BaseException]) -> None:
    model, x = net(), torch.ones(3, 8)
    before = model(x)

    def fail(block: Any, x: Tensor) -> Tensor:
        raise error

    run, model.run = model.run, fail
    with pytest.raises(error):
        model(x)
    model.run = run
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)
    twin = net()
    twin.load_state_dict(model.state_dict())
    for layer, other in zip(quant_layers(model).values(), quant_layers(twin).values(), strict=True):
        other.moq.ratio = layer.moq.ratio
    assert torch.equal(model(x), twin(x))


def test_threads_have_passes_of_their_own(launched: Launched) -> None:
    model, x = net(), torch.ones(3, 8)
    wanted = model(x)
    inside, leave = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def wait(block: Any, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(10)
        return block(x)

    model.run = wait
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    assert inside.wait(10)
    found.append(model(x))
    leave.set()
    thread.join(10)
    assert len(found) == 2 and all(torch.equal(wanted, each) for each in found)


def test_within_a_pass_the_first_weight_counts(launched: Launched) -> None:
    model, x = net(), torch.ones(3, 8)
    before = model(x).detach()

    def write(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            block[0].float_weight.mul_(0.5)
            block[2].weight.zero_()
        return block(x)

    run, model.run = model.run, write
    assert torch.equal(model(x), before)
    model.run = run
    assert not torch.equal(model(x), before)


def clamped(layer: Any) -> None:
    layer.weight.data.clamp_(-0.01, 0.01)


def multiplied(layer: Any, name: str = "weight") -> None:
    with torch.no_grad():
        getattr(layer, name).mul_(0.5)


@pytest.mark.parametrize("write", [clamped, multiplied])
@pytest.mark.parametrize("place", ["layer", "block", "model", "everywhere", "method"])
@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_mask_in_a_hook_is_told(
    request: pytest.FixtureRequest, write: Callable[[Any], None], place: str, with_kernel: bool
) -> None:
    if with_kernel:
        request.getfixturevalue("launched")
    model, x = net(), torch.ones(3, 8)
    layer = model.blocks[1][0]

    class Mask:
        def act(self, module: nn.Module, args: Any) -> None:
            write(layer)

    if place == "everywhere":
        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: write(layer) if module is layer else None
        )
    else:
        module = {"block": model.blocks[1], "model": model}.get(place, layer)
        act = Mask().act if place == "method" else lambda module, args: write(layer)
        handle = module.register_forward_pre_hook(act)
    message = r"a forward pre-hook has written to blocks\.1\.0\.weight.* torch\.nn\.utils\.parametrize before"
    with pytest.raises(MoQError, match=message):
        model(x)
    handle.remove()
    # One that only looks is none.
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.norm()))
    seen: list[Tensor] = []
    model(x)
    assert len(seen) == 1


def test_a_trainer_evaluates_with_one_copy_and_forgets_it(launched: Launched, tmp_path: Path) -> None:
    trainer, data = evaluating_trainer(tmp_path, per_device_eval_batch_size=1)
    for evaluate in (trainer.evaluate, lambda: trainer.predict(data)):
        launched.clear()
        evaluate()
        # The event that tells of an evaluation comes after its first batch.
        assert launched == [13, 13]
    with pytest.raises(ZeroDivisionError):
        trainer.predict(Broken(data))
    launched.clear()
    with torch.no_grad():
        for _ in range(2):
            trainer.model(data[0]["input_ids"][None])
    assert launched == [13, 13]


class Broken(list[Any]):
    """Data whose fourth example cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if index != 3 else 1 // 0)


def test_generation_quantizes_once(launched: Launched) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=60, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = quantize_model(hf.LlamaForCausalLM(config), FIXED)
    ids = torch.randint(1, 60, (1, 4))
    for each in (model, copy.deepcopy(model)):
        launched.clear()
        each.generate(ids, max_new_tokens=4, do_sample=False)
        assert launched == [14]
        each(ids)
        each(ids)
        assert launched == [14, 14, 14]


def test_tables_quantize_the_rows_that_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    real = quantizer.rounded
    monkeypatch.setattr(
        quantizer, "rounded", lambda weight, *a, **k: rounded.append(len(weight)) or real(weight, *a, **k)
    )
    model: Any = nn.Sequential(nn.Embedding(50, 8, padding_idx=3), nn.Linear(8, 2))
    quantize_model(model, {**FIXED, "embeddings": 4, "heads": True})
    table = model[0]
    whole = quantizer.fake_quantize(table.float_weight.detach(), 4, table.moq.grid)
    for ids in (torch.tensor([[1, 3], [1, 49]]), torch.arange(50), torch.tensor([], dtype=torch.long)):
        rounded.clear()
        rows = table(ids)
        assert torch.equal(rows, F.embedding(ids, whole))
        assert rounded == ([4] if len(ids) == 2 else [50])
        table.weight.grad = None
        rows.pow(2).sum().backward()
        wanted = whole.clone().requires_grad_()
        F.embedding(ids, wanted, 3).pow(2).sum().backward()
        assert torch.equal(table.weight.grad, wanted.grad)


def test_a_part_may_leave_the_quantized_model(launched: Launched) -> None:
    model, x = net(), torch.ones(3, 8)
    wanted = model(x)
    dequantize_model(model.blocks[0])
    assert torch.equal(model(x), wanted) and launched == [6, 4]
    quantize_model(model.blocks[0], FIXED)
    model(x)
    # The part has passes of its own, and a head that stays in float.
    assert launched == [6, 4, 4, 1]


def test_a_hook_that_only_reads_is_never_blamed(launched: Launched) -> None:
    model, x = net(), torch.ones(3, 8)
    layer, seen = model.blocks[1][0], list[Tensor]()
    handle = model.register_forward_pre_hook(lambda *_: seen.append(layer.weight.norm()))
    model.left_out = {1}
    model(x)
    handle.remove()
    layer.weight.data.mul_(2)
    model.left_out = set()
    model(x)


def test_a_layer_that_is_called_after_an_interrupt_sees_what_has_changed(launched: Launched) -> None:
    model, x = net(), torch.ones(3, 8)
    layer = model.blocks[1][0]

    def stop(block: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model.run = stop
    with pytest.raises(KeyboardInterrupt):
        model(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    expected = quantizer.fake_quantize(layer.float_weight.detach(), 4, layer.moq.grid, ratio=layer.moq.ratio)
    assert torch.equal(layer(x), F.linear(x, expected, layer.bias))


def test_a_model_may_be_evaluated_when_it_is_float_again(tmp_path: Path) -> None:
    trainer, _ = evaluating_trainer(tmp_path)
    before = trainer.evaluate()["eval_loss"]
    dequantize_model(trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)


def test_gpt_2_s_layer_takes_its_argument_by_name() -> None:
    layer: Any = quantize_model(gpt2(), FIXED).transformer.h[0].mlp.c_fc
    x = torch.randn(2, 32)
    assert torch.equal(layer(x=x), layer(x))


def hooked_node(weight: Tensor) -> list[Any]:
    """What a hook of the node that adds up a weight's gradient, as DDP and DeepSpeed have it, is called with."""
    calls: list[Any] = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *grads: calls.append(weight.grad is None))
    calls.append(node)
    return calls


def test_a_layer_that_is_never_called_has_no_node_in_a_graph(launched: Launched) -> None:
    model = net()
    model.left_out = {1}
    calls = hooked_node(model.blocks[1][0].weight)
    for _ in range(3):
        model(torch.ones(3, 8)).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_hooks_compute_train_on(launched: Launched, change: Any) -> None:
    model = net()
    with pytest.warns(FutureWarning) if change is nn.utils.weight_norm else contextlib.nullcontext():
        change(model.blocks[0][0])
    for _ in range(3):
        model(torch.ones(3, 8)).sum().backward()


def test_a_hook_in_a_fresh_process_leaves_those_of_a_pickle_alone(launched: Launched) -> None:
    model = net()
    model.__class__, model.run = Plain, None
    file = io.BytesIO()
    torch.save(model, file)
    number = RemovableHandle.next_id
    try:
        RemovableHandle.next_id = 0
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert RemovableHandle.next_id > max(other._forward_hooks)
    finally:
        RemovableHandle.next_id = max(number, RemovableHandle.next_id)


def test_a_mask_on_experts_is_told() -> None:
    model: Any = quantize_model(mixtral(), FIXED)
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: multiplied(module, "gate_up_proj"))
    with pytest.raises(MoQError, match=r"a forward pre-hook has written to .*gate_up_proj"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_what_no_pass_calls_may_hold_anything(launched: Launched) -> None:
    model = net()
    model.left_out = {1}
    with torch.no_grad():
        model.blocks[1][0].float_weight[0, 0] = torch.nan
    model(torch.ones(3, 8))
    check_scales(quant_layers(model))
    model.left_out = set()
    model(torch.ones(3, 8))
    with pytest.raises(MoQError, match=r"NaN or Inf in blocks\.1\.0\.weight"):
        check_scales(quant_layers(model))


def test_generate_is_described_as_the_model_s(launched: Launched) -> None:
    plain = gpt2()
    expected = inspect.signature(plain.generate)
    quantized = quantize_model(plain, FIXED)
    assert inspect.signature(quantized.generate) == expected
    assert quantized.generate.__func__ is hf.GPT2LMHeadModel.generate


def test_a_single_index_is_looked_up() -> None:
    model: Any = quantize_model(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2)), {**FIXED, "embeddings": 4})
    assert torch.equal(model[0](torch.tensor(4)), model[0](torch.tensor([4]))[0])


def gpt2(**more: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **more)).eval()


def mixtral() -> Any:
    config = hf.MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=60, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [gpt2, mixtral, convolutions])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_whose_rows_are_no_rows_in_memory(
    launched: Launched,
    without_kernel: Callable[[], None],
    make: Callable[[], nn.Module],
    hooked: bool,
    dtype: torch.dtype,
) -> None:
    inputs: Any = torch.randn(2, 3, 5, 5) if make is convolutions else torch.randint(0, 60, (2, 5))
    found = []
    for alone in (False, True):
        if alone:
            without_kernel()
        torch.manual_seed(0)
        model = quantize_model(make(), bits=4, convolutions=make is convolutions)
        if hooked:
            for parameter in model.parameters():
                parameter.register_hook(lambda grad: None)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
                output = model(inputs)
            getattr(output, "logits", output).float().square().sum().backward()
        found.append(gradients(model))
    assert len(launched) == 3 and min(launched) >= 2 and same(*found)
