"""`"lora": "merged"`: what PEFT's LoRA trains is the weight that is quantized, evaluated and delivered."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from model_zoo import CONFIG, Stranger, arguments, inputs_of, new_model, rows_of
from safetensors.torch import load_file, save_file
from stranger import outputs_of
from torch import nn

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQError,
    dequantize_model,
    hold_quantized,
    quantize_model,
    save_quantized,
    verify_quantized,
)
from moq_hf.model.convert import quant_layers, quantized_layers
from moq_hf.quantizer import fake_quantize, least_squares_ratio
from moq_hf.text import megabytes
from moq_hf.training.controller import MoQController
from moq_hf.training.measures import _squared_change
from moq_hf.training.measuring import measuring

TASK = "sequence classification"
MERGED = {**CONFIG, "lora": "merged"}
FIXED = {"quantize_bits": {"target_bits": 4}, "lora": "merged"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT's, of targets that are tied to a layer without an adapter.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]


def adapted(family: str = "BERT", task: str = TASK, seed: int | None = 1, **settings: Any) -> Any:
    """A model with LoRA, whose adapters are not zero unless there is no seed."""
    kind = "SEQ_CLS" if task == TASK else "CAUSAL_LM"
    settings = {"target_modules": ["query", "value"], "r": 4, **settings}
    model = peft.get_peft_model(new_model(family, task), peft.LoraConfig(task_type=kind, **settings))
    if seed is not None:
        randomize(model, seed)
    return model


def randomize(model: nn.Module, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 0.5 + torch.rand(parameter.shape, generator=source)
        elif "lora_" in name:
            # In place, since PEFT may have tied it to another one.
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=source))


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "all layers": {"target_modules": "all-linear"},
    "DoRA": {"use_dora": True},
    "trained copies": {"modules_to_save": ["pooler", "classifier"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_merged_weight_is_quantized(variant: str) -> None:
    """As rounding what PEFT merges, which sums in another order: hence the float comparison."""
    settings = VARIANTS[variant]
    merged = adapted(**settings).merge_and_unload()
    model = quantize_model(adapted(**settings), FIXED)
    names = {name.replace(".base_layer", ""): layer for name, layer in quant_layers(model).items()}
    prefix = "base_model.model."
    assert any(".base_layer" in name for name in quant_layers(model))
    for name, layer in names.items():
        name = name.removeprefix(prefix).replace(".modules_to_save.default", "")
        torch.testing.assert_close(layer.whole_weight(), merged.get_submodule(name).weight, rtol=1e-5, atol=1e-6)
        expected = fake_quantize(layer.whole_weight(), 4, layer.moq.grid, ratio=layer.moq.ratio)
        assert torch.equal(layer.quantized_copy(torch.float32), expected)
    assert any("pooler" in name for name in names) and not any("original_module" in name for name in names)


def test_globs_mean_layers_that_are_adapted() -> None:
    layers = quant_layers(quantize_model(adapted(), {**FIXED, "overrides": {"*.query": {"bits": 8}}}))
    queries = {name: layer.moq.bits for name, layer in layers.items() if ".query" in name}
    assert {*queries.values()} == {8} and all(name.endswith(".base_layer") for name in queries)
    assert any(layer.moq.bits == 4 for layer in layers.values())
    with pytest.raises(MoQError, match=r"cannot be merged into what stays in float: .*value"):
        quantize_model(adapted(), {**FIXED, "modules_to_not_convert": ["*.value"]})


@pytest.mark.parametrize("config", [FIXED, {"quantize_bits": {"target_bits": 4}}])
def test_gptq_beside_adapters_is_refused_before_the_first_step(config: Any, tmp_path: Path) -> None:
    model = adapted(target_modules="all-linear")
    callbacks = [MoQCallback({**config, "quantize_algo": {"gptq": 4}})]
    trainer = hf.Trainer(model, arguments(tmp_path), train_dataset=rows_of(TASK), callbacks=callbacks)
    with pytest.raises(
        MoQError, match=r"gptq: with PEFT.s adapters the quantized weights are frozen, or an adapter is merged"
    ):
        trainer.train()


def test_adapters_beside_the_model_are_counted_and_checked(tmp_path: Path) -> None:
    save_quantized(quantize_model(adapted(), bits=4), tmp_path / "beside")
    sizes = {path.relative_to(tmp_path): path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    found = verify_quantized(tmp_path / "beside")
    assert len(sizes) == 2 and found.file_bytes == sum(sizes.values())
    card = (tmp_path / "beside" / "README.md").read_text(encoding="utf-8")
    assert f"{megabytes(found.file_bytes)} instead of {megabytes(found.float_bytes)} in all" in card
    assert "PEFT's adapters are in the folder `adapter`, in float." in card
    place = tmp_path / "beside" / "adapter" / "adapter_model.safetensors"
    weights = load_file(place)
    weights[next(iter(weights))] += 1
    save_file(weights, place)
    with pytest.raises(MoQError, match=r"adapter/adapter_model.safetensors is missing or not as it was saved"):
        verify_quantized(tmp_path / "beside")
    merged = adapted()
    merged.add_adapter("adapter_2", peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    save_quantized(quantize_model(merged, bits=4), tmp_path / "two")
    assert {"adapter/adapter_config.json", "adapter/adapter_2/adapter_config.json"} <= {
        *verify_quantized(tmp_path / "two").state["adapters"]
    }
    (tmp_path / "two" / "adapter" / "adapter_2" / "adapter_config.json").unlink()
    with pytest.raises(MoQError, match=r"adapter_2/adapter_config.json is missing"):
        verify_quantized(tmp_path / "two")


def test_adapters_that_are_merged_may_be_taken_away(tmp_path: Path) -> None:
    folder = save_quantized(quantize_model(adapted(), FIXED), tmp_path / "merged")
    found = verify_quantized(folder)
    assert "lora/adapter_model.safetensors" in found.state["adapters"] and not found.adapter_bytes
    (folder / "lora" / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(MoQError, match=r"lora/adapter_model.safetensors is missing or not as it was saved"):
        verify_quantized(folder)
    shutil.rmtree(folder / "lora")
    verify_quantized(folder)


@pytest.mark.parametrize(("way", "variant"), [("merge_and_unload", "DoRA"), ("unload", "rslora")])
def test_unloading_leaves_the_layers_quantized(way: str, variant: str) -> None:
    """With the adapters in their weights, or without, as PEFT's methods say."""
    plain = getattr(adapted(**VARIANTS[variant]), way)()
    model = quantize_model(adapted(**VARIANTS[variant]), FIXED)
    outputs_of(model.eval(), inputs_of(TASK, model))
    model = getattr(model, way)()
    layers = quant_layers(model)
    assert not any("base_layer" in name for name, _ in model.named_modules()) and len(layers) > 4
    for name, layer in layers.items():
        weight = layer.whole_weight()
        assert torch.equal(weight, plain.get_submodule(name).weight)
        assert torch.equal(
            layer.quantized_copy(torch.float32), fake_quantize(weight, 4, layer.moq.grid, ratio=layer.moq.ratio)
        )
    dequantize_model(model)
    assert torch.equal(model.classifier.weight, plain.classifier.weight)


def test_gradients_are_those_of_the_merged_weight() -> None:
    """Straight through the rounding, to A, B and the magnitude alone: those of PEFT's own LoRA at that weight."""
    layer = nn.Linear(6, 5)
    model = peft.get_peft_model(nn.Sequential(layer), peft.LoraConfig(r=2, target_modules=["0"], lora_alpha=3))
    randomize(model, 1)
    quantize_model(model, {**FIXED, "quantize_heads": True})
    inputs, wanted = torch.randn(4, 6), torch.randn(4, 5)
    model.train()(inputs).backward(wanted)
    wrapper = model.base_model.model[0]
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    of_weight = wanted.t() @ inputs
    torch.testing.assert_close(b.grad, 1.5 * of_weight @ a.t())
    torch.testing.assert_close(a.grad, 1.5 * b.t() @ of_weight)
    assert layer.float_weight.grad is None


def test_evaluation_follows_the_adapters() -> None:
    """What is held does not outlive a change of the adapters: of values, of which are active, of their scale."""
    model = quantize_model(adapted("Llama", "causal LM", target_modules=["q_proj"]), FIXED).eval()
    inputs = inputs_of("causal LM", model)
    wrapper = model.base_model.model.model.layers[0].self_attn.q_proj

    with hold_quantized(model):
        follow_adapters(model, inputs, wrapper)


def follow_adapters(model: Any, inputs: Any, wrapper: Any) -> None:
    def answer() -> torch.Tensor:
        found = outputs_of(model, inputs)[0]
        assert torch.equal(outputs_of(model, inputs)[0], found)
        return found

    first = answer()
    with torch.no_grad():
        wrapper.lora_B["default"].weight.mul_(3)
    changed = answer()
    add_other(model)
    both = answer()
    model.set_adapter("other")
    other = answer()
    with model.disable_adapter():
        # As the reference model of DPO is: the base alone, on the grid of the merged weight.
        none, layer = answer(), wrapper.base_layer
        expected = fake_quantize(layer.float_weight, 4, layer.moq.grid, ratio=layer.moq.ratio)
        assert torch.equal(layer.quantized_weight(), expected)
    wrapper.set_scale("other", 2.0)
    found = [first, changed, both, other, none, answer()]
    assert all(not torch.equal(one, two) for index, one in enumerate(found) for two in found[:index])


def add_other(model: Any, **settings: Any) -> None:
    """A second adapter, active beside the first."""
    settings = {"target_modules": ["q_proj"], "r": 2, **settings}
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    randomize(model, 2)
    model.base_model.set_adapter(["default", "other"])


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [("c_attn", False, True), ("c_attn", True, False), ("wpe", False, False), ("wpe", True, True)],
)
def test_two_adapters_are_summed(target: str, first: bool, second: bool) -> None:
    """DoRA scales what the adapters before it have made of the weight, as in PEFT."""
    settings = {"target_modules": [target], "fan_in_fan_out": True}
    model = adapted("GPT-2", "causal LM", **settings, use_dora=first)
    add_other(model, **settings, use_dora=second)
    quantize_model(model, {**FIXED, "quantize_embeddings": 8})
    [layer, *_] = [layer for name, layer in quantized_layers(model).items() if f"{target}.base_layer" in name]
    before, found = layer.float_weight.clone(), layer.whole_weight()
    model.merge_and_unload()
    assert not torch.equal(layer.float_weight, before)
    torch.testing.assert_close(layer.float_weight, found)
    # What is merged already is not added once more.
    assert torch.equal(layer.whole_weight(), layer.float_weight)


def run(model: Any, folder: Path, task: str = TASK, config: Any = MERGED, resume: Any = None, **more: Any) -> Any:
    """A stock Trainer that has trained the model."""
    args = arguments(folder, **more)
    trainer = hf.Trainer(model, args, train_dataset=rows_of(task), callbacks=[MoQCallback(config)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


DELIVERED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "copies": ("BERT", TASK, {"modules_to_save": ["pooler", "classifier"], "use_dora": True}, {}),
    "Conv1D": ("GPT-2", "causal LM", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, {}),
    "tied": ("Llama", "causal LM", {"target_modules": ["q_proj", "embed_tokens"]}, {"quantize_embeddings": 8}),
}


@pytest.mark.parametrize("case", DELIVERED)
def test_what_was_evaluated_is_delivered(case: str, tmp_path: Path, stranger: Stranger) -> None:
    """To a process without moq_hf and PEFT, and to one that trains on with the adapter."""
    family, task, settings, more = DELIVERED[case]
    config = {**MERGED, **more}
    model = adapted(family, task, seed=None, **settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = run(model, tmp_path, task, config)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    folder, inputs = tmp_path / "quantized", inputs_of(task, model)
    reply = stranger.load(folder, model.get_base_model(), inputs)
    assert reply.get("equal"), reply
    found = verify_quantized(folder, model)
    assert found.proof.agrees and found.proof.largest_difference == 0.0
    assert not any("base_layer" in name or "modules_to_save" in name for name in found.layers)
    delivered = trainer.callback_handler.callbacks[0].delivered
    assert "PeftModel" not in delivered.how_to_load
    # The figures are of the model without adapters.
    whole = type(model.get_base_model())(model.config)
    assert found.state["parameters"]["total"] == sum(p.numel() for p in whole.parameters())
    again = peft.PeftModel.from_pretrained(new_model(family, task), folder / "lora", is_trainable=True)
    fixed = {**config, "quantize_bits": {"target_bits": 4}}
    quantize_model(again, fixed)
    copy_ratios(model, again)
    assert all([torch.equal(a, b) for a, b in zip(outputs_of(again, inputs), outputs_of(model, inputs), strict=True)])


def copy_ratios(one: nn.Module, other: nn.Module) -> None:
    """The clipping ratios of a run are those of its last search."""
    layers = quant_layers(other)
    for name, layer in quant_layers(one).items():
        layers[name].moq.ratio = layer.moq.ratio


def test_a_model_in_bfloat16_is_delivered(tmp_path: Path) -> None:
    model = adapted("Llama", "causal LM", target_modules=["q_proj", "up_proj"]).to(torch.bfloat16)
    quantize_model(model, FIXED)
    inputs = inputs_of("causal LM", model)
    save_quantized(model, tmp_path, inputs=inputs)
    assert verify_quantized(tmp_path, model).proof.agrees


def test_a_model_on_the_meta_device_is_delivered(tmp_path: Path) -> None:
    """The tensors that are given are merged where they lie."""
    config = {**FIXED, "quantize_algo": {"scale": "absmax"}}
    model = quantize_model(adapted(), config)
    with torch.device("meta"):
        empty = quantize_model(adapted(seed=None), config)
    save_quantized(empty, tmp_path, state_dict=model.state_dict())
    assert verify_quantized(tmp_path, model).layers


def test_a_resumed_run_delivers_the_same_bytes(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 3}
    run(adapted(seed=None, use_dora=True), tmp_path, **saved)
    expected = (tmp_path / "quantized" / "model.safetensors").read_bytes()
    run(adapted(seed=None, use_dora=True), tmp_path, resume=str(tmp_path / "checkpoint-3"), **saved)
    assert (tmp_path / "quantized" / "model.safetensors").read_bytes() == expected


# Where a graph is interrupted, Dynamo looks at the gradient of what comes in.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_checkpointing_and_compiling_train_the_same() -> None:
    def gradients(change: Any) -> list[torch.Tensor]:
        model = quantize_model(adapted(use_dora=True), FIXED)
        forward = change(model.train())
        torch.manual_seed(0)
        batch = {**inputs_of(TASK, model), "labels": torch.tensor([0, 1, 0, 1])}
        forward(**batch).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def checkpointed(model: Any) -> Any:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable()
        return model

    expected = gradients(lambda model: model)
    for change in (checkpointed, lambda model: torch.compile(model, backend="eager")):
        for found, wanted in zip(gradients(change), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
def test_plain_layers_have_the_merged_weights() -> None:
    model = quantize_model(adapted(), FIXED).eval()
    inputs = inputs_of(TASK, model)
    expected = outputs_of(model, inputs)[0]
    dequantize_model(model)
    assert torch.equal(outputs_of(model, inputs)[0], expected)
    assert torch.equal(outputs_of(model.merge_and_unload(), inputs)[0], expected)
    model = quantize_model(adapted(), FIXED)
    with model.disable_adapter():
        # There are no adapters in these weights.
        expected = outputs_of(model, inputs)[0]
        assert torch.equal(outputs_of(dequantize_model(model), inputs)[0], expected)
    model = dequantize_model(quantize_model(adapted(), FIXED), weights="float")
    assert torch.equal(outputs_of(model, inputs)[0], outputs_of(adapted(), inputs)[0])


def test_sensitivity_is_that_of_the_merged_weight() -> None:
    """The loss is differentiated by quantized weights with the adapters in them, once."""

    def measured(model: nn.Module, lora: str | None) -> list[torch.Tensor]:
        quantize_model(model, {**FIXED, "lora": lora})
        layers = [layer for name, layer in quant_layers(model).items() if "query" in name]
        batch = {**inputs_of(TASK, model), "labels": torch.tensor([0, 1, 0, 1])}
        with measuring(model, {"queries": [layer.float_weight for layer in layers]}) as blocks:
            gradients = torch.autograd.grad(model(**batch).loss, blocks["queries"])
        return [*gradients, torch.tensor([_squared_change(layer) for layer in layers])]

    found, expected = measured(adapted(), "merged"), measured(adapted().merge_and_unload(), None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_ratios_are_searched_for_the_merged_weight() -> None:
    config = MoQConfig.from_dict({**FIXED, "quantize_algo": {"scale_refresh": 1}})
    controller = MoQController(adapted(seed=None), config, 10)
    layer = next(layer for name, layer in controller.layers.items() if name.endswith("query.base_layer"))
    before = layer.moq.ratio
    randomize(controller.model, 1)
    controller.step()
    assert not torch.equal(layer.moq.ratio, before)
    assert torch.equal(layer.moq.ratio, least_squares_ratio(layer.whole_weight(), 4, layer.moq.grid))


def test_an_adapter_that_changed_the_float_base_is_not_delivered_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start, is_kept in (("pissa", False), ("orthogonal", True)):
        model = quantize_model(adapted(init_lora_weights=start), FIXED)
        save_quantized(model, tmp_path / start, inputs=inputs_of(TASK, model))
        proof = verify_quantized(tmp_path / start).proof
        assert proof is not None and proof.agrees and (tmp_path / start / "lora").exists() == is_kept
        assert (f"lora ({start} changed the float base at its start" in caplog.text) != is_kept
    config = json.loads((tmp_path / "orthogonal" / "lora" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["init_lora_weights"] is True


def test_no_adapter_is_delivered_with_a_path(tmp_path: Path) -> None:
    """PEFT has a folder, with a config of its own, for each adapter but one."""
    new_model("Llama", "causal LM").save_pretrained(tmp_path / "base")
    model = adapted("Llama", "causal LM", target_modules=["q_proj"])
    add_other(model)
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(tmp_path / "base")
    save_quantized(quantize_model(model, FIXED), tmp_path / "quantized")
    configs = list((tmp_path / "quantized" / "lora").rglob("adapter_config.json"))
    assert len(configs) == 2
    assert all(json.loads(config.read_text())["base_model_name_or_path"] is None for config in configs)


def wrapped(config: Any) -> Any:
    return peft.get_peft_model(new_model("BERT", TASK), config)


def with_add_adapter() -> Any:
    """transformers would save its adapters alone."""
    model = new_model("BERT", TASK)
    model.add_adapter(peft.LoraConfig(target_modules=["query"]))
    return model


def of_convolution() -> Any:
    layers = nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 2))
    return peft.get_peft_model(layers, peft.LoraConfig(target_modules=["0"], r=2))


def llama(*targets: str, **settings: Any) -> Any:
    return adapted("Llama", "causal LM", target_modules=list(targets), **settings)


def of_parameter() -> Any:
    """Its layers are square, so that the product would have the right shape."""
    return adapted("GPT-2", "causal LM", target_modules=[], target_parameters=["attn.c_proj.weight"])


SEQ_CLS = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
TWO = "two adapters for one weight: set ensure_weight_tying, without DoRA"
TIED = {"ensure_weight_tying": True}
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (
        lambda: adapted(lora_dropout=0.1),
        r"lora_dropout is 0\.1, .* set lora_dropout to 0 \(.*query\.base_layer",
    ),
    "bias": (lambda: adapted(lora_bias=True), "lora_bias trains a second bias: set it to False"),
    "float": (lambda: llama("q_proj", "lm_head"), "what stays in float: quantize it"),
    "aLoRA": (lambda: llama("q_proj", alora_invocation_tokens=[5]), "ALoraLinearVariant is neither"),
    "parameters": (of_parameter, "target_parameters cannot be merged: adapt layers with target_modules"),
    "groups": (of_convolution, r"a convolution with groups cannot be merged.*model\.0\.base_layer"),
    "none": (lambda: new_model("BERT", TASK), r"needs a model with LoRA from peft\.get_peft_model: call that first"),
    "add_adapter": (with_add_adapter, r"needs a model with LoRA from peft\.get_peft_model: call that first"),
    "IA3": (lambda: wrapped(peft.IA3Config(**SEQ_CLS, feedforward_modules=[])), "Linear of PEFT is not LoRA"),
    "AdaLoRA": (lambda: wrapped(peft.AdaLoraConfig(**SEQ_CLS, total_step=9)), "SVDLinear of PEFT is not LoRA"),
    "tied": (lambda: llama("embed_tokens", "lm_head"), TWO),
    # Its layers have magnitudes of their own, of the rows of one and of the columns of the other.
    "tied DoRA": (lambda: llama("embed_tokens", **TIED, use_dora=True), TWO),
}


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1")
@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_merged_is_told(case: str) -> None:
    make, text = ERRORS[case]
    more = {"quantize_convolutions": True} if case == "groups" else {}
    if "tied" in case:
        more = {"quantize_embeddings": 8}
    with pytest.raises(MoQError, match=text):
        quantize_model(make(), {**FIXED, **more})


def test_xlora_mixes_what_the_layers_of_lora_compute(tmp_path: Path) -> None:
    llama("q_proj").save_pretrained(tmp_path)
    base = new_model("Llama", "causal LM")
    base.config.use_cache = False
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(tmp_path)})
    with pytest.raises(MoQError, match="XLoraLinearLayer of PEFT is not LoRA"):
        quantize_model(peft.get_peft_model(base, config), FIXED)


def test_layers_that_share_a_weight_may_share_an_adapter() -> None:
    quantize_model(llama("embed_tokens", **TIED), {**FIXED, "quantize_embeddings": 8})
