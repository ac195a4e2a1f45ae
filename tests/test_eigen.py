import contextlib
import copy
import gc
import json
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from repo import GOLDEN
from safetensors.torch import load_file
from torch import Tensor, nn

from moq_hf import MoQError, block_eigenvalues, dequantize_model, quantize_model
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory
from moq_hf.training.measuring import measuring
from moq_hf.training.sensitivity import normalize

RECORDED = GOLDEN / "eigen_h16_init"
CONVERGED = {"tolerance", "exact", "zero"}


def quadratic(eigenvalues: list[float], seed: int = 0) -> tuple[Callable[[], Tensor], dict[str, list[Tensor]]]:
    """A loss whose Hessian has these eigenvalues, its vector cut into two parameters."""
    size = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    matrix = (basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T).float()
    parts = [nn.Parameter(torch.ones(size // 2)), nn.Parameter(torch.ones(1, size - size // 2))]

    def loss() -> Tensor:
        x = torch.cat([part.flatten() for part in parts])
        return 0.5 * x @ matrix @ x

    return loss, {"block": list(parts)}


SPECTRA = {
    "known": [float(k) for k in range(1, 11)],
    "negative dominant": [-7.0, *[float(k) for k in range(-4, 5)]],
    "nearly equal ends": [-9.98, 10.0, *[k / 3 for k in range(8)]],
    "twice the same": [3.0, 3.0, *[0.1 * k for k in range(8)]],
}


# Power iteration does not tell equal ends apart: that is why it is not the default.
@pytest.mark.parametrize(
    "name, method",
    [*((name, "lanczos") for name in SPECTRA), *((name, "power") for name in SPECTRA if name != "nearly equal ends")],
)
def test_a_known_spectrum(name: str, method: Any) -> None:
    truth = max(SPECTRA[name], key=abs)
    found = block_eigenvalues(*quadratic(SPECTRA[name]), method=method, tol=1e-3)["block"]
    assert found.value == pytest.approx(truth, rel=5e-3 if method == "power" else 1e-3)
    assert found.reason in CONVERGED


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_no_curvature(method: Any) -> None:
    found = block_eigenvalues(*quadratic([0.0] * 10), method=method)["block"]
    assert (found.value, found.reason, found.num_products) == (0.0, "zero", 1)


@given(st.lists(st.floats(-0.9, 0.9), max_size=30), st.sampled_from([-40.0, 0.5]), st.integers(0, 2**63 - 1))
def test_lanczos_is_within_the_tolerance(rest: list[float], truth: float, seed: int) -> None:
    loss, blocks = quadratic([truth, *(truth * share for share in rest)], seed % 1000)
    found = block_eigenvalues(loss, blocks, seed=seed)["block"]
    assert found.reason in CONVERGED and found.num_products <= 1 + len(rest)
    assert found.value == pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_what_ends_the_iteration(method: Any) -> None:
    spectrum = [10.0 * 0.99**k for k in range(200)]
    loss, blocks = quadratic(spectrum)
    limited = block_eigenvalues(loss, blocks, method=method, max_iter=3)["block"]
    assert (limited.reason, limited.num_products) == ("max_iter", 3)
    loose, tight = (
        block_eigenvalues(loss, blocks, method=method, tol=tol, max_iter=1000)["block"] for tol in (1e-1, 1e-5)
    )
    assert loose.reason == tight.reason == "tolerance"
    assert loose.num_products < tight.num_products and abs(tight.value - 10) < abs(loose.value - 10)


def test_lanczos_on_a_small_block_is_exact() -> None:
    found = block_eigenvalues(*quadratic([1.0, 5.0, 2.0]))["block"]
    assert (found.reason, found.num_products) == ("exact", 3) and found.value == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_not_finite(method: Any) -> None:
    x = nn.Parameter(torch.zeros(3))
    found = block_eigenvalues(lambda: (x.sqrt() * torch.tensor([1.0, 2.0, 3.0])).sum(), {"x": [x]}, method=method)["x"]
    assert math.isnan(found.value) and found.reason == "not finite"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED.with_suffix(".json").read_text())
    model = hf.BertForSequenceClassification(hf.BertConfig(**document["config"]))
    model.load_state_dict(load_file(RECORDED.with_suffix(".model.safetensors")))
    document["model"], document["batch"] = model, load_file(RECORDED.with_suffix(".batch.safetensors"))
    document["truth"] = [block["lambda_abs_max"] for block in document["dense"]["blocks"]]
    return document


@pytest.mark.parametrize("tol", [1e-2, 1e-4])
def test_the_recorded_model_against_its_dense_hessian(golden: Any, tol: float) -> None:
    model, batch = golden["model"], golden["batch"]
    with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
        assert model(**batch).loss.item() == pytest.approx(golden["loss_fp32"], rel=1e-6)
        found = block_eigenvalues(lambda: model(**batch).loss, blocks, tol=tol)
    assert list(found) == [f"bert.encoder.layer.{k}" for k in range(3)]
    assert all(one.reason in CONVERGED for one in found.values())
    for one, truth in zip(found.values(), golden["truth"], strict=True):
        assert one.value == pytest.approx(truth, rel=tol)


def test_power_iteration_is_the_published_one(golden: Any) -> None:
    model, batch = golden["model"], golden["batch"]
    with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
        found = block_eigenvalues(lambda: model(**batch).loss, blocks, method="power")
    assert [round(one.value, 2) for one in found.values()] == [11.19, 9.78, 9.77]
    assert [one.num_products for one in found.values()] == [8, 4, 4]


def test_several_losses_stand_for_their_mean(golden: Any) -> None:
    model, batch = golden["model"], golden["batch"]
    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
        whole = block_eigenvalues(lambda: model(**batch).loss, blocks)
        parts = block_eigenvalues([lambda half=half: model(**half).loss for half in halves], blocks)
    for name in whole:
        assert parts[name].value == pytest.approx(whole[name].value, rel=1e-5)
        assert parts[name].num_products == whole[name].num_products


@pytest.mark.parametrize(
    "change, text",
    [
        ({"loss": []}, "give a loss"),
        ({"blocks": {}}, "and a block to measure"),
        ({"blocks": {"a": []}}, "'a' must have parameters"),
        ({"blocks": {"a": [torch.zeros(2)]}}, "'a' must have parameters that all require a gradient"),
        ({"loss": lambda: torch.ones(2, requires_grad=True)}, "the loss must be a scalar tensor"),
        ({"loss": lambda: 1.0}, "the loss must be a scalar tensor"),
        ({"loss": lambda: torch.ones(())}, "depends on parameters which require a gradient"),
        ({"method": "lobpcg"}, "'lobpcg'"),
        ({"max_iter": 0}, "max_iter must be"),
        ({"tol": 0.0}, "tol above 0"),
        ({"tol": math.nan}, "tol above 0"),
        ({"stability": -1.0}, "stability at least 0"),
    ],
)
def test_wrong_arguments_are_told(change: dict[str, Any], text: str) -> None:
    loss, blocks = quadratic([1.0, 2.0])
    with pytest.raises(MoQError, match=text):
        block_eigenvalues(**{"loss": loss, "blocks": blocks, **change})


def attention(x: Tensor) -> Tensor:
    """PyTorch's fused attention, which has no second derivative on a CPU."""
    heads = x.view(1, 2, 4, 8)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_a_loss_that_cannot_be_differentiated_twice_is_told() -> None:
    x = nn.Parameter(torch.randn(64))
    before = x.tolist()
    with pytest.raises(MoQError, match=r"cannot be differentiated twice .*divergence"):
        block_eigenvalues(lambda: attention(x).square().sum(), {"x": [x]})
    assert x.grad is None and x.tolist() == before


def test_memory_is_freed_when_measuring_fails() -> None:
    x = nn.Parameter(torch.ones(64))
    alive: list[weakref.ref[Tensor]] = []

    def loss() -> Tensor:
        hidden = x.exp()
        alive.append(weakref.ref(hidden))
        return attention(hidden).square().sum()

    gc.disable()
    try:
        with pytest.raises(MoQError):
            block_eigenvalues(loss, {"x": [x]})
        block_eigenvalues(lambda: (alive.append(weakref.ref(h := x.exp())), h.sum())[1], {"x": [x]})
        # pytest's own record of the exception is a cycle.
        gc.collect()
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that measuring could leave a trace in."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state |= {
            f"{name}!{k}": (id(p), p._version, p.requires_grad) for k, p in module.named_parameters(recurse=False)
        }
        state |= {f"{name}?{k}": (id(b), b._version) for k, b in module.named_buffers(recurse=False)}
        state[name] = (module.training, id(vars(module).get("moq")), vars(module).get("forward"), type(module))
        state[f"{name} attributes"] = list(vars(module))
        state[f"{name}*"] = getattr(getattr(module, "config", None), "_attn_implementation", None)
    state["grad"] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state["values"] = [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    state["random"] = torch.get_rng_state()
    state["other random"] = random.getstate(), str(numpy.random.get_state())
    state["autocast"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return state


def assert_no_trace(before: dict[str, Any], after: dict[str, Any]) -> None:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return isinstance(b, Tensor) and torch.equal(a, b)
        return all(map(equal, a, b)) and len(a) == len(b) if isinstance(a, list) else bool(a == b)

    assert before.keys() == after.keys()
    assert [key for key in before if not equal(before[key], after[key])] == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_measuring_leaves_no_trace(tiny_bert: Any, tiny_batch: dict[str, Tensor], quantized: bool, fails: bool) -> None:
    if quantized:
        quantize_model(tiny_bert, {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": 2})
    tiny_bert.train()
    tiny_bert.bert.encoder.layer[1].eval()
    tiny_bert.bert.encoder.layer[0].output.dense.bias.requires_grad_(False)
    tiny_bert(**tiny_batch).loss.backward()
    found = Inventory.of(tiny_bert).layer_blocks()
    before = state_of(tiny_bert)
    with torch.autocast("cpu", torch.bfloat16):
        with contextlib.suppress(ZeroDivisionError), measuring(tiny_bert, found) as blocks:
            assert not tiny_bert.bert.encoder.layer[0].training and not torch.is_autocast_enabled("cpu")
            assert all(p.requires_grad for ps in blocks.values() for p in ps)
            tiny_bert.requires_grad_(False)
            for buffer in tiny_bert.buffers():
                buffer.zero_()
            tiny_bert.bert.longest = 7
            tiny_bert.bert.encoder.new = torch.zeros(2)
            torch.rand(3), random.random(), numpy.random.rand()
            if fails:
                raise ZeroDivisionError
        assert torch.is_autocast_enabled("cpu")
    assert_no_trace(before, state_of(tiny_bert))


def top(model: nn.Module, batch: dict[str, Tensor], **more: Any) -> list[float]:
    with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
        return [one.value for one in block_eigenvalues(lambda: model(**batch).loss, blocks, tol=1e-4, **more).values()]


@pytest.fixture
def eager(tiny_bert: Any, tiny_batch: dict[str, Tensor]) -> list[float]:
    model = copy.deepcopy(tiny_bert)
    model.set_attn_implementation("eager")
    return top(model, tiny_batch)


def test_sdpa_attention(tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float]) -> None:
    assert tiny_bert.config._attn_implementation == "sdpa"
    assert top(tiny_bert.train(), tiny_batch) == pytest.approx(eager, rel=1e-4)


def test_attention_without_a_second_derivative(
    tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float]
) -> None:
    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        raise AssertionError("used")

    hf.AttentionInterface.register("no_second_derivative", attention)
    tiny_bert.config._attn_implementation = "no_second_derivative"
    assert top(tiny_bert, tiny_batch) == pytest.approx(eager, rel=1e-4)
    assert tiny_bert.config._attn_implementation == "no_second_derivative"
    with pytest.raises(AssertionError, match="used"):
        tiny_bert(**tiny_batch)


def test_mixed_precision_forwards(
    tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float], monkeypatch: Any
) -> None:
    accelerator = Accelerator(cpu=True)
    # A machine without an accelerator refuses "fp16" at this place only.
    monkeypatch.setattr(type(accelerator), "mixed_precision", property(lambda self: "fp16"))
    monkeypatch.setattr(accelerator, "native_amp", True, raising=False)
    model = accelerator.prepare_model(tiny_bert)
    assert "_original_forward" in vars(model)
    patched = vars(model)["forward"]
    assert top(model, tiny_batch) == pytest.approx(eager, rel=1e-4)
    assert vars(model)["forward"] is patched


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(
    tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float], use_reentrant: bool
) -> None:
    tiny_bert.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    before = [vars(m).get("gradient_checkpointing") for m in tiny_bert.modules()]
    assert any(before)
    assert top(tiny_bert.train(), tiny_batch) == pytest.approx(eager, rel=1e-4)
    assert [vars(m).get("gradient_checkpointing") for m in tiny_bert.modules()] == before


def test_quantized_layers_are_measured_at_their_quantized_weights(
    tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float]
) -> None:
    config = {"quantize_bits": {"start_bits": 3, "target_bits": 3}, "quantize_groups": 4}
    quantize_model(tiny_bert, config)
    plain = dequantize_model(copy.deepcopy(tiny_bert))
    here = top(tiny_bert, tiny_batch)
    assert here == pytest.approx(top(plain, tiny_batch), rel=1e-6)
    assert here != pytest.approx(eager, rel=1e-2)
    assert {layer.moq.bits for layer in quant_layers(tiny_bert).values()} == {3}


def test_frozen_and_shared_parameters(tiny_bert: Any, tiny_batch: dict[str, Tensor], eager: list[float]) -> None:
    tiny_bert.requires_grad_(False)
    assert top(tiny_bert, tiny_batch) == pytest.approx(eager, rel=1e-4)
    first, second = tiny_bert.bert.encoder.layer
    second.output.dense.weight = first.output.dense.weight
    with measuring(tiny_bert, Inventory.of(tiny_bert).layer_blocks()) as blocks:
        assert second.output.dense.weight is first.output.dense.weight
        assert len({id(p) for ps in blocks.values() for p in ps}) == 2 * 16 - 1


def test_recurrent_layers_are_measured() -> None:
    lstm = nn.Sequential(nn.ModuleList([nn.LSTM(3, 4, batch_first=True)]))
    x = torch.randn(2, 5, 3)
    before = [id(w) for w in lstm[0][0]._flat_weights]
    with measuring(lstm, {"0": list(lstm.parameters())}) as blocks:
        found = block_eigenvalues(lambda: lstm[0][0](x)[0].square().sum(), blocks)["0"]
    assert abs(found.value) > 0 and [id(w) for w in lstm[0][0]._flat_weights] == before


SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


def test_the_layers_of_other_models_are_found() -> None:
    t5 = hf.AutoConfig.for_model("t5", vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    names = list(Inventory.of(hf.AutoModelForSeq2SeqLM.from_config(t5)).layer_blocks())
    assert names == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    vit = hf.AutoModel.from_config(hf.ViTConfig(image_size=8, patch_size=4, **SMALL))
    assert len(Inventory.of(vit).layer_blocks()) == 3
    assert {name.rpartition(".")[2] for name in Inventory.of(vit).layer_blocks()} == {"0", "1", "2"}


def test_the_list_may_be_named_and_limited(tiny_bert: Any) -> None:
    assert list(Inventory.of(tiny_bert).layer_blocks("bert.encoder.layer", 1)) == ["bert.encoder.layer.0"]
    assert list(Inventory.of(tiny_bert).layer_blocks(None, 2)) == list(Inventory.of(tiny_bert).layer_blocks())
    with pytest.raises(MoQError, match=r"'bert.encoder.layers' is not a list of layers .*: bert.encoder.layer \(2\)"):
        Inventory.of(tiny_bert).layer_blocks("bert.encoder.layers")
    with pytest.raises(MoQError, match=r"'bert.encoder' is not a list of layers"):
        Inventory.of(tiny_bert).layer_blocks("bert.encoder")
    with pytest.raises(MoQError, match=r"layer_num: 3 is more than there are: bert.encoder.layer has 2"):
        Inventory.of(tiny_bert).layer_blocks(None, 3)
    with pytest.raises(MoQError, match="no list of layers"):
        Inventory.of(nn.Sequential(nn.Linear(2, 2))).layer_blocks()


def test_normalized() -> None:
    nan, inf = math.nan, math.inf
    assert normalize({"a": 4.0, "b": 2.0, "c": 0.0}) == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert normalize({"a": 4.0, "b": nan, "c": inf, "d": 1.0}) == {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.25}
    assert normalize({"a": nan, "b": inf}) == {"a": 1.0, "b": 1.0} == normalize({"a": 0.0, "b": nan})
