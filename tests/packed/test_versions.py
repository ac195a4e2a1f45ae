"""Each folder says which versions load it, as they were tried, and none loads as another model in an older one."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import FAMILIES
from model_zoo import new_model
from packaging.version import Version
from repo import ROOT
from safetensors.torch import load_file
from tiny_runs import callback_of, moq, stock

from moq_hf import MoQConfig, MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.export.floats import export_floats
from moq_hf.formats import table
from moq_hf.formats.table import LAYOUTS

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
    needs = LAYOUTS[expected].needs
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
        least = LAYOUTS[layout].needs["transformers"]
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


BATCH = {"input_ids": torch.arange(8)[None]}
FLOORS = {"transformers": "5.16.1", "compressed-tensors": "0.17.0"}


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """The floors are installed, or these."""
    found = FLOORS | {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(table, "installed", found.__getitem__)


@pytest.mark.parametrize(
    ("config", "library", "ways"),
    [
        ({"bits": 3}, "compressed-tensors >= 0.18.0", ["pack_bits to 4", "2, 4 or 8 bits", " MB for those of 3 bits"]),
        ({"bits": 6}, "compressed-tensors >= 0.18.0", ["pack_bits to 8"]),
        ({"bits": {"mean": 3.0}}, "compressed-tensors >= 0.18.0", ["codes of 3 bits", "pack_bits to 4"]),
        ({"bits": 4, "overrides": {"*.layer.0.*": {"bits": 5}}}, "compressed-tensors >= 0.18.0", ["codes of 5 bits"]),
    ],
)
@pytest.mark.parametrize("kind", [stock, moq])
def test_what_older_libraries_cannot_load_is_told_before_the_first_step(
    config: Any, library: str, ways: list[str], kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    trainer = kind(tmp_path, MoQConfig.load(config), max_steps=64)
    with pytest.raises(MoQError) as told:
        trainer.train()
    assert f"{library} (" in str(told.value) and "install that" in str(told.value)
    assert all(way in str(told.value) for way in ways), told.value
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("config", [{"bits": 3, "pack_bits": 4}, {"bits": 2}, {"bits": 8}, {"bits": 7, "pack_bits": 8}])
def test_a_run_with_the_floors_is_delivered_packed(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    trainer = moq(tmp_path, MoQConfig.load(config), max_steps=2)
    trainer.train()
    state = state_of(tmp_path / "quantized")
    assert state["layout"] == "packed" and state["proof"]["agrees"]
    assert state["needs"] == {"transformers": "5.15.0", "compressed-tensors": "0.17.0"}


def test_a_run_that_resumes_with_older_libraries_meets_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    stock(tmp_path, MoQConfig(bits=3), **more).train()
    pretend(monkeypatch)
    trainer = stock(tmp_path, MoQConfig(bits=3), **more)
    with pytest.raises(MoQError, match=r"pack_bits to 4"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # The way out is one for a run that has begun, too.
    trainer = stock(tmp_path, MoQConfig(bits=3, pack_bits=4), **more)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert state_of(tmp_path / "quantized")["needs"]["compressed-tensors"] == "0.17.0"


@pytest.mark.parametrize(
    ("family", "config", "layout", "fault"),
    [
        ("BERT", {"bits": 3}, None, "layout packed of this model needs compressed-tensors >= 0.18.0"),
        ("BERT", {"bits": 4}, "unpacked", "layout unpacked of this model needs transformers >= 5.23.0"),
        ("BERT", {"bits": 4}, "gemma", "layout gemma of this model needs transformers >= 5.23.0"),
        ("T5", {"bits": 4}, None, "layout unpacked of this model needs transformers >= 5.23.0"),
        ("BERT", {"bits": 3}, "floats", None),
        ("BERT", {"bits": 3, "pack_bits": 4}, None, None),
        # What is unpacked while loading where that is possible can be packed too.
        ("BERT", {"bits": 4, "q_type": "asymmetric"}, None, None),
    ],
)
def test_nothing_is_saved_that_the_installed_libraries_cannot_load(
    family: str, config: Any, layout: Any, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    model = quantize_model(new_model(family, "sequence classification"), config)
    if fault is None:
        save_quantized(model, tmp_path, layout=layout)
        assert not table.lacking(state_of(tmp_path)["needs"])
        return
    with pytest.raises(MoQError, match=re.escape(fault)):
        save_quantized(model, tmp_path / "folder", layout=layout)
    assert not (tmp_path / "folder").exists()


def test_quantize_model_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    quantize_model(model_of("Llama"), bits=3)
    assert not caplog.records
    pretend(monkeypatch)
    quantize_model(model_of("Llama"), bits=3)
    assert "pack_bits to 4" in caplog.text
    quantize_model(model_of("Llama"), bits=4, format="mxfp4")
    assert 'set format to "int"' in caplog.text
    quantize_model(model_of("Llama"), {"quantize_bits": {"target_bits": 4}, "quantize_format": "mxfp4"})
    assert 'set quantize_format to "int"' in caplog.text
    quantize_model(new_model("T5", "sequence classification"), bits=4)
    assert "T5ForSequenceClassification is delivered unpacked while loading, which needs transformers" in caplog.text


@pytest.mark.parametrize("config", [{"bits": 3}, {"bits": 3, "q_type": "asymmetric"}, {"bits": 2}, {"bits": 4}])
def test_codes_in_wider_containers_are_the_same(config: Any, tmp_path: Path) -> None:
    model = new_model("BERT", "sequence classification")
    folders = []
    for pack_bits in (None, 4, 8):
        quantized = quantize_model(copy.deepcopy(model), {**config, "embeddings": None, "pack_bits": pack_bits})
        layout: Any = "packed"
        folders.append(save_quantized(quantized, tmp_path / str(pack_bits), inputs=BATCH, layout=layout))
    found = [verify_quantized(folder) for folder in folders]
    assert all(each.proof.largest_difference == 0.0 for each in found)
    bits = config["bits"]
    assert [{layer.bits for layer in each.layers.values()} for each in found] == [{bits}] * 3
    for folder, width in zip(folders, (bits, max(4, bits), 8), strict=True):
        groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
        assert {group["weights"]["num_bits"] for group in groups} == {width}
    # What a folder needs is about its files, not about what wrote it.
    needs = [each.state["needs"]["compressed-tensors"] for each in found]
    assert needs == ["0.18.0" if bits == 3 else "0.17.0", "0.17.0", "0.17.0"]
    assert found[0].file_bytes <= found[1].file_bytes < found[2].file_bytes


def test_sizes_are_those_of_the_containers(tmp_path: Path) -> None:
    for pack_bits in (None, 4, 8):
        trainer = moq(tmp_path / str(pack_bits), MoQConfig(bits=3, embeddings=None, pack_bits=pack_bits), max_steps=1)
        trainer.train()
        sizes = callback_of(trainer).controller.sizes
        tensors = load_file(tmp_path / str(pack_bits) / "quantized" / "model.safetensors")
        stored = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("shape"))
        assert sizes.mb == pytest.approx(stored / 1e6)
        # They are no more precise.
        assert sizes.layer_bits == 3.0
