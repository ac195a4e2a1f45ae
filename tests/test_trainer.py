"""`MoQMixin` beside Trainers with a loss of their own: TRL's, Sentence Transformers', and one of a user."""

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
import transformers as hf
from datasets import Dataset
from sentences import TEXTS, encoder
from tiny_runs import assert_same, trained, weights
from tokenizers import Tokenizer, models, pre_tokenizers

from moq_hf import MoQCallback, MoQConfigError, MoQError, MoQMixin, MoQTrainer
from moq_hf.training.distillation import DistillationConfig, labels_at_logits, loss_parts

trl = pytest.importorskip("trl")

CONFIG: dict[str, Any] = {"bits": 4, "start_bits": 6, "period": 1}
STEPS = 4
TEXT = [" ".join(f"w{first * word % 50}" for word in range(8)) for first in range(1, 17)]
PAIRS = [{"prompt": "w1 w2", "chosen": " w3" * count, "rejected": " w4" * count} for count in range(1, 17)]
# TRL warns of changes to come in TRL.
noisy = pytest.mark.filterwarnings("ignore")
pytestmark = noisy


def tokenizer() -> hf.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(57))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def llama(seed: int = 0) -> hf.LlamaForCausalLM:
    hf.set_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": 60, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, **ids, max_position_embeddings=64))


def t5(seed: int = 0) -> hf.T5ForConditionalGeneration:
    hf.set_seed(seed)
    shape = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "dropout_rate": 0.0}
    ids = {"vocab_size": 60, "decoder_start_token_id": 0, "pad_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**shape, **ids))


class Weighted(hf.Trainer):
    """Has a column that the model does not take, hands the model inputs one by one, and calls it twice."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight = inputs.pop("weight")
        halves = [
            model(input_ids=inputs["input_ids"][part], labels=inputs["labels"][part])
            for part in (slice(0, 2), slice(2, 4))
        ]
        loss = sum(half.loss for half in halves) / 2 * weight.mean()
        return (loss, halves[0]) if return_outputs else loss


class SFT(MoQMixin, trl.SFTTrainer): ...  # type: ignore[misc]


class DPO(MoQMixin, trl.DPOTrainer): ...  # type: ignore[misc]


class Seq2Seq(MoQMixin, hf.Seq2SeqTrainer): ...


class Own(MoQMixin, Weighted): ...


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    settings = {
        "max_steps": STEPS,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 1e-3,
    }
    return kind(**{**vars_of(tiny_runs.arguments(folder)), **settings, **more})


def vars_of(given: hf.TrainingArguments) -> dict[str, Any]:
    names = (
        "output_dir",
        "per_device_train_batch_size",
        "save_strategy",
        "report_to",
        "use_cpu",
        "disable_tqdm",
        "seed",
    )
    return {name: getattr(given, name) for name in names}


def sft(folder: Path, *, kind: Any = SFT, settings: Any = None, **given: Any) -> Any:
    data = Dataset.from_list([{"text": text} for text in TEXT])
    args = arguments(trl.SFTConfig, folder, max_length=16, **(settings or {}))
    return kind(llama(), args, None, data, data.select(range(4)), tokenizer(), **given)


def dpo(folder: Path, *, settings: Any = None, **given: Any) -> Any:
    data = Dataset.from_list(PAIRS)
    args = arguments(trl.DPOConfig, folder, **(settings or {}))
    return DPO(llama(), llama(), args, None, data, data.select(range(4)), tokenizer(), **given)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


def seq2seq(folder: Path, *, settings: Any = None, **given: Any) -> Any:
    rows = [{"input_ids": row[:8], "labels": row[8:]} for row in numbers(16, 14)]
    args = arguments(hf.Seq2SeqTrainingArguments, folder, predict_with_generate=True, **(settings or {}))
    return Seq2Seq(t5(), args, None, rows, rows[:4], **given)


def own(folder: Path, *, settings: Any = None, **given: Any) -> Any:
    rows = [{"input_ids": row, "labels": row, "weight": 1.0 + index % 2} for index, row in enumerate(numbers(16, 8))]
    args = arguments(hf.TrainingArguments, folder, remove_unused_columns=False, **(settings or {}))
    return Own(llama(), args, None, rows, rows[:4], **given)


KINDS = [sft, dpo, seq2seq, own]
every_kind = pytest.mark.parametrize("make", KINDS, ids=[make.__name__ for make in KINDS])


def teacher_of(make: Any) -> Any:
    return t5(1) if make is seq2seq else llama(1)


def assert_packed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert json.loads((folder / "moq_state.json").read_text())["proof"]["agrees"] is True


def losses(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@every_kind
def test_a_teacher_in_memory_and_by_its_name(make: Any, tmp_path: Path) -> None:
    teacher_of(make).save_pretrained(tmp_path / "teacher")
    named = {**CONFIG, "distillation": {"teacher": str(tmp_path / "teacher")}}
    one = trained(make(tmp_path / "one", moq_config=CONFIG, teacher=teacher_of(make)))
    other = trained(make(tmp_path / "other", moq_config=named))
    assert_same(weights(one), weights(other))
    for step, loss in enumerate(losses(one)):
        parts = [losses(one, f"moq/loss_{part}")[step] for part in ("task", "logits", "hidden")]
        assert loss == pytest.approx(sum(parts), rel=1e-5)
    alone = trained(make(tmp_path / "alone", moq_config=CONFIG))
    # The Trainer's own loss, of the same weights and batch.
    assert losses(one, "moq/loss_task")[0] == pytest.approx(losses(alone)[0], rel=1e-5)
    # Evaluation has that loss alone.
    with_teacher = one.evaluate()["eval_loss"]
    one._follow(None)
    assert one.evaluate()["eval_loss"] == with_teacher


@every_kind
def test_float_first_and_a_resumed_run(make: Any, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    whole = trained(make(tmp_path / "whole", moq_config=CONFIG, float_first=True, settings=settings))
    assert (tmp_path / "whole" / "float" / "model.safetensors").is_file()
    assert losses(whole, "moq/bits")[-1] == 4 and len(losses(whole, "float_eval_loss")) == 1
    assert len(losses(whole, "moq/loss_logits")) == STEPS // 2
    for step in (1, 3):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        if step > 1:
            shutil.copytree(tmp_path / "whole" / "float", folder / "float")
        resumed = make(folder, moq_config=CONFIG, float_first=True, settings=settings)
        resumed.train(resume_from_checkpoint=True)
        assert_same(weights(whole), weights(resumed))
    whole.save_model(str(tmp_path / "saved"))
    assert_packed(tmp_path / "saved")


def test_the_teacher_s_part_is_that_of_the_labels(tmp_path: Path) -> None:
    """TRL's model gives no logits beside its loss, and none of the prompt's tokens count."""
    rows = [{"prompt": text[:12], "completion": text[12:]} for text in TEXT]
    seen: list[dict[str, Any]] = []

    class Watched(SFT):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(dict(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    teacher = llama(1)
    smoothed: tuple[Any, ...] = (0.0, 0.1)
    for smoothing in smoothed:
        args = arguments(trl.SFTConfig, tmp_path, max_length=16, label_smoothing_factor=smoothing, max_steps=1)
        trainer = Watched(
            llama(), args, None, Dataset.from_list(rows), None, tokenizer(), moq_config="w8", teacher=teacher
        )
        seen.clear()
        trainer.train()
        batch = {name: seen[0][name] for name in ("input_ids", "attention_mask")}
        labels = labels_at_logits(teacher, seen[0]["labels"])
        assert (labels == -100).float().mean() > 0.3
        student = sft(tmp_path, moq_config="w8").model.train()
        outputs = [model(**batch, output_hidden_states=True) for model in (student, teacher)]
        expected = loss_parts(*outputs, {**batch, "labels": labels}, DistillationConfig())
        for name, part in expected.items():
            assert losses(trainer, f"moq/loss_{name}")[0] == pytest.approx(part.item(), rel=1e-4), (name, smoothing)


def test_a_trainer_that_divides_by_other_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers 5.19, whose Trainer had no `loss_is_scaled_for_ga`."""
    given: dict[str, Any] = {"moq_config": CONFIG, "teacher": t5(1), "settings": {"gradient_accumulation_steps": 2}}
    now = trained(seq2seq(tmp_path / "now", **given))
    monkeypatch.setattr("moq_hf.trainer.KNOWS_SCALE", False)
    monkeypatch.delattr(hf.Trainer, "loss_is_scaled_for_ga")
    before = seq2seq(tmp_path / "before", **given)
    counts: list[Any] = []
    training_step = hf.Trainer.training_step

    def watched(trainer: Any, model: Any, inputs: Any, count: Any = None) -> Any:
        counts.append(count)
        return training_step(trainer, model, inputs, count)

    monkeypatch.setattr(hf.Trainer, "training_step", watched)
    before.train()
    assert counts == [None] * STEPS * 2
    assert_same(weights(now), weights(before))


def test_trl_s_own_metrics_are_of_training_alone(tmp_path: Path) -> None:
    """What a float phase evaluates and logs is not among them, nor what is measured on the first batch."""
    settings = {"gradient_accumulation_steps": 2}
    plain = trained(sft(tmp_path / "plain", kind=trl.SFTTrainer, settings={**settings, "max_steps": 2}))
    trainer = trained(sft(tmp_path / "float", moq_config=CONFIG, float_first=True, settings=settings))
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert losses(trainer, name)[0] == pytest.approx(losses(plain, name)[0], rel=1e-5), name
        assert len(losses(trainer, name)) == STEPS
        assert len(losses(trainer, f"float_eval_{name}")) == 1


def test_eigenvalues_beside_a_fused_head(tmp_path: Path) -> None:
    """The same with the callback: the model's own loss has second derivatives, and TRL's has none."""
    config = {**CONFIG, "eigenvalue": {"enabled": True}}
    name = "moq/eigenvalue/model.layers.0"
    mixed = trained(sft(tmp_path / "mixin", moq_config=config))
    stock = trained(sft(tmp_path / "stock", kind=trl.SFTTrainer, callbacks=[MoQCallback(config)]))
    assert losses(mixed, name) == losses(stock, name) and 0 < losses(mixed, name)[0] <= 1


def test_one_training_as_callback_as_trainer_and_as_mixin(tmp_path: Path) -> None:
    """Equal weights and equal files. TRL's own loss rounds otherwise, so all have the same one."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        ours, theirs = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(ours, theirs, reduction="sum") / num_items_in_batch

    rows = Dataset.from_list([{"input_ids": tokenizer()(text)["input_ids"]} for text in TEXT])
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    stock = functools.partial(arguments, hf.TrainingArguments, remove_unused_columns=False)
    runs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "callback": (hf.Trainer, stock, {"data_collator": collator, "callbacks": [MoQCallback(CONFIG)]}),
        "trainer": (MoQTrainer, stock, {"data_collator": collator, "moq_config": CONFIG}),
        "mixin": (SFT, functools.partial(arguments, trl.SFTConfig), {"moq_config": CONFIG}),
    }
    found = {}
    for name, (kind, make, given) in runs.items():
        # The card has the name of the folder.
        folder = tmp_path / name / "run"
        given = {"train_dataset": rows, "processing_class": tokenizer(), "compute_loss_func": loss, **given}
        trainer = trained(kind(llama(), args=make(folder), **given))
        files = {path.name: path.read_bytes() for path in (folder / "quantized").iterdir()}
        found[name] = (weights(trainer), files)
    for name in ("trainer", "mixin"):
        assert_same(found["callback"][0], found[name][0])
        assert found["callback"][1] == found[name][1]


def embeddings(folder: Path, **given: Any) -> Any:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses as kinds

    class Embeddings(MoQMixin, library.SentenceTransformerTrainer):  # type: ignore[misc]
        pass

    model = encoder(folder)
    args = arguments(library.SentenceTransformerTrainingArguments, folder, gradient_accumulation_steps=2)
    data = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    loss = kinds.MultipleNegativesRankingLoss(model)
    return Embeddings(model, args, data, data, loss, moq_config=CONFIG, **given)


def test_embedding_models_are_delivered_and_told_how_to_follow_a_teacher(tmp_path: Path) -> None:
    trainer = trained(embeddings(tmp_path))
    assert "eval_loss" in trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    assert_packed(tmp_path / "saved")
    for given in ({"teacher": copy.deepcopy(trainer.model)}, {"float_first": True}):
        with pytest.raises(MoQError, match=r"got SentenceTransformer; .* with loss=MoQDistillation\(model, teacher\)"):
            embeddings(tmp_path, **given)


def test_a_loss_that_does_not_call_the_model_is_told_before_the_first_step(tmp_path: Path) -> None:
    class Elsewhere(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model.model(inputs["input_ids"]).last_hidden_state.mean()

    class Mixed(MoQMixin, Elsewhere): ...

    rows = [{"input_ids": row, "labels": row} for row in numbers(16, 8)]
    trainer = Mixed(llama(), arguments(hf.TrainingArguments, tmp_path), None, rows, moq_config=CONFIG, teacher=llama(1))
    with pytest.raises(MoQError, match="compute_loss of Mixed does not call the model that it is given"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_where_the_mixin_stands() -> None:
    with pytest.raises(MoQError, match=r"write class Behind\(MoQMixin, SFTTrainer\)"):

        class Behind(trl.SFTTrainer, MoQMixin): ...  # type: ignore[misc]

    class Alone(MoQMixin): ...

    with pytest.raises(MoQError, match="Alone: MoQMixin needs a Trainer beside it"):
        Alone()

    class Later(Alone, hf.Trainer): ...

    with pytest.raises(MoQError, match="bts"):
        Later(llama(), moq_config=CONFIG, bts=3)


def test_arguments_go_to_whom_they_belong(tmp_path: Path) -> None:
    trainer = sft(tmp_path, bits=3, group_size=16, formatting_func=None)
    assert trainer.moq.config.bits == 3 and len(trainer.moq.controller.layers) == 14


@pytest.mark.parametrize(
    ("word", "meant"), [("float_frist", "float_first"), ("train_datset", "train_dataset"), ("moq_confg", "moq_config")]
)
def test_a_misspelt_argument_of_a_trainer_is_named(word: str, meant: str) -> None:
    with pytest.raises(MoQConfigError, match=f"MoQTrainer has no argument {word}, did you mean {meant}"):
        MoQTrainer(llama(), **{word: True})


def test_a_word_of_others_is_told_what_it_is_here() -> None:
    with pytest.raises(MoQConfigError, match="optim of TrainingArguments"):
        MoQTrainer(llama(), optimizer="adamw_torch", bits=4)
