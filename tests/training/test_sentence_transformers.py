"""The Trainers of Sentence Transformers with a `MoQCallback`: losses, folders that plain Sentence Transformers load."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from sentences import SMALL, TEXTS, body, encoder

from moq_hf import (
    MoQCallback,
    MoQConfigError,
    MoQDistillation,
    MoQError,
    MoQTrainer,
    quantize_model,
    save_quantized,
    verify_quantized,
)
from moq_hf.config import MoQConfig
from moq_hf.memory import plan_of_model
from moq_hf.model.convert import quant_layers

library = pytest.importorskip("sentence_transformers")
from sentence_transformers.cross_encoder.losses import MarginMSELoss  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer import modules as parts  # noqa: E402
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator  # noqa: E402
from sentence_transformers.sparse_encoder import losses as sparse_losses  # noqa: E402
from sentence_transformers.sparse_encoder import modules as sparse_parts  # noqa: E402

noisy = pytest.mark.filterwarnings("ignore")
FOUR = {"bits": 4, "embeddings": 4, "group_size": 16}
# A process without moq_hf: loads each folder with the class that is named, and gives its answers.
STRANGER = """
import json, sys
import sentence_transformers
for line in sys.stdin:
    name, folder, texts, call = json.loads(line)
    model = getattr(sentence_transformers, name)(folder, device="cpu")
    print(json.dumps(eval(call).tolist()), flush=True)
    assert not any(module.startswith("moq_hf") for module in sys.modules)
"""
CALLS = {
    "SentenceTransformer": "model.encode(texts)",
    "CrossEncoder": "model.predict([[text, texts[0]] for text in texts])",
    "SparseEncoder": "model.encode(texts, convert_to_sparse_tensor=False).numpy()",
}


def answers(name: str, model: Any, texts: list[str] = TEXTS) -> np.ndarray:
    model.eval()
    return np.asarray(eval(CALLS[name], {"model": model, "texts": texts}))


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str, Path], np.ndarray]]:
    """Give the answers of a folder in a process that does not know moq_hf."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-I", "-c", STRANGER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:

        def ask(name: str, folder: Path) -> np.ndarray:
            process.stdin.write(json.dumps([name, str(folder), TEXTS, CALLS[name]]) + "\n")
            process.stdin.flush()
            return np.array(json.loads(process.stdout.readline()), dtype=np.float32)

        yield ask
        process.stdin.close()


PAIRS: dict[str, Any] = {"one": TEXTS, "two": TEXTS[::-1]}


def train(
    kind: str,
    model: Any,
    folder: Path,
    columns: dict[str, Any] = PAIRS,
    loss: Any = None,
    evaluator: Any = None,
    **more: Any,
) -> MoQCallback:
    """Three steps, in which neighbors are ranked unless there is another loss."""
    loss = loss or losses.MultipleNegativesRankingLoss(model)
    arguments = getattr(library, f"{kind}TrainingArguments")(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        eval_strategy="no" if evaluator is None else "steps",
        eval_steps=3,
    )
    callback = MoQCallback(**{**({} if "config" in more else FOUR), **more})
    data = Dataset.from_dict(columns)
    trainer = getattr(library, f"{kind}Trainer")(
        model, arguments, data, loss=loss, evaluator=evaluator, callbacks=[callback]
    )
    trainer.train()
    callback.log_history = trainer.state.log_history
    return callback


def check_delivered(callback: MoQCallback, kind: str, model: Any) -> Path:
    done = callback.delivered
    assert done.proof.agrees and done.proof.examples == 4
    state = json.loads((done.path / "moq_state.json").read_text(encoding="utf-8"))
    assert state["layout"] == "unpacked" and not state["by_hand"]
    assert done.how_to_load == f'{kind}("{done.path}")'
    card = (done.path / "README.md").read_text(encoding="utf-8")
    assert "library_name: sentence-transformers" in card and f"from sentence_transformers import {kind}" in card
    assert verify_quantized(done.path, model).layers
    return done.path


def check_answers(callback: MoQCallback, kind: str, model: Any, alone: Any) -> Path:
    folder = check_delivered(callback, kind, model)
    assert np.array_equal(alone(kind, folder), answers(kind, model))
    return folder


@noisy
@pytest.mark.parametrize("name", ["cosine", "matryoshka"])
def test_losses_of_an_encoder(name: str, tmp_path: Path, alone: Any) -> None:
    model = encoder(tmp_path, parts.Normalize())
    pairs = PAIRS
    if name == "cosine":
        loss = losses.CoSENTLoss(model)
        pairs = {**PAIRS, "score": [index / 16 for index in range(16)]}
    else:
        loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 16])
    callback = train("SentenceTransformer", model, tmp_path / "run", pairs, loss)
    folder = check_answers(callback, "SentenceTransformer", model, alone)
    named = {"modules.json", "1_Pooling", "config_sentence_transformers.json"}
    assert named <= {path.name for path in folder.iterdir()}


@noisy
@pytest.mark.parametrize("bits", [4, 2])
def test_a_preset_gives_the_bits_of_its_name(bits: int, tmp_path: Path, alone: Any) -> None:
    """All codes of the file have one width, so that tables of 8 bits would give it to the layers too."""
    model = encoder(tmp_path)
    model.save(str(tmp_path / "float"))
    callback = train("SentenceTransformer", model, tmp_path / "run", config=f"w{bits}")
    folder = check_answers(callback, "SentenceTransformer", model, alone)
    found = verify_quantized(folder)
    assert {(layer.stored, layer.bits) for layer in found.layers.values()} == {("packed", bits)}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert {group["weights"]["num_bits"] for group in config["config_groups"].values()} == {bits}
    # The size that was told of in training, and that is told before, but for the shapes of packed weights.
    stored = sum(t.nbytes for n, t in load_file(folder / "model.safetensors").items() if not n.endswith("shape"))
    assert callback.controller.sizes.mb == pytest.approx(stored / 1e6)
    planned = plan_of_model(str(tmp_path / "float"), MoQConfig.load(f"w{bits}"), 3)
    assert f"3 embedding tables to {bits} bits" in planned
    assert f"delivered: {callback.controller.sizes.mb:,.1f} MB" in planned


@noisy
def test_the_card_has_what_evaluators_found_of_the_delivered_model(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    scores = [index / 16 for index in range(16)]
    evaluator = EmbeddingSimilarityEvaluator(TEXTS, TEXTS[5:] + TEXTS[:5], scores, name="sts-dev", write_csv=False)
    other = EmbeddingSimilarityEvaluator(TEXTS, TEXTS[3:] + TEXTS[:3], scores, name="before", write_csv=False)
    # It has seen the float model alone.
    other(model)
    callback = train("SentenceTransformer", model, tmp_path / "run", evaluator=evaluator)
    logged = [entry for entry in callback.log_history if "eval_sts-dev_spearman_cosine" in entry]
    found = evaluator(model)
    save_quantized(model, tmp_path / "again", metrics=found)
    spearmans = (logged[-1]["eval_sts-dev_spearman_cosine"], found["sts-dev_spearman_cosine"])
    for folder, spearman in zip((callback.delivered.path, tmp_path / "again"), spearmans, strict=True):
        results = {result.metric_type: result for result in ModelCard.load(folder / "README.md").data.eval_results}
        assert results.keys() == {"spearman_cosine", "pearson_cosine"}
        result = results["spearman_cosine"]
        assert result.metric_value == spearman
        assert (result.task_type, result.dataset_type) == ("semantic-similarity", "sts-dev")
    # Other figures than those that the evaluators gave.
    save_quantized(model, tmp_path / "other", metrics={"accuracy": 0.5})
    assert ModelCard.load(tmp_path / "other" / "README.md").data.eval_results is None


@noisy
def test_a_dense_module_stays_in_float_and_is_kept(tmp_path: Path, alone: Any) -> None:
    model = encoder(tmp_path, parts.Dense(32, 8))
    callback = train("SentenceTransformer", model, tmp_path / "run")
    assert not any(name.startswith("2") for name in quant_layers(model))
    check_answers(callback, "SentenceTransformer", model, alone)
    # Packed it could not be: the module's own file holds floats.
    quantize_model(model, {"quantize_bits": {"target_bits": 4}, "quantize_heads": True})
    with pytest.raises(MoQError, match="quantized layers are outside of the model of transformers"):
        save_quantized(model, tmp_path / "heads")


@noisy
def test_a_tokenizer_that_cannot_be_saved_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = encoder(tmp_path)

    def save(*args: Any, **kwargs: Any) -> None:
        raise OSError("no such vocabulary")

    model[0].processor.save_pretrained = save
    callback = train("SentenceTransformer", model, tmp_path / "run")
    folder = callback.delivered.path
    state = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    assert state["layout"] == "unpacked" and not state["by_hand"] and state["proof"]["agrees"] is None
    assert "loads no folder without a tokenizer" in callback.delivered.summary
    assert caplog.text.count("not saved beside the weights: TokenizersBackend (OSError: no such vocabulary)") == 1
    assert (folder / "modules.json").is_file() and not (folder / "tokenizer.json").exists()
    assert model[0].processor.save_pretrained is save
    # The weights are all there.
    found = hf.AutoModel.from_pretrained(folder)
    assert found.get_input_embeddings().weight.equal(model[0].auto_model.get_input_embeddings().quantized_weight())


@noisy
def test_a_reranker(tmp_path: Path, alone: Any) -> None:
    folder = body(tmp_path / "body", hf.BertForSequenceClassification, num_labels=1)
    model = library.CrossEncoder(folder, device="cpu")
    columns = {"one": TEXTS, "two": TEXTS[::-1], "three": TEXTS[3:] + TEXTS[:3], "score": [0.5] * 16}
    callback = train("CrossEncoder", model, tmp_path / "run", columns, MarginMSELoss(model))
    check_answers(callback, "CrossEncoder", model, alone)


@noisy
def test_a_sparse_encoder(tmp_path: Path, alone: Any) -> None:
    folder = body(tmp_path / "body", hf.BertForMaskedLM)
    modules = [sparse_parts.MLMTransformer(folder), sparse_parts.SpladePooling()]
    model = library.SparseEncoder(modules=modules, device="cpu")
    ranking = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    loss = sparse_losses.SpladeLoss(model, ranking, document_regularizer_weight=1e-3)
    callback = train("SparseEncoder", model, tmp_path / "run", loss=loss)
    check_answers(callback, "SparseEncoder", model, alone)


@noisy
def test_texts_alone_teach(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    before = answers("SentenceTransformer", model)
    weights = {"similarity": 1.0, "embedding": 2.0, "relations": 0.5, "hidden": 0.1}
    loss = MoQDistillation(model, **weights)
    callback = train("SentenceTransformer", model, tmp_path / "run", {"text": TEXTS}, loss, bits=2, embeddings=2)
    check_delivered(callback, "SentenceTransformer", model)
    # The teacher is what the model was; each part of the loss is logged.
    assert np.array_equal(answers("SentenceTransformer", loss.teacher), before)
    logged = next(entry for entry in callback.log_history if "loss" in entry)
    assert weights.keys() <= logged.keys()
    assert not json.loads((tmp_path / "run" / "quantized" / "config.json").read_text()).get("output_hidden_states")
    with pytest.raises(MoQError, match="the model is quantized already: give a float teacher"):
        MoQDistillation(model)


@noisy
@pytest.mark.parametrize("kept", [False, True])
def test_an_encoder_trains_without_dropout_and_its_files_keep_it(kept: bool, tmp_path: Path) -> None:
    model = encoder(tmp_path, parts.Dropout(0.25))
    loss = MoQDistillation(model, dropout=kept)
    train("SentenceTransformer", model, tmp_path / "run", {"text": TEXTS}, loss, bits=2)
    shares = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert shares == ({0.1, 0.25} if kept else {0.0})
    config = json.loads((tmp_path / "run" / "quantized" / "2_Dropout" / "config.json").read_text())
    assert config["dropout"] == 0.25


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"embedding": -1.0}, "distillation.embedding: -1.0 is not legal; it must be a number from 0"),
        ({"dropout": "x"}, 'distillation.dropout: "x" is not legal; it must be true or false'),
        ({"embeddings": 1.0}, "distillation.embeddings: unknown key"),
        ({"hidden": 0.0}, "are all 0, so a teacher would teach nothing"),
    ],
)
def test_wrong_weights_are_one_error(given: dict[str, Any], text: str) -> None:
    with pytest.raises(MoQConfigError, match=text):
        MoQDistillation(torch.nn.Linear(4, 2), **given)


@noisy
def test_a_teacher_of_another_kind(tmp_path: Path) -> None:
    model, teacher = encoder(tmp_path / "model"), encoder(tmp_path / "teacher")
    with pytest.raises(MoQError, match="the teacher shares parameters with the model in training"):
        MoQDistillation(model, model)
    for changed, weight, text in (
        ("vocab_size", "similarity", "in the teacher$"),
        ("num_attention_heads", "relations", "in the teacher; set distillation.relations to 0"),
        ("num_hidden_layers", "hidden", "in the teacher; set distillation.hidden to 0"),
    ):
        other = copy.deepcopy(teacher)
        setattr(other[0].auto_model.config, changed, 1)
        with pytest.raises(MoQError, match=f"{changed} is .*{text}"):
            MoQDistillation(model, other, **{weight: 1.0})


@noisy
def test_texts_alone_teach_a_plain_encoder(tmp_path: Path) -> None:
    hf.set_seed(0)
    model = hf.BertModel(hf.BertConfig(**SMALL, max_position_embeddings=32))
    teacher = copy.deepcopy(model)
    rows = [{"input_ids": [1 + index, 2, 3 + index % 4]} for index in range(8)]
    arguments = hf.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, logging_steps=1)
    taught = {"similarity": 1.0, "embedding": 1.0, "relations": 1.0, "hidden": 1.0, "logits": 0.0, "labels": 0.0}
    config = {"quantize_bits": {"target_bits": 4}, "distillation": taught}
    trainer = MoQTrainer(model, arguments, None, rows, moq_config=config, teacher=teacher)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert all(logged[f"moq/loss_{name}"] > 0 for name in ("similarity", "embedding", "relations", "hidden"))
    assert "moq/loss_task" not in logged


@noisy
def test_scales_alone_train_without_checkpoints(tmp_path: Path) -> None:
    def trainer(**more: Any) -> Any:
        model = encoder(tmp_path)
        args = library.SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, **more
        )
        data = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
        callback = MoQCallback({**FOUR, "embeddings": None}, train="scales")
        loss = losses.MultipleNegativesRankingLoss(model)
        return library.SentenceTransformerTrainer(model, args, data, loss=loss, callbacks=[callback]), callback

    with pytest.raises(MoQError, match="Sentence Transformers loads checkpoints, also that of the best model"):
        trainer()
    made, callback = trainer(save_strategy="no")
    made.train()
    assert callback.delivered.proof.agrees
    assert len([p for p in made.model.parameters() if p.requires_grad]) == len(quant_layers(made.model))


def finished(kind: str, folder: Path) -> Any:
    """A tiny model of each class, which nothing trained."""
    hf.set_seed(0)
    if kind == "SentenceTransformer":
        return encoder(folder).eval()
    if kind == "CrossEncoder":
        cls = hf.BertForSequenceClassification
        return library.CrossEncoder(body(folder / "body", cls, num_labels=1), device="cpu").eval()
    modules = [sparse_parts.MLMTransformer(body(folder / "body", hf.BertForMaskedLM)), sparse_parts.SpladePooling()]
    return library.SparseEncoder(modules=modules, device="cpu").eval()


def ranges_in(model: Any) -> dict[str, Any]:
    return {name: layer.moq.inputs.range.tolist() for name, layer in quant_layers(model).items() if layer.moq.inputs}


KINDS = ["SentenceTransformer", "CrossEncoder", "SparseEncoder"]
STATIC = {"bits": 8, "embeddings": 8, "activations": {"bits": 8, "scale": "static"}}


@noisy
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_inputs_of_a_finished_model(kind: str, tmp_path: Path, alone: Any) -> None:
    texts: list[Any] = TEXTS
    if kind == "CrossEncoder":
        texts = list(zip(TEXTS, TEXTS[::-1], strict=True))
    model = finished(kind, tmp_path)
    forms = [
        iter(texts),
        texts,
        Dataset.from_dict({"text": texts})["text"],
        model.preprocess(texts),
        [model.preprocess(texts)],
        {"input": model.preprocess(texts)},
    ]
    found = [ranges_in(quantize_model(model, STATIC, inputs=form)) for form in forms]
    assert found[0] and all(ranges == found[0] for ranges in found)
    # The files say nothing of rounded inputs.
    quantize_model(model, "w4", group_size=16, gptq=len(texts), inputs=texts)
    folder = save_quantized(model, tmp_path / "packed", inputs=texts)
    proof = verify_quantized(folder).proof
    assert proof is not None and proof.agrees and proof.examples == len(texts)
    for form in forms[1:]:
        again = verify_quantized(folder, model, inputs=form).proof
        assert again is not None and again.agrees and again.examples == len(texts)
    assert np.array_equal(alone(kind, folder), answers(kind, model))


@noisy
def test_gptq_reads_as_many_texts_as_it_is_asked_for(tmp_path: Path) -> None:
    many = TEXTS * 3
    rounded = []
    for texts in (many, many[:40]):
        model = finished("SentenceTransformer", tmp_path)
        quantize_model(model, bits=3, group_size=16, gptq=40, inputs=texts)
        rounded.append({name: layer.quantized_weight()[0] for name, layer in quant_layers(model).items()})
    assert all(torch.equal(rounded[0][name], weight) for name, weight in rounded[1].items())
    model = finished("SentenceTransformer", tmp_path)
    batches = [model.preprocess(many[:32]), model.preprocess(many[32:40])]
    quantize_model(model, bits=3, group_size=16, gptq=40, inputs=batches)
    assert all(
        torch.equal(rounded[0][name], layer.quantized_weight()[0]) for name, layer in quant_layers(model).items()
    )
    # The first batch is compared.
    folder = save_quantized(model, tmp_path / "packed", inputs=many)
    assert verify_quantized(folder).proof.examples == 32


@noisy
def test_texts_have_the_prompt_that_encode_gives_them(tmp_path: Path) -> None:
    found = []
    for prompt, texts in (("nine ", TEXTS), ("", [f"nine {text}" for text in TEXTS])):
        model = finished("SentenceTransformer", tmp_path)
        model.prompts, model.default_prompt_name = {"given": prompt}, "given"
        found.append(ranges_in(quantize_model(model, STATIC, inputs=texts)))
    assert found[0] == found[1]


@noisy
@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        ("SentenceTransformer", [], "inputs hold no example$"),
        (
            "SentenceTransformer",
            [1.0, 2.0],
            r"inputs must be texts, as in \[.*\], or a batch .* preprocess .*; got float",
        ),
        ("SentenceTransformer", 7, "inputs must be texts, .*; got int"),
        ("SentenceTransformer", torch.ones(2, 3), "inputs must be texts, .*; got Tensor"),
        ("SentenceTransformer", [("one", "two")], "inputs must be texts, .*; got tuple"),
        ("SentenceTransformer", {"input_ids": [[1, 2]]}, r"as in encoder.preprocess\(texts\): input_ids is a list"),
        ("SentenceTransformer", {"pixels": torch.ones(2, 3)}, "cannot answer them.*; give texts, as in "),
        ("CrossEncoder", ["one", "two"], r"inputs must be pairs of texts, as in \[\(.*; got str"),
        ("CrossEncoder", ("one", "two"), "inputs must be pairs of texts, .*; got str"),
        ("CrossEncoder", {"pixels": torch.ones(2, 3)}, "cannot answer them.*; give pairs of texts"),
        ("SparseEncoder", [None], "inputs must be texts, .*; got NoneType"),
    ],
)
def test_inputs_of_another_kind_are_one_error(kind: str, inputs: Any, message: str, tmp_path: Path) -> None:
    model = finished(kind, tmp_path)
    with pytest.raises(MoQError, match=message):
        quantize_model(model, STATIC, inputs=inputs)
    assert not quant_layers(model)
    quantize_model(model, "w4", group_size=16)
    with pytest.raises(MoQError, match=message):
        save_quantized(model, tmp_path / "packed", inputs=inputs)
    assert not (tmp_path / "packed").exists()


@noisy
@pytest.mark.parametrize(
    ("kind", "wanted"), [(kind, "pairs of texts" if kind == "CrossEncoder" else "texts") for kind in KINDS]
)
def test_what_gptq_and_the_proof_want_is_said(
    kind: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = finished(kind, tmp_path)
    with pytest.raises(
        MoQError, match=f"give 4 of them to quantize_model as inputs=, {wanted}, as in .* leave gptq out"
    ):
        quantize_model(model, "w4", group_size=16, gptq=4)
    save_quantized(quantize_model(model, "w4", group_size=16), tmp_path / "packed")
    assert f"Prove it: save_quantized(..., inputs={wanted.split()[0]}) loads" in capsys.readouterr().out
