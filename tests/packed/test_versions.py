"""Each folder says which versions load it, as they were tried, and none loads as another model in an older one."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from families import FAMILIES
from model_zoo import new_model
from packaging.version import Version
from repo import ROOT

from moq_hf import MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.export.floats import export_floats
from moq_hf.formats.table import LAYOUTS, NEEDS

FOUR: dict[str, Any] = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": "per_channel"}
BESIDE = "config.5.15.0.json"


def model_of(family: str) -> Any:
    if family in FAMILIES:
        return FAMILIES[family].kind(FAMILIES[family].config())
    return new_model(family, "image classification" if family == "ViT" else "causal LM")


def state_of(folder: Path) -> Any:
    return json.loads((folder / "moq_state.json").read_text())


@pytest.mark.parametrize(
    ("family", "layout", "expected", "is_guarded"),
    [
        ("Llama", "packed", "packed", False),
        ("Llama", "unpacked", "unpacked", False),
        ("Llama", "floats", "floats", False),
        ("Llama", "gemma", "gemma", True),
        ("GPT-2", "packed", "floats", False),
        # Modules have other names in older versions.
        ("ViT", "packed", "packed", True),
        ("ViT", "unpacked", "unpacked", True),
        ("ViT", "floats", "floats", False),
        # Older versions do not unpack experts.
        ("Mixtral", "packed", "packed", True),
    ],
)
def test_a_folder_says_what_it_needs(
    family: str, layout: Any, expected: Any, is_guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantize_model(model_of(family), FOUR)
    save_quantized(model, tmp_path, layout=layout)
    needs = NEEDS[expected]
    assert state_of(tmp_path)["needs"] == needs
    card = (tmp_path / "README.md").read_text()
    assert "pip install " + " ".join(f'"{name}>={least}"' for name, least in needs.items()) + "\n" in card
    assert [path.name for path in tmp_path.glob("config.*.json")] == [
        f"config.{needs['transformers']}.json"
    ] * is_guarded
    monkeypatch.setattr("transformers.configuration_utils.__version__", "5.0.0")
    if is_guarded:
        with pytest.raises(ValueError, match=f"needs transformers >= {needs['transformers']}"):
            type(model).from_pretrained(tmp_path)
    else:
        type(model).from_pretrained(tmp_path)


def test_the_config_beside_is_a_file_of_the_folder(tmp_path: Path) -> None:
    model = quantize_model(model_of("ViT"), FOUR)
    folder = save_quantized(model, tmp_path / "packed")
    made = export_floats(folder, tmp_path / "floats")
    assert not (made / BESIDE).exists()
    hf.ViTForImageClassification.from_pretrained(made)
    right = (folder / BESIDE).read_text()
    (folder / BESIDE).write_text(right.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(MoQError, match="is not as it was saved"):
        verify_quantized(folder)
    (folder / BESIDE).unlink()
    with pytest.raises(MoQError, match="or a config beside it, is not as it was saved"):
        verify_quantized(folder)
    save_quantized(model, folder)
    assert verify_quantized(folder, model).layers
    # Nothing of an older model stays beside a new one.
    save_quantized(model, folder, layout="floats")
    assert not (folder / BESIDE).exists()


def test_what_a_folder_needs_is_what_was_tried() -> None:
    """No version loads another model, the least one and newer ones load every folder, the one before it does not."""
    folders = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())["folders"]
    right = ("equal", "rounding")
    # Older versions were not asked about these two yet, and their folders say that they need a newer one.
    for layout in LAYOUTS.keys() - {"gemma", "mxfp4"}:
        least = NEEDS[layout]["transformers"]
        own = [folder for folder in folders if folder["layout"] == layout]
        assert {folder["needs"] for folder in own} == {least}
        for folder in own:
            for version, answer in folder["answers"].items():
                loads = Version(version) >= Version(least)
                assert answer in right or (answer.startswith("error") and not loads), (folder["case"], version, answer)
        tried = list(own[0]["answers"])
        before = tried[: tried.index(least)]
        # Version 5.0.0 is the first that is of interest.
        assert not before or any(folder["answers"][before[-1]] not in right for folder in own)
