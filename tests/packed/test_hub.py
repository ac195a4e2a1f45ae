"""Uploading packed models to a stand-in for the Hub on loopback, and loading them from there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hub_stub import Hub
from huggingface_hub import ModelCard
from repo import HELPERS, ROOT

CLIENT = HELPERS / "hub_client.py"


class Done(NamedTuple):
    """All runs of the client: what is on the Hub now, the output folders, and what was printed."""

    repos: dict[str, dict[str, bytes]]
    folder: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """One process for all: the Hub's address is read when its library is imported, which takes longer than the runs."""
    folder = tmp_path_factory.mktemp("hub")
    hub = Hub()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": "hf_test",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(CLIENT), str(folder)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    yield Done(hub.repos, folder, run.stdout, run.stderr)
    hub.close()


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"checkpoint-5", "checkpoint-10", "checkpoint-11"}),
    ],
)
def test_the_packed_model_is_uploaded_whatever_the_strategy(strategy: str, folders: set[str], done: Done) -> None:
    files = done.repos[f"tester/{strategy}"]
    assert {"config.json", "model.safetensors", "moq_state.json", "README.md", "training_args.bin"} <= set(files)
    assert files["model.safetensors"] == (done.folder / strategy / "model.safetensors").read_bytes()
    assert b"pack-quantized" in files["config.json"]
    assert {name.split("/")[0] for name in files if "/" in name} == {"quantized", *folders}
    # The Hub keeps files of the same content once.
    assert files["quantized/model.safetensors"] == files["model.safetensors"]
    # Checkpoints keep the float weights and the state that a resumed run needs.
    for folder in folders:
        assert b"pack-quantized" not in files[f"{folder}/config.json"]
        assert len(files[f"{folder}/model.safetensors"]) > len(files["model.safetensors"])
        assert b"MoQCallback" in files[f"{folder}/trainer_state.json"]


def test_the_card_has_valid_metadata(done: Done) -> None:
    card = ModelCard(done.repos["tester/end"]["README.md"].decode())
    assert {"moq", "quantization-aware-training", "compressed-tensors"} <= set(card.data.tags)
    assert card.data.datasets == ["nyu-mll/glue"]
    assert 'from_pretrained("tester/end")' in card.text
    assert str(done.folder) not in card.content


def test_a_stock_trainer_uploads_it_in_a_folder(done: Done) -> None:
    files = done.repos["tester/stock"]
    assert b"pack-quantized" in files["quantized/config.json"] and b"pack-quantized" not in files["config.json"]
    assert {"quantized/moq_state.json", "quantized/README.md"} <= set(files)


@pytest.mark.parametrize("name", ["loaded", "saved", "trained"])
def test_a_model_that_was_loaded_quantized_is_uploaded_packed(name: str, done: Done) -> None:
    files = done.repos[f"tester/{name}"]
    assert b"pack-quantized" in files["config.json"] and {"moq_state.json", "README.md"} <= set(files)


def test_a_push_that_fails_at_any_request_leaves_one_whole_model_here_and_there(done: Done) -> None:
    faults = [json.loads(line.removeprefix("fault ")) for line in done.stdout.splitlines() if line.startswith("fault ")]
    for kind, error in (("500", "HfHubHTTPError"), ("dropped", "RemoteProtocolError")):
        found = [fault for fault in faults if fault["kind"] == kind]
        # The client has verified what lies here each time; there the older model is complete until the push succeeds.
        assert [fault["bits"] for fault in found] == [2] * (len(found) - 1) + [4]
        assert [fault["raised"] for fault in found] == [error] * (len(found) - 1) + [None]
        paths = [fault["path"].rpartition("/faults/")[2] for fault in found]
        assert {"/api/validate-yaml", "preupload/main", "commit/main", ""} == set(paths)
