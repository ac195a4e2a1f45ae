"""ONNX models hold the exact integers, answer as the checkpoint does, and are not written if they do not."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers as hf
from onnx import TensorProto, numpy_helper
from onnx_layer import Layers, from_same_arithmetic
from packed_bert import SHAPE, TOKENIZER, VALIDATION, checkpoint, config_of
from repo import ROOT
from torch import nn

from moq_hf import MoQError, quantize_model, save_quantized
from moq_hf.cli import main
from moq_hf.export import file_names
from moq_hf.export import onnx as onnx_module
from moq_hf.export.compare import Data, random_pictures, read_data
from moq_hf.export.onnx import Export, export_onnx
from moq_hf.export.onnx_rewrite import Flavor, target_here
from moq_hf.grid import Grid, PerChannel, RowBlocks
from moq_hf.packed.card import write_card
from moq_hf.packed.reading import stored_weights
from moq_hf.packed.state import served_by
from moq_hf.packed.verify import verify_quantized
from moq_hf.servers import ONNX


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf.set_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SHAPE))
    algo = {"range": "full", "scale_dtype": "float16"}
    config = config_of(quantize_groups="per_channel", quantize_embeddings=4, quantize_algo=algo)
    return checkpoint(tmp_path_factory.mktemp("export") / "packed", model, config, [8, 6, 4, 3, 2, 1, 8])


@pytest.fixture(scope="module")
def exported(classifier: Path) -> Export:
    rows = read_data(VALIDATION, "sst2")
    data = Data(rows.texts[:24], None if rows.labels is None else rows.labels[:24], "sst2")
    # An empty folder is nobody's.
    (classifier.parent / "onnx").mkdir()
    flavors: list[Flavor] = ["float", "weight-only", "int8", "nbits"]
    return export_onnx(classifier, classifier.parent / "onnx", flavors=flavors, data=data, activation_bits=7)


def initializers(path: Path) -> dict[str, onnx.TensorProto]:
    return {value.name: value for value in onnx.load(path).graph.initializer}


def test_the_integers_are_those_of_the_checkpoint(classifier: Path, exported: Export) -> None:
    weights, layers = stored_weights(classifier), exported.layers
    # The extra code and scales of both signs are there, but for 1 bit and the table.
    for layer, stored in verify_quantized(classifier).layers.items():
        codes, scale, _ = weights[layer]
        if stored.bits > 1 and "embeddings" not in layer:
            assert bool((scale > 0).any() and (scale < 0).any()), layer
            assert int(codes.min()) == -(2 ** (stored.bits - 1)), layer
    for flavor, name in (("weight-only", "model.onnx"), ("int8", "model_int8.onnx")):
        found = initializers(exported.directory / name)
        for layer, (codes, scale, _) in weights.items():
            if "embeddings" in layer:
                continue
            value = found[f"{layer}.codes"]
            kind = layers[flavor][layer]
            assert value.data_type == getattr(TensorProto, kind.upper())
            stored = numpy_helper.to_array(value).astype(np.int32) - (128 if kind == "uint8" else 0)
            # Integers of 8 bits lie as a product of integers takes them.
            rows = stored if flavor == "weight-only" else stored.T
            assert np.array_equal(rows, codes.numpy()), layer
            assert np.array_equal(numpy_helper.to_array(found[f"{layer}.scale"]).ravel(), scale.numpy().ravel())
        # What is left in float is no quantized weight.
        large = [v.name for v in found.values() if v.data_type == TensorProto.FLOAT and np.prod(v.dims) > 1024]
        assert large == ["bert.embeddings.word_embeddings.scale"]
    # MatMulNBits has 2, 4 and 8 bits.
    assert set(layers["nbits"].values()) == {"int2", "int4", "int8"}
    kinds = set(layers["weight-only"].values())
    assert kinds == {"int4", "int8"} and set(layers["int8"].values()) == {"int4", "int8"}


def test_the_proof(classifier: Path, exported: Export) -> None:
    weight_only, int8, nbits = (exported.proofs[flavor] for flavor in ("weight-only", "int8", "nbits"))
    assert weight_only.largest_difference < 1e-6 and weight_only.agreement == 1.0
    assert weight_only.metrics == exported.checkpoint_metrics
    assert exported.checkpoint_metrics.keys() == {"accuracy"} and exported.sentences == 24
    # Integer sums are exact, whatever the instructions of this processor.
    rows = read_data(VALIDATION, "sst2")
    data = Data(rows.texts[:24])
    same = from_same_arithmetic(classifier, exported, "int8", data, bits=7)
    assert same < 1e-5 and int8.largest_difference > 10 * same
    # A sum in float may round to another code in the next layer.
    assert from_same_arithmetic(classifier, exported, "nbits", data) < 0.5 * nbits.largest_difference
    report = json.loads((exported.directory / "moq_export.json").read_text())
    assert report["opset"] == 21 and report["activation_bits"] == 7
    assert report["proofs"]["weight-only"]["agreement"] == 1.0
    assert "weight-only: activations in float; OpenVINO rounds them, unless compiled with" in exported.table()


def test_sums_before_a_norm_are_not_fused(exported: Export, tmp_path: Path) -> None:
    def operators(name: str) -> list[str]:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(exported.directory / name, options, providers=["CPUExecutionProvider"])
        return [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]

    assert "SkipLayerNormalization" not in operators("model.onnx")
    # As PyTorch exports it, so that what others make of it can be compared.
    assert "SkipLayerNormalization" in operators("model_float.onnx")


def test_any_batch_and_length_in_plain_onnxruntime(classifier: Path, exported: Export) -> None:
    model = hf.BertForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(exported.directory)
    session = onnxruntime.InferenceSession(exported.directory / "model.onnx", providers=["CPUExecutionProvider"])
    for texts in (["no"], ["a good film"] * 5, ["one", "a very very long one " * 9, "two of them"]):
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits
        found = session.run(["logits"], {name: inputs[name].numpy() for name in [i.name for i in session.get_inputs()]})
        torch.testing.assert_close(torch.from_numpy(found[0]), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "config", "flavors"),
    [
        (hf.Qwen3ForCausalLM, hf.Qwen3Config, ["weight-only", "nbits"]),
        (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, ["weight-only"]),
    ],
)
def test_a_decoder_with_its_cache_and_a_tied_head(
    architecture: Any, config: Any, flavors: list[Flavor], tmp_path: Path
) -> None:
    hf.set_seed(0)
    shape = {**SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0, "head_dim": 16}
    model = architecture(config(**shape, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        # Else each token's likeliest successor is itself.
        for parameter in model.model.layers.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    tables = 4 if "nbits" in flavors else 8
    source = checkpoint(tmp_path / "packed", model, config_of(quantize_embeddings=tables), [8, 4, 2])
    assert says_of(source) == "yes"
    found = export_onnx(source, tmp_path / "onnx", flavors=flavors)
    if "nbits" in flavors:
        # A code that is one more or less, because a sum was added up in another order, shows.
        assert from_same_arithmetic(source, found, "nbits") < 0.5 * found.proofs["nbits"].largest_difference
        assert {"int2", "int4", "int8"} <= set(found.layers["nbits"].values())
    # Padding is on the left, where generation begins.
    ids, mask = torch.randint(3, 1100, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    ids[0, :3] = mask[0, :3] = 0
    plain = type(model).from_pretrained(source).eval()
    expected = plain.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=8, max_new_tokens=8)[:, 6:]
    assert expected.unique().numel() > 4
    tokens = generated(tmp_path / "onnx" / "model.onnx", ids.numpy(), mask.numpy(), 8)
    assert np.array_equal(tokens, expected.numpy())


def generated(path: Path, ids: Any, mask: Any, steps: int) -> Any:
    """The likeliest tokens `[batch, steps]` but the end, from a graph with a cache."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    past = {}
    for wanted in session.get_inputs():
        if wanted.name.startswith("past"):
            past[wanted.name] = np.zeros((len(ids), wanted.shape[1], 0, wanted.shape[3]), np.float32)
    tokens = []
    for _ in range(steps):
        positions = (mask.cumsum(1) - 1).clip(min=0)[:, -ids.shape[1] :]
        fixed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits, *present = session.run(None, fixed | past)
        logits[..., 2] = -np.inf
        past = dict(zip(past, present, strict=True))
        ids = logits[:, -1].argmax(-1, keepdims=True)
        mask = np.concatenate((mask, np.ones_like(ids)), 1)
        tokens.append(ids)
    return np.concatenate(tokens, 1)


def test_nothing_of_this_machine_is_in_the_files(exported: Export) -> None:
    for path in exported.directory.iterdir():
        content = path.read_bytes()
        assert b"site-packages" not in content and str(ROOT).encode() not in content, path
    assert "quantization_config" not in json.loads((exported.directory / "config.json").read_text())
    assert {p.name for p in exported.directory.iterdir()} >= {"model.onnx", "model_int8.onnx", "tokenizer.json"}


def test_token_classes_asymmetric_groups_and_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(quantize_type="asymmetric", quantize_group_size=16)
    source = checkpoint(tmp_path / "packed", hf.BertForTokenClassification(hf.BertConfig(**SHAPE)), config, [8, 3])
    monkeypatch.setattr(onnx_module, "EXTERNAL_DATA_ABOVE", 1000)
    found = export_onnx(source, tmp_path / "onnx", flavors=["weight-only"])
    for proof in found.proofs.values():
        assert proof.largest_difference < 1e-5 and proof.agreement == 1.0
    assert (tmp_path / "onnx" / "model.onnx_data").stat().st_size > 100_000
    kinds = {v.data_type for v in initializers(tmp_path / "onnx" / "model.onnx").values()}
    assert {TensorProto.INT4, TensorProto.INT8} <= kinds


def test_a_difference_above_the_tolerance_is_refused(
    classifier: Path,
    exported: Export,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copied(model: Any, path: Path) -> int:
        shutil.copy(exported.directory / path.name, path)
        return path.stat().st_size

    monkeypatch.setattr(onnx_module, "_write_model", copied)
    words = ["export", str(classifier), "--to", "onnx", str(tmp_path / "out")]
    # In the old spelling; the new one is the same option.
    assert main([*words, "--flavours", "weight-only", "--tolerance", "1e-12"]) == 2
    assert "more than the tolerance of 1e-12: nothing is written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        main([*words, "--flavors", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err


def test_a_convolution_is_dequantize() -> None:
    layers = Layers()
    for grid in (Grid(PerChannel()), Grid(RowBlocks(2), symmetric=False)):
        plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="reflect")
        layers.add(plain, torch.randn(2, 4, 7, 7), 5, grid, kind="conv")
    rewritten = layers.rewritten(layers.traced(), "weight-only")
    expected = [layer(x) for layer, x in zip(layers, layers.inputs, strict=True)]
    torch.testing.assert_close(layers.answers(rewritten), expected)
    assert "int8" in rewritten.stored.values()


def says_of(folder: Path) -> str:
    """What `moq-hf inspect` says of the export of a folder."""
    return next(verdict.answer for verdict in served_by(folder) if verdict.server is ONNX)


DISTILBERT = {"vocab_size": 1100, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}
TEXTS: dict[str, dict[str, Any]] = {
    "DistilBert": DISTILBERT,
    "T5": {"vocab_size": 1100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
    "DebertaV2": SHAPE,
    # Its positions begin after the one of padding.
    "Roberta": {**SHAPE, "max_position_embeddings": 80},
    "ModernBert": {
        **SHAPE,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}


@pytest.mark.parametrize(
    "name",
    [name for name in ONNX.tried.split() if re.match("|".join(TEXTS), name)],
)
def test_what_inspect_says_yes_to_is_exported(name: str, tmp_path: Path) -> None:
    """The other tests export the other classes that were tried."""
    cls = getattr(hf, name)
    shape = next(shape for family, shape in TEXTS.items() if name.startswith(family))
    source = checkpoint(tmp_path / "packed", cls(cls.config_class(**shape)), config_of(quantize_groups="per_channel"))
    assert says_of(source) == "yes"
    found = export_onnx(source, tmp_path / "onnx", flavors=["weight-only"], max_length=32)
    assert found.proofs["weight-only"].largest_difference < 1e-5


PICTURES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def picture_model(kind: str) -> nn.Module:
    hf.set_seed(0)
    if kind == "ConvNeXt":
        return hf.ConvNextForImageClassification(hf.ConvNextConfig(num_stages=1, hidden_sizes=[32], depths=[1]))
    if kind == "ResNet":
        config = hf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic")
        return hf.ResNetForImageClassification(config)
    config = hf.ViTConfig(**PICTURES, image_size=16, patch_size=8)
    return hf.ViTForImageClassification(config) if kind == "ViT" else hf.ViTModel(config)


@pytest.mark.parametrize("kind", ["ConvNeXt", "ResNet", "ViT", "ViT's body"])
def test_models_of_pictures(kind: str, tmp_path: Path) -> None:
    model = picture_model(kind).eval()
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": "per_channel"}
    quantize_model(model, {**config, "quantize_convolutions": True})
    source = save_quantized(model, tmp_path / "packed")
    (source / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 48}}')
    assert says_of(source) == "yes"
    found = export_onnx(source, tmp_path / "onnx", flavors=["weight-only"])
    assert found.sentences == 8 and "8 pictures compared" in found.table()
    assert (tmp_path / "onnx" / "preprocessor_config.json").exists()
    for proof in found.proofs.values():
        assert proof.largest_difference < 1e-5 and proof.agreement in (1.0, None)
    weights, values = stored_weights(source), initializers(tmp_path / "onnx" / "model.onnx")
    name = next(name for name, layer in verify_quantized(source).layers.items() if layer.kind == "conv")
    value, codes = values[f"{name}.codes"], weights[name].codes
    assert value.data_type == TensorProto.INT4 and tuple(value.dims) == tuple(model.get_submodule(name).weight.shape)
    assert np.array_equal(numpy_helper.to_array(value).astype(np.int32).reshape(codes.shape), codes.numpy())
    # What was 32 bits a weight is 4, but for what stays in float.
    assert found.bytes["weight-only"] < 0.5 * found.bytes["float checkpoint"]
    with pytest.raises(MoQError, match="compared on random ones"):
        export_onnx(source, tmp_path / "other", data=Data([("a",), ("b",)]))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (None, (224, 224)),
        ("{}", (224, 224)),
        ('{"size": {"shortest_edge": 64}, "crop_size": {"height": 48, "width": 32}}', (48, 32)),
        ('{"size": {"shortest_edge": 64}}', (64, 64)),
        ('{"size": 40}', (40, 40)),
    ],
)
def test_how_large_pictures_are(text: str | None, shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    if text is not None:
        path.write_text(text)
    batch = random_pictures(picture_model("ResNet"), None if text is None else path)
    assert batch["pixel_values"].shape == (8, 3, *shape)
    batch = random_pictures(picture_model("ViT"), None if text is None else path)
    assert batch["pixel_values"].shape == (8, 3, 16, 16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there must be rows"),
        ("{", "line 1: must be a JSON object"),
        ('{"a": "x", "label": 1}\n{"a": "x", "b": "y", "label": 0}', "as many texts"),
        ('{"a": "x", "label": 1}\n{"a": "x"}', "all with a label or none"),
        ('{"a": "x", "label": "yes"}', "line 1"),
        ('{"label": 1}', "line 1"),
        ('{"a": "x", "label": NaN}', "line 1"),
        ("[1]", "line 1"),
        ('["ab"]', "line 1"),
        ('{"a": "x", "label": ' + "9" * 400 + "}", "line 1"),
    ],
)
def test_wrong_data(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(MoQError, match=says):
        read_data(tmp_path / "rows.jsonl")


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four"]
    lines = [json.dumps({"text": text, "label": 0}, ensure_ascii=False) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [text for (text,) in read_data(tmp_path / "rows.jsonl").texts] == texts


def test_wrong_arguments(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoQError, match="task must be one of"):
        read_data(VALIDATION, "sst3")
    with pytest.raises(MoQError, match="is not empty: give a new folder"):
        export_onnx(classifier, classifier)
    with pytest.raises(MoQError, match="exists already: give a new name"):
        export_onnx(classifier, classifier / "config.json")
    with pytest.raises(MoQError, match="missing"):
        export_onnx(TOKENIZER, tmp_path / "out")
    two = [("a",), ("b",)]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"flavors": ["int4"]}, "flavors must be one of float, weight-only"),
        ({"activation_bits": 1}, "activation_bits must be one of 2, 3"),
        ({"data": Data(two, [1, 0], "stsb")}, "does not fit"),
        ({"data": Data(two, [1.0, 2.5])}, "class ids"),
        ({"data": Data(two, [0, 2], "mrpc")}, "class ids, 0 to 1"),
        ({"data": Data(two, [0])}, "as many labels"),
        ({"data": Data([("a",)])}, "at least two"),
        ({"data": Data([])}, "at least two"),
    ]
    for options, text in wrong:
        with pytest.raises(MoQError, match=text):
            export_onnx(classifier, tmp_path / "out", **options)
    assert main(["export", str(tmp_path), "--to", "onnx", str(tmp_path / "out")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.count("moq_state.json is missing") == 2
    assert told.count("; of a float model quantize_model, then save_quantized, make one\n") == 2
    (tmp_path / "quantized").symlink_to(classifier)
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"its packed model is {tmp_path / 'quantized'}" in capsys.readouterr().err
    bare = tmp_path / "bare"
    shutil.copytree(classifier, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(MoQError, match="no tokenizer"):
        export_onnx(bare, tmp_path / "out")
    other = checkpoint(tmp_path / "other", hf.BertForMaskedLM(hf.BertConfig(**SHAPE)), config_of())
    with pytest.raises(MoQError, match="BertForMaskedLM is not exported"):
        export_onnx(other, tmp_path / "out")
    # Whatever a model's own code raises.
    tiny = hf.BertModel(hf.BertConfig(**{**SHAPE, "type_vocab_size": 1}))
    other = checkpoint(tmp_path / "tiny", tiny, config_of())
    with pytest.raises(MoQError, match="the checkpoint cannot answer the sentences: IndexError"):
        export_onnx(other, tmp_path / "out", data=Data([("a", "b")] * 2))
    assert not (tmp_path / "out").exists()


def test_a_folder_is_refused_before_anything_is_asked_for(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    other = checkpoint(tmp_path / "other", hf.BertForMaskedLM(hf.BertConfig(**SHAPE)), config_of())
    with pytest.raises(MoQError, match="BertForMaskedLM is not exported"):
        export_onnx(other, tmp_path / "out")
    bare = tmp_path / "bare"
    shutil.copytree(classifier, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(MoQError, match="no tokenizer"):
        export_onnx(bare, tmp_path / "out")
    with pytest.raises(MoQError, match="onnxruntime is not installed: pip install"):
        export_onnx(classifier, tmp_path / "out")


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_names_that_others_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    model = hf.BertModel(hf.BertConfig(**SHAPE))
    source = checkpoint(tmp_path / "packed", model, config_of(quantize_groups="per_channel"), [4, 3, 2])
    beside = {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    for name in beside:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    write_card(source)
    out = tmp_path / "out"
    words = ["export", str(source), "--to", "onnx", str(out), "--names", "hub"]
    assert main([*words, "--flavors", "weight-only", "int8", "nbits", "qdq"]) == 0
    written = {"onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_q4.onnx"}
    has_vnni = target_here() == "vnni"
    written |= {"onnx/model_qint8_avx512_vnni.onnx"} if has_vnni else set()
    common = {"README.md", "config.json", "moq_export.json", "tokenizer.json", "tokenizer_config.json"}
    assert files_in(out) == written | beside | common
    report = json.loads((out / "moq_export.json").read_text())
    left_out = {"openvino/openvino_model.xml", "openvino/openvino_model_qint8_quantized.xml"}
    assert set(report["files"].values()) == written and report["left_out"].keys() >= left_out
    card = (out / "README.md").read_text()
    assert "from_pretrained" not in card and "\nlibrary_name: transformers.js\n" in card and "## Bits per layer" in card
    assert re.search(r"\| onnx/model.onnx \|.* \| transformers.js \(fp32\), Sentence Transformers,", card)
    assert re.search(r"\| onnx/model_q4.onnx \|.* \| transformers.js, by the number of bits \|", card)
    assert "- nbits: activations per_block, 8 bits\n" in card
    assert "- openvino/openvino_model.xml is left out: openvino is not installed" in card


def test_a_file_for_vnni_needs_it_to_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    files = file_names.NAMED["hub"]
    found = [(files[key].path, files[key].target) for key in ("int8", "int8 for VNNI")]
    assert found == [("onnx/model_quantized.onnx", "avx2"), ("onnx/model_qint8_avx512_vnni.onnx", "vnni")]
    monkeypatch.setattr(file_names, "target_here", lambda: "avx2")
    file_names.check_possible(files["int8"], files["int8"].path, False)
    with pytest.raises(MoQError, match="has no VNNI"):
        file_names.check_possible(files["int8 for VNNI"], files["int8 for VNNI"].path, False)


def test_a_decoder_by_the_names_of_others(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, num_key_value_heads=2))
    config = {"quantize_bits": {"target_bits": 2, "start_bits": 2}}
    source = checkpoint(tmp_path / "packed", model, config)
    monkeypatch.setattr(onnx_module, "EXTERNAL_DATA_ABOVE", 1000)
    found = export_onnx(source, tmp_path / "out", flavors=["weight-only", "nbits"], names="hub")
    files = {"onnx/model.onnx", "onnx/model_q2.onnx"}
    assert set(found.files.values()) == files and "openvino/openvino_model.xml" in found.left_out
    # The second file of each has the name that transformers.js and optimum make of the first.
    files |= {f"{name}_data" for name in files} | {"generation_config.json"}
    assert files_in(tmp_path / "out") > files
    # In a browser transformers.js looks for a second file where the config has one, and fastembed for a length.
    written = json.loads((tmp_path / "out" / "config.json").read_text())["transformers.js_config"]
    assert written == {"use_external_data_format": {"model.onnx": 1, "model_q2.onnx": 1}}
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == SHAPE["max_position_embeddings"]
    # Layers of 8 bits have no such name.
    found = export_onnx(classifier, tmp_path / "eight", flavors=["nbits"], names="hub")
    assert found.files == {} and found.left_out == {"onnx/model_q8.onnx": "no library looks for 8 bits in blocks"}
    with pytest.raises(MoQError, match="flavors must be one of weight-only, int8, nbits, qdq"):
        export_onnx(source, tmp_path / "float", flavors=["float"], names="hub")


def test_the_format_of_openvino(classifier: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    found = export_onnx(classifier, tmp_path / "out", flavors=["weight-only"], names="hub")
    assert files_in(tmp_path / "out" / "openvino") == {"openvino_model.xml", "openvino_model.bin"}
    assert found.proofs["OpenVINO"].largest_difference < 0.05
    # The integers stay what they are.
    assert (tmp_path / "out" / "openvino" / "openvino_model.bin").stat().st_size < found.bytes["weight-only"]
