"""`moq-hf inspect` of floats: the grid of each weight matrix in a folder or a GGUF file."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from moq_hf import cli, quantizer
from moq_hf.grid import Grid, PerGroup

Q4_0 = Grid(PerGroup(32), full=True, scale_dtype="float16", search="absmax")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    on_grid = quantizer.fake_quantize(torch.randn(16, 64), 4, Q4_0)
    return {
        "a.weight": on_grid,
        "b.weight": on_grid.t().contiguous() @ torch.eye(16),
        "c.weight": torch.randn(16, 64),
        "bias": torch.randn(4),
    }


def test_a_folder_of_floats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    assert cli.main(["inspect", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "4 bits in groups of 32, scales in float16 (Q4_0)" in told
    assert "(Q4_0), along columns" in told and "none" in told
    assert "2 of 3 matrices lie wholly on a grid" in told and 'grid="found"' in told


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_file(as_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, kind in {"blk.0.ffn_up.weight": "Q4_1", "blk.0.ffn_down.weight": "Q8_0"}.items():
        own = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(torch.randn(16, 64).numpy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert cli.main(["inspect", str(tmp_path if as_folder else path)]) == 0
    told = capsys.readouterr().out
    assert "(Q4_1)" in told and "(Q8_0)" in told
    assert 'grid: "found" does not take blk.0.ffn_up.weight' in told


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (None, "holds no weights"),
        ({}, "holds no weights"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "was written for MLX"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized, and moq_state.json"),
    ],
)
def test_other_folders_are_refused_with_what_is_read(
    config: dict[str, Any] | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if config:
        save_file({"layer.scales": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert fault in told and "moq-hf inspect reads packed checkpoints of moq_hf" in told and told.count("\n") == 1


def test_what_holds_no_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"bias": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "bad.gguf").write_bytes(b"no")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert cli.main(["inspect", str(tmp_path / "bad.gguf")]) == 2
    told = capsys.readouterr().err
    assert "holds no matrix of floats" in told and "cannot be read as a GGUF file" in told
