"""Folders, checkpoints and configs of moq_hf 0.2 mean what they meant."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from repo import ROOT
from written_by_0_2 import CONFIG, SAVED, digest, in_float, trainer

from moq_hf import MoQConfig, MoQError, cli, verify_quantized
from moq_hf.quant_linear import QuantLinear

WRITTEN = ROOT / "tests" / "golden" / "v0_2"
DIGESTS = json.loads((WRITTEN / "digests.json").read_text(encoding="utf-8"))
# The same in keywords; tables stay in float, as was its default.
KEYWORDS = MoQConfig(
    bits=4, start_bits=6, period=2, offset=1, rounding="stochastic", scale_refresh=3, group_size=8, seed=5,
    embeddings=None,
)  # fmt: skip


def test_the_config_of_a_folder_is_read() -> None:
    state = json.loads((WRITTEN / "quantized" / "moq_state.json").read_text(encoding="utf-8"))
    assert "quantize_bits" in state["config"]
    assert MoQConfig.from_dict(state["config"]) == MoQConfig.from_dict(CONFIG) == KEYWORDS


def test_a_folder_verifies_and_is_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    found = verify_quantized(WRITTEN / "quantized")
    assert {layer.bits for layer in found.layers.values()} == {4} and found.state["versions"]["moq_hf"] == "0.2.0"
    for verb in ("inspect", "verify"):
        assert cli.main([verb, str(WRITTEN / "quantized")]) == 0
    assert "identical" in capsys.readouterr().out


def test_a_folder_is_exported_to_floats(tmp_path: Path) -> None:
    assert cli.main(["export", str(WRITTEN / "quantized"), "--to", "float", str(tmp_path / "floats")]) == 0
    ids = torch.arange(10).unsqueeze(0)
    folders = (WRITTEN / "quantized", tmp_path / "floats")
    models = [hf.AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in folders]
    with torch.no_grad():
        packed, floats = (model(ids).logits for model in models)
    assert torch.equal(packed, floats)


def test_a_checkpoint_is_packed(tmp_path: Path) -> None:
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    shutil.copytree(WRITTEN / checkpoint.name, checkpoint)
    assert cli.main(["pack", str(checkpoint), str(tmp_path / "packed")]) == 0
    found = verify_quantized(tmp_path / "packed")
    assert {layer.bits for layer in found.layers.values()} == {5}
    # What is written now has keywords, and means the same.
    assert found.state["config"]["bits"] == 4 and MoQConfig.from_dict(found.state["config"]) == KEYWORDS


@pytest.mark.parametrize("config", [CONFIG, KEYWORDS], ids=["its own words", "keywords"])
def test_a_checkpoint_resumes_to_the_bit(config: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if in_float(tmp_path / "float") != DIGESTS["in_float"]:
        pytest.skip("this machine adds floats in another order than the one that made the digest")
    run = trainer(tmp_path, config)
    run.train(resume_from_checkpoint=str(WRITTEN / f"checkpoint-{SAVED}"))
    assert {m.moq.bits for m in run.model.modules() if isinstance(m, QuantLinear)} == {4}
    assert digest(run.model) == DIGESTS["quantized"]
    assert "another MoQ config" not in caplog.text


def test_tables_that_were_in_float_are_not_quantized_by_a_new_default(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(KEYWORDS, embeddings="auto"))
    with pytest.raises(MoQError, match='embeddings: null -> "auto", fixed from the offset on'):
        run.train(resume_from_checkpoint=str(WRITTEN / f"checkpoint-{SAVED}"))
