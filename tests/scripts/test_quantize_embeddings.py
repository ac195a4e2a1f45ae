import json
from pathlib import Path

import numpy as np
import pytest
import quantize_embeddings as command
from sentences import WORDS, encoder


def test_comparison_by_hand() -> None:
    draw = np.random.default_rng(0)
    theirs = draw.normal(size=(40, 6))
    same = command.compare(3 * theirs, theirs)
    assert same == pytest.approx({"cosine": 1.0, "recall": 1.0, "spearman": 1.0})
    ours = theirs + draw.normal(size=theirs.shape)
    unit = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (ours, theirs)]
    nearest = []
    for vectors in unit:
        similarities = vectors @ vectors.T - 9 * np.eye(40)
        nearest.append([set(row[-command.NEIGHBORS :]) for row in similarities.argsort(1)])
    hits = [len(one & other) for one, other in zip(*nearest, strict=True)]
    found = command.compare(ours, theirs)
    assert found["recall"] == pytest.approx(np.mean(hits) / command.NEIGHBORS)
    assert found["cosine"] == pytest.approx((unit[0] * unit[1]).sum(1).mean())
    assert 0 < found["spearman"] < 1


def test_texts_are_split_the_same_way_for_all_seeds(tmp_path: Path) -> None:
    lines = [f"text {index}" for index in range(200)]
    lines[7] = "a separator of lines \u2028 in a text"
    (tmp_path / "texts.txt").write_text("\n".join([*lines, "", *lines]), encoding="utf-8")
    rows = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines)
    (tmp_path / "texts.jsonl").write_text(rows, encoding="utf-8")
    texts = command.read_texts(tmp_path / "texts.txt")
    assert texts == lines == command.read_texts(tmp_path / "texts.jsonl")
    (train, held_out), (other, same) = (command.split(texts, 5000, 100, seed) for seed in (1, 2))
    assert (len(train), len(held_out)) == (100, 40) and held_out == same and train != other
    assert not set(train) & set(held_out)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    base = ["--model", str(tmp_path / "none"), "--output_dir", str(tmp_path / "out")]
    for more, message in (
        (["--texts", str(few)], "has 2 different texts: give at least 100"),
        (["--texts", str(tmp_path / "missing")], "No such file"),
    ):
        assert command.main([*base, *more]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: --texts") and message in told and told.count("\n") == 1
    assert command.main([*base, "--texts", str(few), "--held_out", "10"]) == 2
    assert capsys.readouterr().err.startswith("error: --held_out 10: recall@10 needs more than 10 texts")
    (tmp_path / "null.jsonl").write_text(json.dumps({"text": None}))
    with pytest.raises(command.UserError, match=r"--texts .*null\.jsonl"):
        command.read_texts(tmp_path / "null.jsonl")
    few.write_text("")
    with pytest.raises(command.UserError, match="a correlation needs two different scores"):
        command.read_pairs(few)
    few.write_text(json.dumps({"sentence1": "one"}))
    with pytest.raises(command.UserError, match="each line needs sentence1, sentence2 and score"):
        command.read_pairs(few)


@pytest.mark.filterwarnings("ignore")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder(tmp_path).save_pretrained(str(tmp_path / "model"))
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, 6)) for _ in range(120)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    pairs = [{"sentence1": texts[i], "sentence2": texts[-i], "score": i} for i in range(1, 9)]
    (tmp_path / "sts.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    out = tmp_path / "out"
    arguments = f"--model {tmp_path}/model --texts {tmp_path}/texts.txt --sts {tmp_path}/sts.jsonl --output_dir {out}"
    assert command.main([*arguments.split(), "--group_size", "16", "--batch_size", "16", "--bits", "3"]) == 0
    told = capsys.readouterr().out
    report = json.loads((out / "embeddings.json").read_text())
    assert f"recall@10 {report['with float']['recall']:.3f}" in told and "STS: " in told
    assert report["proof"] is True and report["texts"] == {"trained on": 96, "held out": 24}
    assert report["with float"]["cosine"] > 0.9
    assert report["quantized"]["bytes"] == sum(p.stat().st_size for p in (out / "quantized").rglob("*") if p.is_file())
    assert "onnx/model.onnx" in report["onnx"] and (out / "onnx" / "onnx" / "model.onnx").exists()
    # As Sentence Transformers 5 and 6 both know them.
    modules = [module["type"] for module in json.loads((out / "onnx" / "modules.json").read_text())]
    assert modules == [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling")]
    assert library.SentenceTransformer(str(out / "quantized")).encode(texts[:2]).shape == (2, 32)
