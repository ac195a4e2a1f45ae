"""`"train": "scales"`: codes are frozen, scales train, and what they give is evaluated, delivered and resumed."""

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from experts import mixture
from safetensors.torch import load_file
from tiny_runs import Stop, arguments, assert_same, new_model, rows, weights
from torch import Tensor, nn

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQConfigError,
    MoQError,
    MoQTrainer,
    dequantize_model,
    hold_quantized,
    quantize_model,
    quantizer,
    save_quantized,
    verify_quantized,
)
from moq_hf.export.floats import export_floats
from moq_hf.export.gguf import export_gguf
from moq_hf.memory import memory_of
from moq_hf.model.convert import quant_layers
from moq_hf.packed.pack import pack_checkpoint
from moq_hf.training.controller import MoQController
from moq_hf.weight_matrix import to_rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PLAIN: dict[str, Any] = {"bits": 3, "group_size": 8, "embeddings": None}
SCALES: dict[str, Any] = {**PLAIN, "train": "scales"}
IDS = {"input_ids": torch.stack([row["input_ids"] for row in rows(8)])}
GRIDS: dict[str, dict[str, Any]] = {
    "narrow": {"bits": 4, "range": "narrow"},
    "full": {"bits": 4, "group_size": 8, "range": "full"},
    "asymmetric": {"bits": 8, "q_type": "asymmetric"},
    "asymmetric groups": {"bits": 2, "group_size": 8, "q_type": "asymmetric"},
    "row blocks": {"bits": 5, "groups": 4},
    "binary": {"bits": 1},
    "ternary": {"bits": 2, "range": "narrow"},
    "wide": {"bits": 12},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "bfloat16 scales": {"bits": 4, "scale_dtype": "bfloat16"},
    "float16 scales": {"bits": 4, "scale_dtype": "float16", "scale": "absmax"},
    "rounded inputs": {"bits": 8, "activations": {"scale": "per_token"}},
}


def bert(size: int = 32) -> Any:
    hf.set_seed(7)
    config = hf.BertConfig(
        vocab_size=60,
        hidden_size=size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForSequenceClassification(config).eval()


def logits(model: Any, inputs: Any = IDS) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def scales_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def step(model: Any, inputs: Any = IDS, rate: float = 0.5) -> None:
    """One of gradient descent, of another loss each time."""
    model.train()
    model(**inputs).logits.square().mean().backward()
    for parameter in scales_of(model).values():
        if parameter.grad is not None:
            parameter.data -= rate * parameter.grad
            parameter.grad = None
    model.eval()


@pytest.mark.parametrize("grid", GRIDS)
def test_it_begins_as_rounded_trains_and_is_delivered_bit_for_bit(grid: str, tmp_path: Path) -> None:
    config = {"embeddings": None, **GRIDS[grid]}
    rounded = quantize_model(bert(), config)
    model = quantize_model(bert(), config, train="scales")
    assert torch.equal(logits(model), logits(rounded))
    assert all(name.endswith(".weight_scale") for name in scales_of(model))
    for _ in range(3):
        step(model, rate=0.05)
    assert not torch.equal(logits(model), logits(rounded))
    for name, layer in quant_layers(model).items():
        # Codes stay, and the weight is (code - zero point) * scale.
        start = quant_layers(rounded)[name].moq
        matrix = to_rows(layer.float_weight, layer.kind)
        codes, _, zero = quantizer.quantize(matrix, start.bits, start.grid, ratio=start.ratio)
        made = layer.moq.trained.quantized(layer.moq.precision)
        assert torch.equal(made.codes.int(), codes)
        assert torch.equal(layer.quantized_copy(torch.float32), quantizer.dequantize(codes, made.scale, zero))
    folder = save_quantized(model, tmp_path / "packed", inputs=IDS)
    assert verify_quantized(folder, model).proof.agrees
    assert torch.equal(logits(type(model).from_pretrained(folder).eval()), logits(model))
    again = dequantize_model(copy.deepcopy(model))
    if grid != "rounded inputs":
        assert torch.equal(logits(again), logits(model))
    assert list(again.state_dict()) == list(bert().state_dict())


@pytest.mark.parametrize("grouping", [{"groups": 4}, {"group_size": 8}, {}, {"q_type": "asymmetric"}])
def test_the_gradient_is_that_of_the_formula(grouping: dict[str, Any]) -> None:
    model = quantize_model(bert(), bits=4, embeddings=None, train="scales", **grouping)
    layer = quant_layers(model)["bert.pooler.dense"]
    start = layer.moq.trained.start
    scale = layer.moq.trained.parameter.detach().clone().requires_grad_()
    direction = torch.randn(32, 32)
    (layer.quantized_weight() * direction).sum().backward()
    steps = start.codes.float()
    if start.zero_point is not None:
        steps = steps - quantizer.per_weight(start.zero_point, steps.shape)
    (quantizer.per_weight(scale, steps.shape) * steps * direction).sum().backward()
    torch.testing.assert_close(layer.moq.trained.parameter.grad, scale.grad)
    assert layer.float_weight.grad is None


def run(folder: Path, config: Any = SCALES, callbacks: Any = (), **more: Any) -> hf.Trainer:
    callback = MoQCallback(config)
    trainer = hf.Trainer(
        new_model(),
        arguments(folder, **{"learning_rate": 2e-3, **more}),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return trainer


def test_a_stock_trainer_optimizes_scales_alone(tmp_path: Path) -> None:
    start = new_model().state_dict()
    trainer = run(tmp_path)
    known = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    scales = scales_of(trainer.model)
    assert known == {id(p) for p in scales.values()} and len(scales) == 13
    assert len(trainer.optimizer.state_dict()["state"]) == 13
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], start[name]) for name in start)
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, MoQCallback))
    assert callback.delivered.proof.agrees


@pytest.mark.parametrize("more", [{}, {"gptq": 8}], ids=["rounded", "gptq"])
def test_a_killed_run_resumes_bit_for_bit(more: dict[str, Any], tmp_path: Path) -> None:
    config = {**SCALES, **more}
    saving = {"save_strategy": "steps", "save_steps": 8}
    whole = run(tmp_path / "whole", config, **saving)
    run(tmp_path / "part", config, [Stop(8)], **saving)
    again = hf.Trainer(
        new_model(),
        arguments(tmp_path / "part", learning_rate=2e-3, **saving),
        train_dataset=rows(),
        callbacks=[MoQCallback(config)],
    )
    again.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-8"))
    assert_same(weights(again), weights(whole))
    names = ("whole", "part")
    assert_same(*(load_file(tmp_path / name / "quantized" / "model.safetensors") for name in names))
    # A checkpoint is one of float weights, with the scales beside them.
    checkpoint = tmp_path / "whole" / "checkpoint-16"
    plain = type(new_model()).from_pretrained(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    scales = {name for name in stored if name.endswith("_scale")}
    assert len(scales) == 13 and stored.keys() - scales == plain.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in plain.state_dict().items())
    pack_checkpoint(checkpoint, tmp_path / "packed")
    assert_same(*(load_file(f / "model.safetensors") for f in (tmp_path / "packed", tmp_path / "whole" / "quantized")))


def test_the_checkpoint_of_experts_is_packed_as_the_run_delivers(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"] % 48, "labels": row["input_ids"] % 48} for row in rows()]
    args = arguments(tmp_path, max_steps=2, learning_rate=2e-3, save_strategy="steps", save_steps=2)
    config = {"bits": 4, "group_size": 16, "embeddings": None, "train": "scales"}
    hf.Trainer(mixture("Mixtral"), args, train_dataset=data, callbacks=[MoQCallback(config)]).train()
    pack_checkpoint(tmp_path / "checkpoint-2", tmp_path / "packed")
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("packed", "quantized")))


def test_what_a_run_holds() -> None:
    model = bert()
    held = memory_of(MoQController(model, MoQConfig(**SCALES), 1))
    scales = 4 * sum(parameter.numel() for parameter in scales_of(model).values())
    floats = 4 * sum(parameter.numel() for parameter in bert().parameters())
    codes = sum(layer.float_weight.numel() for layer in quant_layers(model).values())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert held["gradients"] == scales and held["weights"] == floats + scales + codes + buffers


def test_a_checkpoint_loads_into_a_quantized_model(tmp_path: Path) -> None:
    trainer = run(tmp_path, save_strategy="steps", save_steps=16)
    model = quantize_model(new_model(), SCALES).eval()
    model.load_state_dict(load_file(tmp_path / "checkpoint-16" / "model.safetensors"))
    assert torch.equal(logits(model), logits(trainer.model.eval()))
    # Scales of other weights mean nothing.
    other = type(model)(model.config).state_dict()
    model.load_state_dict(other, strict=False)
    plain = type(model)(model.config).eval()
    plain.load_state_dict(other)
    assert torch.equal(logits(model), logits(quantize_model(plain, PLAIN)))


def test_the_best_checkpoint_is_delivered(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    trainer = MoQTrainer(
        new_model(),
        arguments(
            tmp_path,
            learning_rate=2e-3,
            save_strategy="steps",
            save_steps=4,
            eval_strategy="steps",
            eval_steps=4,
            **best,
        ),
        train_dataset=rows(),
        eval_dataset=rows(8),
        compute_metrics=lambda _: {"score": float(trainer.state.global_step == 8)},
        moq_config=SCALES,
    )
    trainer.train()
    assert trainer.state.best_global_step == 8
    stored = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    assert all(torch.equal(stored[name], p) for name, p in trainer.model.named_parameters())
    assert trainer.moq.delivered.proof.agrees


def task(count: int = 256) -> list[dict[str, Any]]:
    ids = torch.randint(5, 60, (count, 10), generator=torch.Generator().manual_seed(1))
    # Some labels are wrong, so that the model is not too sure of any.
    return [{"input_ids": row, "labels": int((row > 30).sum() > 5) ^ (index % 8 == 0)} for index, row in enumerate(ids)]


def test_it_comes_nearer_to_its_teacher_than_rounding(tmp_path: Path) -> None:
    settings = {"learning_rate": 5e-3, "max_steps": 150, "per_device_train_batch_size": 32}
    teacher = bert()
    hf.Trainer(teacher, arguments(tmp_path / "float", **settings), train_dataset=task()).train()
    batch = {"input_ids": torch.stack([row["input_ids"] for row in task()])}
    wanted = logits(teacher.eval(), batch)
    config = {"bits": 2, "group_size": 16, "embeddings": None}

    def distance(model: Any) -> float:
        return float((logits(model.eval(), batch) - wanted).square().mean())

    rounded = distance(quantize_model(copy.deepcopy(teacher), config))
    trainer = MoQTrainer(
        copy.deepcopy(teacher),
        arguments(tmp_path, **{**settings, "learning_rate": 1e-3, "logging_steps": 10}),
        train_dataset=task(),
        moq_config={**config, "train": "scales"},
        teacher=teacher,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[-1]["loss"] < 0.9 * logs[0]["loss"]
    assert logs[-1]["moq/loss_hidden"] < 0.5 * logs[0]["moq/loss_hidden"]
    assert distance(trainer.model) < 0.5 * rounded
    assert trainer.moq.delivered.proof.agrees


ENDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
LLAMA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "experts": (lambda: mixture("Mixtral"), {"bits": 4, "group_size": 16}),
    "transposed experts": (lambda: mixture("GPT-OSS"), {"bits": 4, "group_size": 16}),
    "experts in blocks": (lambda: mixture("Qwen3-MoE"), {"bits": 4, "groups": 2}),
    "tied head": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **ENDS, tie_word_embeddings=True)),
        {"bits": 4, "embeddings": 4, "group_size": 16, "heads": True},
    ),
    "GPT-2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, **ENDS)
        ),
        {"bits": 4, "group_size": 16},
    ),
    "ALBERT": (
        lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(**{**LLAMA, "vocab_size": 64}, embedding_size=16, max_position_embeddings=32, **ENDS)
        ),
        {"bits": 3, "group_size": 8},
    ),
    "bfloat16": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **ENDS)).to(torch.bfloat16),
        {"bits": 4, "group_size": 16, "serve": ["vllm"]},
    ),
}
TOKENS = {"input_ids": torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("case", OTHERS)
def test_other_weights(case: str, tmp_path: Path) -> None:
    make, config = OTHERS[case]
    hf.set_seed(1)
    plain = make().eval()
    config = {"embeddings": None, **config}
    rounded = logits(quantize_model(copy.deepcopy(plain), config), TOKENS)
    model = quantize_model(copy.deepcopy(plain), config, train="scales")
    assert torch.equal(logits(model, TOKENS), rounded)
    for _ in range(3):
        step(model, TOKENS)
    assert not torch.equal(logits(model, TOKENS), rounded)
    folder = save_quantized(model, tmp_path / "packed", inputs=TOKENS)
    assert verify_quantized(folder, model).proof.agrees
    # As a checkpoint, and copied.
    model.save_pretrained(tmp_path / "float")
    assert_same(type(plain).from_pretrained(tmp_path / "float").state_dict(), plain.state_dict())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
        step(again, TOKENS)
        assert not torch.equal(logits(again, TOKENS), logits(model, TOKENS))


def test_what_does_not_go_with_frozen_codes_is_an_error() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "start_bits: bits fall": {"start_bits": 8},
        r"start_bits: bits fall \(3 bits \(\*.0.\*: 8 to 3 bits\)\).*in overrides too": {
            "overrides": {"*.0.*": {"start_bits": 8}}
        },
        "offset: weights train before it": {"offset": 10},
        "rounding: each step draws": {"rounding": "stochastic"},
        "scale_refresh: no ratio": {"scale_refresh": 10},
        "blend.enabled: float weights": {"blend": {"enabled": True}},
        "lora: adapters change": {"lora": "merged"},
        "bits: a budget": {"bits": {"mean": 3.0}},
    }
    for text, more in wrong.items():
        with pytest.raises(MoQConfigError, match=text):
            MoQConfig(**{**SCALES, **more})
    with pytest.raises(MoQConfigError, match="did you mean"):
        MoQConfig(bits=4, train="scale")
    with pytest.raises(MoQError, match="float_first trains the weights"):
        MoQTrainer(new_model(), moq_config=SCALES, float_first=True)


def test_a_config_has_the_key_where_it_is_not_the_default() -> None:
    config = MoQConfig(**SCALES)
    assert config.to_dict()["train"] == "scales" and "train" not in MoQConfig(bits=4).to_dict()
    assert MoQConfig.from_dict(config.to_dict()) == config
    assert MoQConfig.from_dict({"quantize_training": config.to_deepspeed()}) == config


def test_layers_and_models_for_which_it_is_not() -> None:
    lora = peft.LoraConfig(target_modules=["query"], r=2)
    with pytest.raises(MoQError, match="PEFT's adapters: merge them first"):
        quantize_model(peft.get_peft_model(new_model(), lora), SCALES)
    damaged = new_model()
    damaged.bert.pooler.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(MoQError, match=r"bert.pooler.dense.weight cannot be quantized: weight holds NaN"):
        quantize_model(damaged, SCALES)
    assert list(damaged.state_dict()) == list(new_model().state_dict())
    assert all(parameter.requires_grad for parameter in damaged.parameters())


def test_an_optimizer_without_the_scales_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    def trainer(model: Any, **more: Any) -> hf.Trainer:
        args = arguments(tmp_path, max_steps=2)
        return hf.Trainer(model, args, train_dataset=rows(), callbacks=[MoQCallback(SCALES)], **more)

    def sgd(model: nn.Module) -> tuple[Any, None]:
        return torch.optim.SGD([*scales_of(model).values()], 1e-3), None

    plain, rounded = new_model(), quantize_model(new_model(), SCALES)
    for wrong in (trainer(plain, optimizers=sgd(plain)), trainer(None, model_init=new_model)):
        with pytest.raises(MoQError, match=r"the optimizer does not have the scales.*quantize_model\(model, config\)"):
            wrong.train()
        assert wrong.state.global_step == 0
    for right in (
        trainer(rounded, optimizers=sgd(rounded)),
        trainer(None, model_init=lambda: quantize_model(new_model(), SCALES)),
    ):
        start = {name: p.detach().clone() for name, p in scales_of(rounded).items()}
        right.train()
        ends = scales_of(right.model)
        assert any(not torch.equal(ends[name], scale) for name, scale in start.items())


@pytest.mark.parametrize("engine", ["is_deepspeed_enabled", "is_fsdp_enabled", "_n_gpu"])
def test_engines_that_take_models_apart_are_an_error(engine: str, tmp_path: Path) -> None:
    class Apart(hf.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            setattr(self.args if engine == "_n_gpu" else self, engine, 2)

    with pytest.raises(MoQError, match="train on one device or with DDP"):
        Apart(new_model(), arguments(tmp_path), train_dataset=rows(), callbacks=[MoQCallback(SCALES)])


def test_what_is_unfrozen_trains_too_and_a_second_call_goes_on(tmp_path: Path) -> None:
    model = new_model()
    ends = []
    for rate in (2e-3, 0.0):
        callback = MoQCallback(SCALES)
        args = arguments(tmp_path / str(rate), max_steps=4, learning_rate=rate)
        trainer = hf.Trainer(model, args, train_dataset=rows(), callbacks=[callback])
        model.classifier.requires_grad_(True)
        trainer.train()
        assert callback.delivered.proof.agrees
        ends.append(weights(trainer))
    assert not torch.equal(ends[0]["classifier.weight"], new_model().classifier.weight)
    assert_same(*ends)


@pytest.mark.parametrize("after", [PLAIN, {**SCALES, "enabled": False}], ids=["weights", "off"])
def test_another_config_takes_the_scales_away(after: dict[str, Any], tmp_path: Path) -> None:
    model = run(tmp_path, max_steps=2).model
    quantize_model(model, after)
    assert list(model.state_dict()) == list(new_model().state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model.eval()), logits(quantize_model(new_model(), after).eval()))


@pytest.mark.parametrize("gptq", [0, 8])
def test_gptq_leaves_codes_alone_whose_scales_are_trained(
    gptq: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounded twice, a weight may have other codes, for which the scales were not trained."""
    model = run(tmp_path, {**SCALES, "gptq": gptq}, max_steps=2).model.eval()
    assert "GPTQ leaves" not in caplog.text
    before = logits(model)
    again = arguments(tmp_path, max_steps=1, learning_rate=0.0)
    callback = MoQCallback(**SCALES, gptq=8)
    hf.Trainer(model, again, train_dataset=rows(), callbacks=[callback]).train()
    assert "GPTQ leaves 13 layers as they are, whose scales were trained already" in caplog.text
    assert torch.equal(logits(model.eval()), before)
    quantize_model(model, SCALES, gptq=8, inputs=IDS)
    assert torch.equal(logits(model), before)
    # Those of other bits are made by it.
    others = {**SCALES, "bits": 4}
    rounded = quantize_model(copy.deepcopy(model), others)
    assert not torch.equal(logits(quantize_model(model, others, gptq=8, inputs=IDS)), logits(rounded))


def test_a_copy_can_be_unfrozen() -> None:
    model = quantize_model(bert(), SCALES)
    assert all(p.requires_grad for p in dequantize_model(copy.deepcopy(model)).parameters())
    changed = quantize_model(bert(), SCALES)
    changed.classifier.bias = None
    assert all(p.requires_grad for p in dequantize_model(changed).parameters())
    frozen = bert()
    frozen.bert.embeddings.requires_grad_(False)
    left = dequantize_model(copy.deepcopy(quantize_model(frozen, SCALES)))
    assert {name for name, p in left.named_parameters() if not p.requires_grad} == {
        f"bert.embeddings.{name}" for name, _ in frozen.bert.embeddings.named_parameters()
    }


@pytest.mark.parametrize("more", [{"bits": 4}, {"group_size": 16}])
def test_scales_begin_anew_for_other_codes(more: dict[str, Any]) -> None:
    model = quantize_model(bert(), SCALES)
    step(model)
    quantize_model(model, {**SCALES, **more})
    assert torch.equal(logits(model), logits(quantize_model(bert(), {**PLAIN, **more})))


@pytest.mark.parametrize("more", [{"range": "narrow"}, {"range": "full"}, {"q_type": "asymmetric"}, {"bits": 1}])
def test_a_scale_keeps_its_sign(more: dict[str, Any], tmp_path: Path) -> None:
    model = quantize_model(bert(), {**SCALES, **more})
    state = quant_layers(model)["bert.pooler.dense"].moq
    signs = state.trained.quantized(state.precision).scale.sign()
    for parameter in scales_of(model).values():
        parameter.data.neg_()
    crossed = state.trained.quantized(state.precision).scale
    assert torch.equal(crossed.sign(), signs) and float(crossed.abs().max()) == torch.finfo(torch.float32).tiny
    assert verify_quantized(save_quantized(model, tmp_path / "packed", inputs=IDS), model).proof.agrees
    step(model)
    assert state.trained.parameter.isfinite().all()


def test_a_scale_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Diverges(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.bert.pooler.dense.weight_scale.data.fill_(torch.nan)

    with pytest.raises(MoQError, match=r"NaN or Inf in bert.pooler.dense.weight"):
        run(tmp_path, callbacks=[Diverges()])


def test_held_weights_follow_the_scales() -> None:
    model = quantize_model(bert(), SCALES)
    with torch.no_grad(), hold_quantized(model):
        before = model(**IDS).logits
        for parameter in scales_of(model).values():
            parameter.mul_(1.5)
        after = model(**IDS).logits
    assert torch.equal(after, logits(model)) and not torch.equal(before, after)


def test_given_parameters_are_those_that_count() -> None:
    model = quantize_model(bert(), SCALES)
    given = {name: 1.5 * parameter for name, parameter in scales_of(model).items()}
    with torch.no_grad():
        found = torch.func.functional_call(model, given, kwargs=IDS).logits
    for parameter in scales_of(model).values():
        parameter.data.mul_(1.5)
    assert torch.equal(found, logits(model))


def test_a_compiled_model_trains_the_same_scales() -> None:
    model = quantize_model(bert(), SCALES).train()
    compiled = torch.compile(model, backend="aot_eager")
    gradients = []
    for each in (model, compiled):
        each(**IDS).logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in scales_of(model).items()})
        for parameter in model.parameters():
            parameter.grad = None
    assert_same(*gradients)
    step(model)
    with torch.no_grad():
        assert torch.equal(compiled(**IDS).logits, logits(model))


def test_an_exported_program_computes_with_them() -> None:
    model = quantize_model(bert(), SCALES)
    step(model)
    program = torch.export.export(model, (), dict(IDS)).module()
    with torch.no_grad():
        assert torch.equal(program(**IDS).logits, logits(model))


def test_gptq_comes_before(tmp_path: Path) -> None:
    model = quantize_model(bert(), **SCALES, gptq=8, inputs=IDS)
    assert torch.equal(logits(model), logits(quantize_model(bert(), **PLAIN, gptq=8, inputs=IDS)))
    step(model)
    assert verify_quantized(save_quantized(model, tmp_path / "packed", inputs=IDS), model).proof.agrees


def test_a_loaded_model_trains_in_a_stock_trainer_and_saves_packed(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path / "float")
    model = type(new_model()).from_pretrained(tmp_path / "float", quantization_config=MoQConfig(**SCALES))
    args = arguments(tmp_path / "run", max_steps=2, learning_rate=2e-3)
    hf.Trainer(model, args, train_dataset=rows()).train()
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "packed").eval()), logits(model.eval()))


def test_convolutions(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    plain = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    pictures = {"pixel_values": torch.randn(2, 3, 16, 16)}
    config = {"bits": 4, "convolutions": True, "embeddings": None}
    model = quantize_model(copy.deepcopy(plain), **config, train="scales")
    assert torch.equal(logits(model, pictures), logits(quantize_model(plain, config), pictures))
    step(model, pictures)
    assert verify_quantized(save_quantized(model, tmp_path / "packed", inputs=pictures), model).proof.agrees


def test_gguf_holds_them(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_base import write_base

    config = hf.LlamaConfig(**LLAMA, **ENDS, num_key_value_heads=2)
    grid = {"bits": 4, "group_size": 32, "range": "full", "serve": ["llama.cpp"]}
    model = quantize_model(hf.LlamaForCausalLM(config).eval(), **grid, embeddings=None, train="scales")
    step(model, TOKENS)
    folder = save_quantized(model, tmp_path / "packed", inputs=TOKENS)
    export_floats(folder, tmp_path / "floats")
    base = write_base(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "floats"), tmp_path / "base.gguf")
    assert export_gguf(folder, tmp_path / "out.gguf", base).weight_error == 0


@pytest.mark.parametrize("first, second", [(PLAIN, SCALES), (SCALES, PLAIN)])
def test_a_run_goes_on_as_it_began(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, first, [Stop(8)], save_strategy="steps", save_steps=8)
    args = arguments(tmp_path, learning_rate=2e-3)
    trainer = hf.Trainer(new_model(), args, train_dataset=rows(), callbacks=[MoQCallback(second)])
    with pytest.raises(MoQError, match=f'of a run with train: "{first.get("train", "weights")}"'):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
