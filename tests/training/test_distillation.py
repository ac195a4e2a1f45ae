import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import FAMILIES
from model_zoo import CASES, class_of, rows_of
from model_zoo import FAMILIES as CONFIGS
from transformers.modeling_outputs import ModelOutput

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQConfigError,
    MoQDistillation,
    MoQError,
    MoQTrainer,
    quantize_model,
    save_quantized,
)
from moq_hf.config_fields import DistillationConfig
from moq_hf.model.convert import quant_layers
from moq_hf.training.distillation import (
    fingerprint,
    labels_at_logits,
    load_teacher,
    logits_in,
    loss_parts,
    switch_off_dropout,
    weighted,
)

CONFIG: dict[str, Any] = {
    "quantize_bits": {"start_bits": 4, "target_bits": 2},
    "quantize_schedule": {"quantize_period": 1, "allow_unreached": True},
}
EIGHT = {**CONFIG, "quantize_bits": {"start_bits": 8, "target_bits": 8}}


def new_model(seed: int, **more: Any) -> hf.BertForSequenceClassification:
    hf.set_seed(seed)
    shape = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {**shape, **quiet, "intermediate_size": 32, "max_position_embeddings": 16, **more}
    return hf.BertForSequenceClassification(hf.BertConfig(**settings))


def rows(count: int = 32) -> list[dict[str, Any]]:
    ids = torch.randint(5, 60, (count, 10), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row[0] > 30)} for row in ids]


def new_trainer(folder: Path, moq: Any, teacher: Any = None, pupil: Any = None, **more: Any) -> MoQTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = hf.TrainingArguments(str(folder), **{**settings, **more})
    return MoQTrainer(pupil or new_model(1), arguments, None, rows(), rows(8), moq_config=moq, teacher=teacher)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_teacher_computes_in_the_precision_of_the_student(bf16: bool, tmp_path: Path) -> None:
    seen: dict[str, set[torch.dtype]] = {"student": set(), "teacher": set()}
    trainer = new_trainer(tmp_path, CONFIG, new_model(2), bf16=bf16, max_steps=1)
    for name, model in (("student", trainer.model), ("teacher", trainer._teacher)):
        product = model.bert.encoder.layer[0].intermediate.dense
        product.register_forward_hook(lambda *given, name=name: seen[name].add(given[2].dtype))
    trainer.train()
    expected = {torch.bfloat16 if bf16 else torch.float32}
    assert seen == {"student": expected, "teacher": expected}


def with_teacher(folder: Path, **weights: float) -> dict[str, Any]:
    return {**CONFIG, "distillation": {"teacher": str(folder), **weights}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    new_model(2).save_pretrained(folder)
    return folder


def outputs(logits: list[list[float]], states: torch.Tensor) -> ModelOutput:
    return ModelOutput(logits=torch.tensor(logits), hidden_states=(states,))


def distillation(logits: float, hidden: float, labels: float) -> DistillationConfig:
    return DistillationConfig(teacher="x", logits=logits, hidden=hidden, labels=labels)


def distillation_loss(task: torch.Tensor | None, *what: Any) -> torch.Tensor:
    parts = loss_parts(*what) | ({} if task is None else {"task": task})
    return sum(weighted(parts, what[3]).values())


def test_the_loss_by_hand() -> None:
    # Teacher probabilities 1/2, 1/2 and 3/4, 1/4; student probabilities 1/4, 3/4 and 1/2, 1/2.
    log = torch.tensor(3.0).log().item()
    theirs = outputs([[0.0, 0.0], [log, 0.0]], torch.full((2, 3, 4), 2.0))
    ours = outputs([[0.0, log], [0.0, 0.0]], torch.full((2, 3, 4), 3.0))
    # The last position is padding and wildly different.
    ours.hidden_states[0][:, 2] = 100.0
    inputs = {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]), "labels": torch.tensor([0, 1])}
    quarter, half = torch.tensor(0.25).log(), torch.tensor(0.5).log()
    logits = -((quarter + torch.tensor(0.75).log()) / 2 + half) / 2
    task = torch.tensor(7.0)
    each = [distillation(*weights) for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))]
    parts = [distillation_loss(task, ours, theirs, inputs, config) for config in each]
    torch.testing.assert_close(parts[0], logits)
    torch.testing.assert_close(parts[1], torch.tensor(1.0 / 4.0))
    torch.testing.assert_close(parts[2], task)
    whole = distillation_loss(task, ours, theirs, inputs, distillation(2.0, 3.0, 0.5))
    torch.testing.assert_close(whole, 2 * parts[0] + 3 * parts[1] + 0.5 * parts[2])


def test_regression_and_ignored_positions() -> None:
    config = distillation(1.0, 0.0, 0.0)
    nothing = torch.zeros(())
    scores = distillation_loss(
        nothing, {"logits": torch.tensor([[1.0]])}, {"logits": torch.tensor([[3.0]])}, {}, config
    )
    assert scores.item() == 4.0
    ours, theirs = torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    kept = distillation_loss(nothing, {"logits": ours[:, :1]}, {"logits": theirs[:, :1]}, {}, config)
    labels = {"labels": torch.tensor([[2, -100]])}
    torch.testing.assert_close(distillation_loss(nothing, {"logits": ours}, {"logits": theirs}, labels, config), kept)


def test_classes_that_do_not_exclude_each_other_and_several_numbers() -> None:
    ours, theirs = torch.randn(4, 3), torch.randn(4, 3)
    config = distillation(1.0, 0.0, 0.0)

    def loss(shift: float, problem: str | None) -> torch.Tensor:
        student = {"logits": ours + shift}
        return distillation_loss(torch.zeros(()), student, {"logits": theirs}, {}, config, problem)

    p, q = theirs.sigmoid(), ours.sigmoid()
    torch.testing.assert_close(loss(0, "multi_label_classification"), -(p * q.log() + (1 - p) * (1 - q).log()).mean())
    torch.testing.assert_close(loss(0, "regression"), (ours - theirs).square().mean())
    # Only where classes exclude each other, all logits may shift.
    assert loss(5, None).item() == pytest.approx(loss(0, None).item(), rel=1e-5)
    assert loss(5, "single_label_classification").item() == pytest.approx(loss(0, None).item(), rel=1e-5)
    for problem in ("multi_label_classification", "regression"):
        assert loss(5, problem) > loss(0, problem) + 1


def test_what_routers_say_is_no_answer(tmp_path: Path) -> None:
    config = hf.MixtralConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    settings = hf.TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no")
    trainer = MoQTrainer(model, settings, None, texts, moq_config=EIGHT, teacher=copy.deepcopy(model))
    trainer.train()
    batch = {"input_ids": torch.arange(5, 15)[None]}
    output = trainer.model(**batch)
    assert len(output.router_logits) == 1 and logits_in(output).keys() == {"logits"}


def test_a_class_that_is_ruled_out_has_no_part() -> None:
    config = distillation(1.0, 0.0, 0.0)
    ours, theirs = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    never = torch.full((4, 1), -torch.inf)
    masked = distillation_loss(
        torch.zeros(()), {"logits": torch.cat([ours, never], 1)}, {"logits": torch.cat([theirs, never], 1)}, {}, config
    )
    without = distillation_loss(torch.zeros(()), {"logits": ours}, {"logits": theirs}, {}, config)
    torch.testing.assert_close(masked, without)
    (gradient,), (expected,) = (torch.autograd.grad(loss, ours) for loss in (masked, without))
    torch.testing.assert_close(gradient, expected)


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "before"),
    [
        (hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), 1),
        (hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)), 1),
        (hf.BertForMaskedLM(hf.BertConfig(**SIZES)), 0),
        (hf.BertForTokenClassification(hf.BertConfig(**SIZES, num_labels=20)), 0),
        (
            hf.T5ForConditionalGeneration(
                hf.T5Config(
                    vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
                )
            ),
            0,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_counts_is_where_the_loss_of_transformers_looks(model: Any, before: int) -> None:
    """A label counts at the logits whose change changes the model's own loss."""
    ids = torch.randint(5, 20, (2, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    logits = model.eval()(input_ids=ids, labels=labels).logits
    found = labels_at_logits(model, labels).ne(-100)
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings() if before or model.can_generate() else None
    hook = hook or (model.classifier if hasattr(model, "classifier") else model.cls)
    handle = hook.register_forward_hook(lambda *given: seen.append(given[2]) or given[2].retain_grad())
    model(input_ids=ids, labels=labels).loss.backward()
    handle.remove()
    (gradient,) = (output.grad for output in seen)
    assert torch.equal(gradient.abs().sum(-1) > 0, found) and logits.shape == gradient.shape
    assert torch.equal(found[:, 4 - before], torch.tensor([True, True]))


def test_the_student_follows_its_teacher_and_is_scored_on_the_task(teacher: Path, tmp_path: Path) -> None:
    labeled = new_trainer(tmp_path, EIGHT, max_steps=32)
    taught = new_trainer(tmp_path, {**EIGHT, "distillation": {"teacher": str(teacher), "labels": 0}}, max_steps=32)
    master = hf.BertForSequenceClassification.from_pretrained(teacher).eval()
    ids = torch.stack([row["input_ids"] for row in rows()])

    def distance(model: Any) -> float:
        with torch.no_grad():
            ours, theirs = (m.eval()(ids, output_hidden_states=True).hidden_states[-1] for m in (model, master))
        return float((ours - theirs).square().mean() / theirs.square().mean())

    labeled.train()
    taught.train()
    assert distance(taught.model) < 0.1 < 0.5 < distance(labeled.model)
    loss = taught.evaluate()["eval_loss"]
    labels = torch.tensor([row["labels"] for row in rows(8)])
    assert loss == pytest.approx(float(taught.model(ids[:8], labels=labels).loss.detach()), rel=1e-5)
    assert taught.predict(rows(8)).predictions.shape == (8, 2)
    assert not any("teacher" in name for name in taught.model.state_dict())


def test_a_student_trains_without_dropout_and_has_it_again_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    kept = {**CONFIG, "distillation": {"dropout": True}}
    for share, config in ((0.0, CONFIG), (0.5, CONFIG), (0.5, kept)):
        pupil = new_model(1, hidden_dropout_prob=share, attention_probs_dropout_prob=share)
        new_trainer(tmp_path, config, new_model(2), pupil).train()
        ends.append(pupil.state_dict())
        assert {m.p for m in pupil.modules() if isinstance(m, torch.nn.Dropout)} == {share}
        assert ("; dropout is off" in capsys.readouterr().out) == (share > 0 and config is CONFIG)
    assert all(torch.equal(tensor, ends[0][name]) for name, tensor in ends[1].items())
    assert not all(torch.equal(tensor, ends[0][name]) for name, tensor in ends[2].items())


def test_a_model_that_skipped_a_layer_is_told_what_did_it() -> None:
    states = tuple(torch.ones(2, 3, 4) for _ in range(3))
    ours, theirs = ({"hidden_states": each} for each in (states[:2], states))
    with pytest.raises(MoQError, match=r"2 hidden states and its teacher 3.*leave distillation\.dropout false"):
        loss_parts(ours, theirs, {}, DistillationConfig(logits=0.0, labels=0.0))


# They drop units, attention, paths or whole layers, by PyTorch's modules or by numbers of their own.
@pytest.mark.parametrize(
    "family", ["BERT", "DeBERTa-v2", "ModernBERT", "GPT-2", "T5", "ViT", "BART", "Whisper", "Swin"]
)
def test_no_family_drops_anything(family: str) -> None:
    hf.set_seed(0)
    if family in FAMILIES:
        cls, config, batch = FAMILIES[family].kind, FAMILIES[family].config(), FAMILIES[family].batch()
    else:
        task = next(task for name, task in CASES if name == family)
        cls, config, examples = class_of(family, task), CONFIGS[family](), rows_of(task)
        batch = {name: torch.stack([torch.as_tensor(row[name]) for row in examples]) for name in examples[0]}
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.5)
    model = cls(config).train()

    def losses() -> set[float]:
        return {float(model(**batch).loss.detach()) for _ in range(4)}

    assert len(losses()) == 4
    switch_off_dropout(model)
    assert len(losses()) == 1


def test_what_has_no_effect_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taught = {**CONFIG, "distillation": {"hidden": 2.0}, "eigenvalue": {"max_iter": 10}}
    new_trainer(tmp_path / "taught", taught, new_model(2), max_steps=1).train()
    assert "distillation without effect" not in caplog.text
    new_trainer(tmp_path / "alone", taught, max_steps=1).train()
    assert "eigenvalue without effect: its enabled is false" in caplog.text
    assert "distillation without effect: it needs a MoQTrainer with a teacher, or float_first" in caplog.text


def test_a_teacher_in_hand_is_frozen_and_untouched(tmp_path: Path) -> None:
    master = new_model(2)
    kept = copy.deepcopy(master.state_dict())
    run = new_trainer(tmp_path, CONFIG, master)
    run.train()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in master.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in master.parameters())
    # A decoder would keep keys and values for each batch.
    assert master.config.use_cache is run.model.config.use_cache is False


def test_a_resumed_run_is_the_same_and_tells_of_another_teacher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = {}
    for name, master in (("taught", new_model(2)), ("alone", None)):
        whole = new_trainer(tmp_path / name, CONFIG, master, save_strategy="steps", save_steps=4)
        whole.train()
        ends[name] = whole.model.state_dict()
    for before, after, told in (
        ("taught", 2, None),
        ("taught", 3, "had another teacher: the run goes on with the one given"),
        ("taught", None, "had a teacher: the run goes on without one"),
        ("alone", 2, "had no teacher: the run goes on with the one given"),
    ):
        caplog.clear()
        trainer = new_trainer(tmp_path, CONFIG, None if after is None else new_model(after))
        trainer.train(resume_from_checkpoint=str(tmp_path / before / "checkpoint-4"))
        text = [record.message for record in caplog.records if "teacher" in record.message]
        assert text == ([] if told is None else [f"moq_hf: the checkpoint at step 4 {told}"])
        if told is None:
            assert all(torch.equal(tensor, ends[before][key]) for key, tensor in trainer.model.state_dict().items())


def test_a_teacher_in_a_cache_of_its_own(teacher: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models--somebody--teacher"
    shutil.copytree(teacher, kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    config = {**CONFIG, "distillation": {"teacher": "somebody/teacher"}}
    arguments = hf.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(MoQError, match="cannot load somebody/teacher, which is no folder here, as Bert"):
        MoQTrainer(new_model(1), arguments, None, rows(), moq_config=config)
    where = {"cache_dir": tmp_path / "cache"}
    found = MoQTrainer(new_model(1), arguments, None, rows(), moq_config=config, teacher_init_kwargs=where)
    assert fingerprint(found._teacher) == fingerprint(hf.BertForSequenceClassification.from_pretrained(teacher))
    with pytest.raises(MoQError, match=r"cannot load .* unexpected keyword argument 'cash_dir'"):
        wrong = with_teacher(teacher)
        MoQTrainer(new_model(1), arguments, None, rows(), moq_config=wrong, teacher_init_kwargs={"cash_dir": "x"})
    for more in ({"moq_config": CONFIG}, {"moq_config": config, "teacher": new_model(2)}, {}):
        with pytest.raises(MoQError, match="teacher_init_kwargs are for the teacher"):
            MoQTrainer(new_model(1), arguments, None, rows(), teacher_init_kwargs=where, **more)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_labels": 3}, "num_labels is 2 in the model and 3 in the teacher"),
        ({"hidden_size": 32}, "hidden_size is 16 in the model and 32 in the teacher; set distillation.hidden to 0"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 2 in the model and 1 in the teacher"),
        ({"vocab_size": 61}, "vocab_size is 60 in the model and 61 in the teacher"),
    ],
)
def test_a_teacher_that_does_not_fit(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match=text):
        new_trainer(tmp_path, CONFIG, new_model(2, **change))


def test_another_order_of_the_labels(tmp_path: Path) -> None:
    master, pupil = new_model(2), new_model(1)
    master.config.id2label, pupil.config.id2label = {0: "no", 1: "yes"}, {0: "yes", 1: "no"}
    with pytest.raises(MoQError, match=r"the labels are \{0: 'yes', 1: 'no'\} in the model"):
        new_trainer(tmp_path, CONFIG, master, pupil)


def test_a_narrower_teacher_of_logits_only(tmp_path: Path) -> None:
    config = {**CONFIG, "distillation": {"hidden": 0}}
    run = new_trainer(tmp_path, config, new_model(2, hidden_size=32, num_hidden_layers=1))
    assert run.train().global_step == 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_student_with_adapters(teacher: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4)
    pupil = peft.get_peft_model(new_model(1), lora)
    with pytest.raises(MoQError, match=r"got PeftModel\w*; of a PEFT model give what merge_and_unload\(\) returns"):
        new_trainer(tmp_path, CONFIG, peft.get_peft_model(new_model(2), lora), new_model(1))
    config = {**EIGHT, "distillation": {"teacher": str(teacher), "labels": 0}}
    run = new_trainer(tmp_path, config, pupil=pupil, max_steps=32, logging_steps=8)
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    assert all(layer.moq.bits == 8 for layer in quant_layers(pupil).values())
    with pytest.raises(MoQError, match="the teacher shares parameters with the model in training"):
        new_trainer(tmp_path, CONFIG, pupil.get_base_model(), pupil)


def test_other_mistakes(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match=r"cannot load .*nowhere, which is no folder here, as Bert"):
        new_trainer(tmp_path, with_teacher(tmp_path / "nowhere"))
    with pytest.raises(MoQError, match="a teacher is for quantized training"):
        new_trainer(tmp_path, None, new_model(2))
    model = new_model(1)
    with pytest.raises(MoQError, match="the teacher shares parameters with the model in training"):
        new_trainer(tmp_path, CONFIG, model, model)
    partner = new_model(2)
    partner.bert.embeddings = model.bert.embeddings
    with pytest.raises(MoQError, match=r"shares parameters with the model in training \(bert"):
        new_trainer(tmp_path, CONFIG, partner, model)
    arguments = hf.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    stock = hf.Trainer(new_model(1), arguments, None, rows(), callbacks=[MoQCallback(with_teacher(teacher))])
    with pytest.raises(MoQError, match="a callback cannot change the loss; use MoQTrainer"):
        stock.train()
    with pytest.raises(MoQConfigError, match="logits, hidden, similarity, embedding, relations are all 0"):
        MoQConfig.from_dict({**CONFIG, "distillation": {"logits": 0, "hidden": 0}})


def test_a_teacher_that_cannot_teach(teacher: Path, tmp_path: Path) -> None:
    new_model(2).bert.save_pretrained(tmp_path / "body")
    with pytest.raises(MoQError, match=r"body holds no weights for classifier\.bias, classifier\.weight: fine-tune it"):
        new_trainer(tmp_path, with_teacher(tmp_path / "body"))
    cut = tmp_path / "cut"
    shutil.copytree(teacher, cut)
    (cut / "model.safetensors").write_bytes((teacher / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(MoQError, match=r"cannot load .*cut as BertForSequenceClassification: .*header"):
        new_trainer(tmp_path, with_teacher(cut))
    with pytest.raises(MoQError, match="the teacher must be a transformers model, got Linear"):
        new_trainer(tmp_path, CONFIG, torch.nn.Linear(2, 2))
    run = new_trainer(tmp_path, with_teacher(teacher))
    run.model.config.return_dict = False
    with pytest.raises(MoQError, match=r"output has no names \(return_dict\), it is tuple"):
        run.train()


def test_a_copy_that_runs_the_model_it_was_copied_from(tmp_path: Path) -> None:
    """As of a model that TRL's Trainers have given another forward: the loss would compare the student with itself."""
    model = new_model(1)
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda **batch: forward(**batch))  # type: ignore[method-assign]
    trainer = new_trainer(tmp_path, EIGHT, copy.deepcopy(model), model)
    with pytest.raises(MoQError, match="the teacher's forward pass runs the model in training"):
        trainer.train()
    assert not any(module._forward_pre_hooks for module in model.base_model.embeddings.modules())


def test_a_quantized_teacher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    master = quantize_model(new_model(2), CONFIG)
    with pytest.raises(
        MoQError, match=r"the teacher is quantized: give a float model, or call moq_hf.dequantize_model"
    ):
        new_trainer(tmp_path, CONFIG, master)
    with pytest.raises(MoQError, match="the teacher is quantized"):
        MoQDistillation(new_model(1), master)
    save_quantized(master, tmp_path / "packed")
    with pytest.raises(MoQError, match="the teacher is quantized"):
        new_trainer(tmp_path, CONFIG, type(master).from_pretrained(tmp_path / "packed"))
    trainer = new_trainer(tmp_path, with_teacher(tmp_path / "packed"))
    assert (
        f"the teacher {tmp_path / 'packed'} is a quantized model, which teaches with its rounded weights" in caplog.text
    )
    assert trainer.train().global_step == 8


def test_the_teacher_goes_where_training_will_be(tmp_path: Path) -> None:
    # FSDP2 and ZeRO move the student when training begins.
    loaded = load_teacher(new_model(2), new_model(1), DistillationConfig(teacher="x"), torch.device("meta"))
    assert loaded.device.type == "meta"


def test_extractive_answers(tmp_path: Path) -> None:
    shape = new_model(1).config
    hf.set_seed(1)
    master, pupil = hf.BertForQuestionAnswering(shape), hf.BertForQuestionAnswering(shape)
    with torch.no_grad():
        for model in (master, pupil):
            model.qa_outputs.weight.mul_(50)
    data = [{"input_ids": row["input_ids"], "start_positions": 2, "end_positions": 3} for row in rows(4)]
    weights = {"logits": 1.0, "hidden": 0.0, "labels": 0.5}
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True
    )
    run = MoQTrainer(pupil, arguments, None, data, moq_config={**CONFIG, "distillation": weights}, teacher=master)
    pupil.train()
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}
    ours, theirs = ([out.detach().double().numpy() for out in model(**batch)[1:3]] for model in (pupil, master))

    # The cross entropy over the places of both ends, with the teacher's probabilities and with the labels.
    def cross_entropy(logits: np.ndarray, target: np.ndarray) -> float:
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(-(target * log).sum(-1).mean())

    soft = [np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) for logits in theirs]
    hard = [np.eye(10)[[place] * 4] for place in (2, 3)]
    expected = [np.mean([cross_entropy(*pair) for pair in zip(ours, each, strict=True)]) for each in (soft, hard)]
    assert abs(expected[0] - expected[1]) > 0.1
    assert run.compute_loss(pupil, batch).item() == pytest.approx(expected[0] + 0.5 * expected[1], rel=1e-5)
    assert run.train().global_step == 3
