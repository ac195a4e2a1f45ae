"""Who reads the weight of a quantized layer: in a forward pass the quantized one, anywhere else the parameter."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from model_zoo import arguments
from stranger import outputs_of
from tables import quant_embeddings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moq_hf import MoQCallback, MoQError, dequantize_model, quantize_model, save_quantized
from moq_hf import quantizer as q
from moq_hf.layer_state import in_forward
from moq_hf.model.convert import check_bypassed_weights, check_scales, quant_layers

CONFIG: dict[str, Any] = {
    "quantize_bits": {"start_bits": 4, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": "per_channel",
}
FIXED: dict[str, Any] = {**CONFIG, "quantize_bits": {"start_bits": 3, "target_bits": 3}, "quantize_heads": True}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 60, "max_position_embeddings": 32, "pad_token_id": 0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
# The larger the weights, the more does their precision show.
WIDE = {"initializer_range": 0.2}

Read = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    """Multiplies with the weight of `proj`, which it never calls."""

    def __init__(self, read: Read | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.proj = nn.Linear(8, 8)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return F.linear(x, self.proj.weight, self.proj.bias) if self.read is None else self.read(self, x)


def reader(read: Read | None = None) -> Any:
    return quantize_model(Reader(read), FIXED)


def plain(model: Any) -> Any:
    """The same in float layers, with the quantized values in their weights."""
    return dequantize_model(copy.deepcopy(model))


def parameter(layer: nn.Module) -> nn.Parameter:
    found = dict(layer.named_parameters(recurse=False))["weight"]
    assert isinstance(found, nn.Parameter)
    return found


def quantized(layer: Any) -> Tensor:
    """By the definition."""
    state = layer.moq
    return q.fake_quantize(parameter(layer).detach(), state.bits, state.grid, ratio=state.ratio, seed=state.seed)


def sentences() -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": index % 2} for index, row in enumerate(torch.randint(3, 60, (4, 8)))]


def train(model: nn.Module, data: list[Any], config: dict[str, Any], folder: Path, **more: Any) -> hf.Trainer:
    args = arguments(folder, max_steps=4, **more)
    trainer = hf.Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[MoQCallback(config)])
    trainer.train()
    return trainer


def test_a_table_that_is_read_is_evaluated_as_delivered(tmp_path: Path) -> None:
    """Families that read the weights of linear layers, Mamba for one, are in test_families.py."""
    model = hf.DebertaForSequenceClassification(hf.DebertaConfig(**TEXT, **RELATIVE, **WIDE, max_relative_positions=8))
    data = sentences()
    trainer = train(model, data, {**CONFIG, "quantize_embeddings": 4}, tmp_path)
    layers = {**quant_layers(model), **quant_embeddings(model)}
    read = [layer for path, layer in layers.items() if path.endswith("rel_embeddings")]
    assert read and all(layer.moq.used for layer in read)
    check_bypassed_weights(layers)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in data])}
    labels = torch.tensor([row["labels"] for row in data])
    outputs = outputs_of(model, batch)
    for other in (plain(model), type(model).from_pretrained(tmp_path / "quantized")):
        assert all(map(torch.equal, outputs, outputs_of(other, batch)))
        with torch.no_grad():
            loss = float(other.eval()(**batch, labels=labels).loss)
        assert loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    floats = outputs_of(dequantize_model(copy.deepcopy(model), weights="float"), batch)
    assert not torch.equal(outputs[0], floats[0])


class Encoder(nn.Module):
    """A body of PyTorch's own layers, whose fused path evaluation takes."""

    def __init__(self) -> None:
        super().__init__()
        # A nested tensor, which comes with a warning, is not what this is about.
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(x).mean(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Attention(nn.Module):
    """Attention of PyTorch's own, which multiplies with the weight of its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.first(x)
        logits = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("kind", [Encoder, Attention])
def test_fused_paths_of_pytorch_see_the_quantized_weight(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    data = [{"x": torch.randn(6, 32), "labels": index % 2} for index in range(4)]
    config = {**CONFIG, "quantize_bits": {"start_bits": 3, "target_bits": 2}}
    trainer = train(model, data, config, tmp_path, learning_rate=1e-2)
    assert not [name for name, layer in quant_layers(model).items() if not layer.moq.used]
    assert ("attention.out_proj" in quant_layers(model)) == (kind is Attention)
    loss = trainer.evaluate()["eval_loss"]
    x = torch.stack([row["x"] for row in data])
    fused = count(monkeypatch, torch, "_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    with torch.no_grad():
        evaluated = model.eval()(x)["logits"]
        assert fused
        trained = model.train()(x)["logits"]
        # Fusion rounds otherwise.
        assert torch.allclose(evaluated, trained, atol=1e-5)
        floats = dequantize_model(copy.deepcopy(model), weights="float").eval()(x)["logits"]
        assert not torch.allclose(evaluated, floats, atol=1e-3)
        other = plain(model).eval()
        assert torch.equal(evaluated, other(x)["logits"])
        labels = torch.tensor([row["labels"] for row in data])
        assert loss == pytest.approx(float(other(x, labels)["loss"]), rel=1e-5)


def test_inputs_that_are_out_of_reach_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """A model that multiplies with a weight without calling the layer gives no inputs to round."""
    rounded = {**FIXED, "quantize_heads": False, "activation_quantization": {"enabled": True}}
    waves = hf.WavLMConfig(
        **SMALL, vocab_size=60, conv_dim=(16,), conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = hf.WavLMForSequenceClassification(waves)
    before = parameter(model.projector).detach().clone()
    data = [{"input_values": torch.randn(400), "labels": index % 2} for index in range(4)]
    with pytest.raises(MoQError, match=r'"wavlm\.encoder\.layers\.1\.attention\.q_proj".* used without calling these'):
        train(model, data, rounded, tmp_path)
    assert torch.equal(parameter(model.projector), before)
    left = [f"{part}_proj" for part in ("q", "k", "v", "out")]
    train(model, data, {**rounded, "modules_to_not_convert": left}, tmp_path)

    for kind, name in ((Encoder, r"body\.layers\.0\.linear1"), (Attention, r"attention\.out_proj")):
        with pytest.raises(MoQError, match=rf'activation_quantization: the weights of .*"{name}"'):
            quantize_model(kind(), rounded)
    assert quantize_model(Encoder(), FIXED)

    model = quantize_model(Reader(), {**rounded, "quantize_heads": True})
    model(torch.randn(3, 8))
    with pytest.raises(MoQError, match='the weights of "proj" are used'):
        model.eval()


def count(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[str]:
    """The names of the functions that were called."""
    calls: list[str] = []

    def counting(name: str, real: Any) -> Any:
        return lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs)

    for name in names:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return calls


def test_a_saved_model_with_attention_of_pytorchs_own_loads_bit_for_bit(tmp_path: Path) -> None:
    config = hf.SiglipVisionConfig(**SMALL, image_size=16, patch_size=8)
    model = quantize_model(hf.SiglipVisionModel(config), {**FIXED, "quantize_heads": False}).eval()
    assert any(name.endswith("head.attention.out_proj") for name in quant_layers(model))
    batch = {"pixel_values": torch.randn(2, 3, 16, 16)}
    outputs = outputs_of(model, batch)
    save_quantized(model, tmp_path)
    loaded = hf.SiglipVisionModel.from_pretrained(tmp_path)
    for other in (plain(model), loaded):
        assert all(map(torch.equal, outputs, outputs_of(other, batch)))
    floats = dequantize_model(copy.deepcopy(model), weights="float")
    assert not torch.equal(outputs[1], outputs_of(floats, batch)[1])


def test_outside_of_a_forward_pass_it_is_the_parameter() -> None:
    model = reader()
    layer = model.proj
    weight = parameter(layer)
    assert layer.weight is weight and not in_forward()
    x = torch.randn(3, 8)
    model(x).sum().backward()
    assert layer.weight is weight and layer.weight.grad is weight.grad is not None
    assert torch.optim.SGD([layer.weight], lr=0.1).param_groups[0]["params"][0] is weight
    before = layer.quantized_weight().detach().clone()
    nn.init.normal_(layer.weight)
    assert not torch.equal(layer.quantized_weight(), before)
    assert torch.equal(model(x), plain(model)(x))
    # A new parameter in its place.
    new = nn.Parameter(torch.randn(8, 8))
    layer.weight = new
    assert layer.weight is new is parameter(layer)
    assert torch.equal(model(x), plain(model)(x))
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = torch.randn(8, 8)
    del layer.weight
    assert not hasattr(layer, "weight") and "weight" not in model.proj._parameters
    with pytest.raises(AttributeError):
        del layer.weight
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        model(x)
    layer.weight = new
    assert torch.equal(model(x), plain(model)(x))


def test_models_of_transformers_initialize_the_parameter(tiny_bert: Any, tiny_batch: dict[str, Tensor]) -> None:
    quantize_model(tiny_bert, FIXED)
    layer = tiny_bert.bert.pooler.dense
    weight = parameter(layer)
    with torch.no_grad():
        weight.fill_(7)
    layer._is_hf_initialized = weight._is_hf_initialized = False
    tiny_bert._init_weights(layer)
    assert parameter(layer) is weight and weight.std() < 0.1
    outputs = outputs_of(tiny_bert, tiny_batch)
    assert all(map(torch.equal, outputs, outputs_of(plain(tiny_bert), tiny_batch)))


def called(self: Reader, x: Tensor) -> Tensor:
    return self.proj(x)


def closed(self: Reader, x: Tensor) -> Tensor:
    return F.linear(x, self.proj.weight, self.proj.bias).tanh()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("read", [called, closed])
def test_gradient_checkpointing_recomputes_with_the_quantized_weight(read: Read, reentrant: bool) -> None:
    model = reader(lambda self, x: checkpoint(lambda x: read(self, x), x, use_reentrant=reentrant))
    other = plain(model)
    x = torch.randn(3, 8)
    seen: list[Tensor] = []
    real = F.linear

    def spying(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(weight.detach().clone())
        return real(input, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", spying)
        loss = model(x).pow(2).sum()
        assert len(seen) == 2
        loss.backward()
        assert len(seen) == 3
    assert torch.equal(seen[1], quantized(model.proj)) and torch.equal(seen[2], seen[1])
    other(x).pow(2).sum().backward()
    for layer, same in ((model.proj, other.proj), (model.first, other.first)):
        assert torch.equal(parameter(layer).grad, same.weight.grad)
    assert model.proj.weight is parameter(model.proj)


def test_threads_do_not_see_each_others_forward_passes() -> None:
    inside, leave = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def read(self: Reader, x: Tensor) -> Tensor:
        inside.set()
        assert leave.wait(10)
        found["inside"] = self.proj.weight.detach().clone()
        return x

    model = reader(read)
    thread = threading.Thread(target=lambda: model(torch.randn(3, 8)))
    thread.start()
    try:
        assert inside.wait(10)
        assert model.proj.weight is parameter(model.proj)
        # A forward pass in this thread too.
        assert not in_forward() and isinstance(model.first(torch.randn(3, 8)), Tensor)
    finally:
        leave.set()
        thread.join(10)
    assert torch.equal(found["inside"], quantized(model.proj))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_forward_pass_leaves_nothing_behind(error: type[BaseException]) -> None:
    def read(self: Reader, x: Tensor) -> Tensor:
        assert self.proj.weight is not parameter(self.proj)
        raise error

    model = reader(read)
    model.first.register_forward_hook(lambda *_: None)
    try:
        model(torch.randn(3, 8))
    except error:
        # What is still on its way is no forward pass.
        assert model.proj.weight is parameter(model.proj)
    assert model.proj.weight is parameter(model.proj) and not in_forward()
    model.read = None
    x = torch.randn(3, 8)
    assert torch.equal(model(x), plain(model)(x))


def test_autocast_casts_what_is_multiplied_and_nothing_else() -> None:
    found: dict[str, Tensor] = {}

    def read(self: Reader, x: Tensor) -> Tensor:
        found["elementwise"] = x.float()[:, :1] * self.proj.weight[0]
        found["read"] = self.proj.weight
        return F.linear(x, self.proj.weight, self.proj.bias)

    model = reader(read)
    x = torch.randn(3, 8)
    exact = quantized(model.proj)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            first = model.first(x)
        assert found["read"].dtype == torch.float32 and torch.equal(found["read"], exact)
        assert torch.equal(found["elementwise"], first.float()[:, :1] * exact[0])
        read_before = found["read"]
        other = plain(model)
        assert torch.equal(other.proj.weight, exact)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(out, other(x))
            # The layer, called, gives the same as the reader.
            assert torch.equal(out, model.proj(first))
        with torch.no_grad():
            parameter(model.proj).mul_(1.5)
        exact = quantized(model.proj)
    read_before.sum().backward()
    assert torch.equal(parameter(model.proj).grad, torch.ones(8, 8))


@torch._dynamo.disable
def disabled(self: Reader, x: Tensor) -> Tensor:
    return F.linear(x, self.proj.weight, self.proj.bias)


def broken(self: Reader, x: Tensor) -> Tensor:
    x = x.clone()
    torch._dynamo.graph_break()
    return F.linear(x, self.proj.weight, self.proj.bias)


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# At a graph break Dynamo of torch 2.13 looks at `grad` of what it goes on with, which warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("read", "how"),
    [(None, "wrapped"), (None, "method"), (None, "function"), (broken, "function"), (disabled, "wrapped")],
)
def test_compiled_models_read_the_quantized_weight(read: Read | None, how: str) -> None:
    model = reader(read)
    how_to_compile: Any = {"backend": "aot_eager", "fullgraph": read is None}
    if how == "wrapped":
        run: Any = torch.compile(model, **how_to_compile)
    elif how == "method":
        model.compile(**how_to_compile)
        run = model
    else:
        run = torch.compile(lambda x: model(x), **how_to_compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    x = torch.randn(3, 8)
    for _ in range(3):
        # The compiled model has a call of its own.
        other = plain(model) if how != "method" else plain_of_compiled(model)
        assert torch.allclose(run(x), other(x), atol=1e-6)
        run(x).pow(2).sum().backward()
        other(x).pow(2).sum().backward()
        assert torch.allclose(parameter(model.proj).grad, other.proj.weight.grad, atol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        assert model.proj.weight is parameter(model.proj)
    model.eval()
    with torch.no_grad():
        other = plain(model) if how != "method" else plain_of_compiled(model)
        assert torch.allclose(run(x), other(x), atol=1e-6)


def plain_of_compiled(model: Any) -> Any:
    other = Reader(None if model.read is None else model.read)
    for name, layer in quant_layers(model).items():
        with torch.no_grad():
            layer_of = other.get_submodule(name)
            parameter(layer_of).copy_(layer.quantized_weight())
            layer_of.bias.copy_(layer.module.bias)
    return other


def test_functional_call_quantizes_what_it_is_given() -> None:
    model = reader()
    x = torch.randn(3, 8)
    given = {name: (tensor * 1.5).detach().requires_grad_() for name, tensor in model.named_parameters()}
    out = torch.func.functional_call(model, given, (x,))
    other = Reader()
    other.load_state_dict(given)
    quantize_model(other, FIXED)
    for name, layer in quant_layers(other).items():
        # Ratios are those of the layer, whatever weight it is given.
        layer.moq.ratio = quant_layers(model)[name].moq.ratio
    assert torch.equal(out, other(x))
    out.sum().backward()
    other(x).sum().backward()
    for name, tensor in other.named_parameters():
        assert torch.equal(given[name].grad, tensor.grad)
    assert model.proj.weight is parameter(model.proj) and model.proj.weight.grad is None
    assert torch.equal(model(x), plain(model)(x))


def test_replicas_of_data_parallel_read_the_quantized_weight() -> None:
    model = reader()
    x = torch.randn(3, 8)
    # As `nn.parallel.replicate` makes them: their weights are tensors with a graph, not parameters.
    replica = model._replicate_for_data_parallel()
    for name in ("first", "proj"):
        layer = getattr(model, name)
        part = layer._replicate_for_data_parallel()
        for key, tensor in layer.named_parameters():
            setattr(part, key, tensor * 1.0)
        replica._modules[name] = part
    assert replica.proj.weight is replica.proj.float_weight is not model.proj.weight
    assert not isinstance(replica.proj.weight, nn.Parameter)
    out = replica(x)
    assert torch.equal(out, plain(model)(x))
    out.sum().backward()
    grad = parameter(model.proj).grad
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
    assert grad is not None and torch.equal(grad, model.proj.weight.grad)


def written(self: Reader, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.proj.weight.clamp_(-0.1, 0.1)
    return F.linear(x, self.proj.weight, self.proj.bias)


def test_what_a_forward_pass_writes_is_lost() -> None:
    model, x = reader(written), torch.randn(3, 8)
    before = parameter(model.proj).detach().clone()
    out = model(x)
    model.read = None
    assert torch.equal(out, model(x)) and torch.equal(parameter(model.proj), before)


def test_forward_may_be_called_by_its_name() -> None:
    model = reader()
    x = torch.randn(3, 8)
    assert torch.equal(model.forward(x), plain(model)(x))
    assert torch.equal(Reader.forward(model, x), plain(model)(x))


def test_weights_taken_past_the_layers_are_named() -> None:
    def read(self: Reader, x: Tensor) -> Tensor:
        return F.linear(x, self.proj._parameters["weight"], self.proj.bias)

    model = reader(read)
    model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(MoQError, match=r'used without the layers.*: proj; .* add "proj" to modules_to_not_convert'):
        check_bypassed_weights(quant_layers(model))
    model = reader()
    model(torch.randn(3, 8)).sum().backward()
    check_bypassed_weights(quant_layers(model))


def test_exported_programs_have_the_quantized_weight() -> None:
    model = reader().eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = plain(model)(x)
        exported = torch.export.export(model, (x,)).module()
        assert torch.allclose(exported(x), expected, atol=1e-6)
        # It is plain PyTorch, for whoever has no moq_hf.
        assert "moq_hf" not in str(exported.graph)


def test_exported_programs_train_as_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    x = torch.randn(3, 8)
    exported = torch.export.export(model, (x,)).module()
    # Nothing of what was traced is left to be looked at.
    check_scales(quant_layers(model))
    assert "moq_hf" not in str(exported.graph)
    assert torch.equal(exported(x), model(x))
    for run in (model, exported):
        run(x).square().sum().backward()
    weights = dict(exported.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, weight.grad)
