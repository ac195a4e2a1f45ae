"""An MLX folder holds the checkpoint's integers: q * s + b is each weight, where scales are those of a half dtype."""

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from experts import mixture
from packed_bert import TOKENIZER
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from moq_hf import MoQError, cli, dequantize_model, quantize_model, save_quantized, verify_quantized
from moq_hf.export import mlx as mlx_module
from moq_hf.export.mlx import affine_of, export_mlx
from moq_hf.model.convert import quant_layers
from moq_hf.packed.reading import read_parts, stored_weights
from moq_hf.quantizer import Quantized, dequantize

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXACT = {"serve": ["mlx"]}
# What mlx.core.quantize 0.32.4 packs for the codes 7 i + 3 below 2^bits, with the least
# and the largest in front.
PACKED = {
    2: [454761244, 454761243],
    3: [1402433656, 1884526448, 2540721047],
    4: [1299153392, 3320252715, 1299153315, 3320252715],
    5: [1308379104, 2015648675, 122904957, 1260874996, 3848040550],
    6: [2673942464, 2428228313, 2992084800, 2401246899, 2628489685, 1901299459],
    8: [403832576, 875374111, 1346978363, 1818582615, 2290186867, 2761791119, 3233395371, 3704999623],
}  # fmt: skip


def llama(**more: Any) -> Any:
    hf.set_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, **more}))


def packed(folder: Path, model: Any, bits: list[int] | None = None, **config: Any) -> Path:
    """A packed checkpoint; `bits` in turn on its layers."""
    quantize_model(model.eval(), {"bits": 8, **config})
    for index, layer in enumerate(quant_layers(model).values()):
        if bits is not None:
            layer.set_bits(bits[index % len(bits)])
    return save_quantized(model, folder, processing_class=AutoTokenizer.from_pretrained(TOKENIZER))


def computed(folder: Path, name: str) -> torch.Tensor:
    """A weight as MLX computes it, decoded bit by bit from the files alone."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization"]
    scheme = config.get(name, config)
    size, bits = scheme["group_size"], scheme["bits"]
    words = tensors[f"{name}.weight"]
    assert words.dtype == torch.uint32
    scales, biases = (tensors[f"{name}.{part}"].float() for part in ("scales", "biases"))
    rows = []
    for row in words.flatten(0, -2):
        stream = int.from_bytes(row.numpy().tobytes(), "little")
        count = 32 * len(row) // bits
        rows.append([stream >> bits * place & (1 << bits) - 1 for place in range(count)])
    groups = torch.tensor(rows).view(*scales.shape, size)
    return (groups * scales[..., None] + biases[..., None]).flatten(-2)


@pytest.mark.parametrize("bits", PACKED)
def test_words_are_those_of_mlx(bits: int) -> None:
    codes = (7 * torch.arange(32) + 3) % 2**bits
    codes[:2] = torch.tensor([0, 2**bits - 1])
    stored = Quantized((codes - 2 ** (bits - 1))[None].int(), torch.tensor([[1.0]]), None)
    made = affine_of(stored, bits)
    assert made.weight.tolist() == [PACKED[bits]]
    assert (made.scales.item(), made.biases.item()) == (1.0, -(2.0 ** (bits - 1)))
    assert torch.equal(made.values(), dequantize(*stored))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx") / "packed"
    return packed(folder, llama(), [4, 8, 3, 2, 1, 5, 6, 7], group_size=32, embeddings=8, heads=True, **EXACT)


def test_every_weight_is_that_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    made = export_mlx(checkpoint, tmp_path / "out")
    weights = stored_weights(checkpoint)
    assert len(weights) == 16 and weights.keys() == made.layers.keys()
    for name, stored in weights.items():
        assert torch.equal(computed(made.path, name), dequantize(*stored)), name
    # 1 bit is in 2, and 7 are in 8.
    assert {scheme["bits"] for scheme in made.layers.values()} == {2, 3, 4, 5, 6, 8}
    assert (made.different, made.weight_error, made.floats) == (0, 0, ())
    assert "every weight is that of the checkpoint, bit for bit" in made.table()


def test_what_lies_beside_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    made = export_mlx(checkpoint, tmp_path / "out")
    config = json.loads((made.path / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"]["mode"] == "affine" and config["model_type"] == "llama"
    assert AutoTokenizer.from_pretrained(made.path).get_vocab()
    names = {path.name for path in made.path.iterdir()}
    assert "generation_config.json" in names and not names & {"moq_state.json", "README.md"}
    floats = {part.name: part.tensor for part in read_parts(checkpoint) if part.layer is None}
    tensors = load_file(made.path / "model.safetensors")
    for name, tensor in floats.items():
        assert torch.equal(tensors[name], tensor), name
    assert len(tensors) == len(floats) + 3 * len(made.layers)
    with pytest.raises(MoQError, match=r"out was written for MLX, .* give that one"):
        verify_quantized(made.path)


@pytest.mark.parametrize(
    ("grid", "size"),
    [
        ({"group_size": 64}, 64),
        ({}, 64),
        ({"groups": 4}, 64),
        ({"group_size": 32, "q_type": "asymmetric"}, 32),
        ({"q_type": "asymmetric"}, 64),
        ({"scale_dtype": "bfloat16"}, 64),
        ({"range": "full", "group_size": 32}, 32),
    ],
)
def test_grids(grid: dict[str, Any], size: int, tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", llama(num_hidden_layers=1), [4, 8], **{**EXACT, **grid})
    made = export_mlx(source, tmp_path / "out")
    for name, stored in stored_weights(source).items():
        assert torch.equal(computed(made.path, name), dequantize(*stored)), name
    assert made.different == 0
    # A row of 128 columns may have larger groups than one of 64.
    assert min(scheme["group_size"] for scheme in made.layers.values()) == size


def test_scales_in_float32_cost_a_rounding_of_many_weights(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", llama(), [4], group_size=32)
    made = export_mlx(source, tmp_path / "out")
    assert 0.2 < made.different < 0.6 and 0 < made.weight_error < 1e-5
    assert '"serve": ["mlx"] trains scales that are exact' in made.table()
    # Scales that were asked for, or found, would stay.
    other = packed(tmp_path / "other", llama(num_hidden_layers=1), [4], group_size=32, scale_dtype="float32")
    text = export_mlx(other, tmp_path / "others").table()
    assert "steps: scales are float32\n" in text + "\n" and '"serve"' not in text
    found, expected = [], []
    for name, stored in stored_weights(source).items():
        found.append(computed(made.path, name).flatten())
        expected.append(dequantize(*stored).flatten())
    off = torch.cat(found) != torch.cat(expected)
    assert math.isclose(float(off.float().mean()), made.different, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = packed(tmp_path / "packed", llama().to(getattr(torch, dtype)), [4], group_size=32)
    whole = export_mlx(source, tmp_path / "whole")
    half = "bfloat16" if dtype == "bfloat16" else "float16"
    assert cli.main(["export", str(source), "--to", "mlx", "--half"]) == 0
    text = capsys.readouterr().out
    assert "steps: --half rounds scales and biases" in text
    assert f"scales are {half}: MLX computes in it if a table has codes" in text
    tensors = load_file(tmp_path / "packed-mlx" / "model.safetensors")
    names = [name for name in tensors if name.endswith((".scales", ".biases"))]
    assert {tensors[name].dtype for name in names} == {getattr(torch, half)}
    weights = sum(math.prod(part.tensor.shape) for part in read_parts(source) if part.layer is not None)
    smaller = whole.bytes - (tmp_path / "packed-mlx" / "model.safetensors").stat().st_size
    # A bit less for each weight: 32 share a scale and a bias.
    assert abs(8 * smaller / weights - 1) < 0.05


def test_half_is_exact_where_scales_were_trained_so(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", llama(), [4], group_size=32, **EXACT)
    made = export_mlx(source, tmp_path / "out", half=True)
    assert (made.different, made.scale_dtype) == (0, torch.float16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once_as_the_table(tied: bool, tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", llama(tie_word_embeddings=tied), [4], group_size=32, embeddings=8, **EXACT)
    made = export_mlx(source, tmp_path / "out")
    names = load_file(made.path / "model.safetensors").keys()
    assert json.loads((made.path / "config.json").read_text())["tie_word_embeddings"] is tied
    assert "model.embed_tokens.scales" in names and ("lm_head.weight" in names) is not tied


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Mixtral", {}),
        ("Qwen3-MoE", {}),
        ("Mixtral", {"modules_to_not_convert": ["lm_head", "*.experts*"]}),
        # All experts are one tensor of floats in the checkpoint.
        ("Mixtral", {"q_type": "asymmetric"}),
    ],
)
def test_experts_are_stacked(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", mixture(family), [4], group_size=32, **more, **EXACT)
    made = export_mlx(source, tmp_path / "out")
    experts = dequantize_model(hf.AutoModelForCausalLM.from_pretrained(source)).model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, 1)
    tensors = load_file(made.path / "model.safetensors")
    # The names of mlx-lm.
    block = f"model.layers.1.{'block_sparse_moe' if family == 'Mixtral' else 'mlp'}."
    for name, expected in {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj}.items():
        place = f"{block}switch_mlp.{name}"
        is_float = "modules_to_not_convert" in more
        found = tensors[f"{place}.weight"] if is_float else computed(made.path, place)
        assert torch.equal(found, expected), name
    assert not any(".experts." in name for name in tensors)


def test_names_that_mlx_lm_reads_in_the_config(tmp_path: Path) -> None:
    config = hf.Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, head_dim=16)
    config.rope_parameters["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    config.rope_parameters["sliding_attention"]["rope_theta"] = 50.0
    hf.set_seed(0)
    source = packed(tmp_path / "packed", hf.Gemma3ForCausalLM(config), [4], embeddings=8, **EXACT)
    made = export_mlx(source, tmp_path / "out")
    found = json.loads((made.path / "config.json").read_text())
    assert (found["rope_theta"], found["rope_local_base_freq"], found["sliding_window_pattern"]) == (500.0, 50.0, 6)
    assert found["rope_scaling"]["factor"] == 8.0 and found["tie_word_embeddings"] is True
    # A buffer of the table, which loading makes.
    assert "model.embed_tokens.embed_scale" in load_file(source / "model.safetensors")
    assert "model.embed_tokens.embed_scale" not in load_file(made.path / "model.safetensors")

    made = export_mlx(packed(tmp_path / "experts", mixture("Qwen3-MoE"), [4], **EXACT), tmp_path / "other")
    found = json.loads((made.path / "config.json").read_text())
    assert (found["num_experts"], found["rope_scaling"]) == (4, None)
    # What only transformers reads of the folder's files.
    assert not {"configuration_files", "transformers_weights"} & found.keys()


def test_scales_of_inputs_are_left_out(tmp_path: Path) -> None:
    model = llama()
    quantize_model(model.eval(), {"bits": 8, "activations": {"enabled": True, "scale": "static"}, **EXACT})
    model.train()
    model(torch.arange(8)[None])
    source = save_quantized(model.eval(), tmp_path / "packed")
    assert any("input_scale" in name for name in load_file(source / "model.safetensors"))
    made = export_mlx(source, tmp_path / "out")
    assert not any("input_scale" in name for name in load_file(made.path / "model.safetensors"))


def test_layers_that_are_not_quantized_yet_are_floats(tmp_path: Path) -> None:
    model = llama()
    quantize_model(model.eval(), {"bits": 8, **EXACT})
    first, *_ = quant_layers(model)
    quant_layers(model)[first].set_bits(32)
    made = export_mlx(save_quantized(model, tmp_path / "packed"), tmp_path / "out")
    assert made.floats == (first,) and f"floats, as in the checkpoint: {first}" in made.table()
    found = load_file(made.path / "model.safetensors")[f"{first}.weight"]
    assert torch.equal(found, quant_layers(model)[first].float_weight)


def test_shards(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_mlx(checkpoint, tmp_path / "whole")
    save = mlx_module.save_torch_state_dict
    monkeypatch.setattr(mlx_module, "save_torch_state_dict", functools.partial(save, max_shard_size=50_000))
    made = export_mlx(checkpoint, tmp_path / "shards")
    files = sorted(made.path.glob("model*.safetensors"))
    assert len(files) > 1 and (made.path / "model.safetensors.index.json").is_file()
    assert {name for path in files for name in load_file(path)} == load_file(whole.path / "model.safetensors").keys()


def test_files_that_are_not_read_back_as_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(tensors: dict[str, torch.Tensor], folder: Path, **more: Any) -> None:
        save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "model.safetensors")

    monkeypatch.setattr(mlx_module, "save_torch_state_dict", write)
    with pytest.raises(MoQError, match=r"model\.norm\.weight was not read back as it was written"):
        export_mlx(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(source: Path, *options: str) -> str:
        assert cli.main(["export", str(source), "--to", "mlx", str(tmp_path / "out"), *options]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    model = hf.BertForSequenceClassification(hf.BertConfig(**SHAPE))
    text = error(packed(tmp_path / "bert", model, [4]))
    assert "BertForSequenceClassification is not exported; decoders that mlx-lm has, such as Llama" in text
    text = error(packed(tmp_path / "groups", llama(), [4], group_size=16))
    assert "its groups are a multiple of 32, not 16 (model.layers.*.self_attn.q_proj (2)" in text
    text = error(packed(tmp_path / "wide", llama(), [12]))
    assert "its kernels take 1, 2, 3, 4, 5, 6, 7 or 8 bits, not 12" in text
    large = llama()
    large.model.layers[0].mlp.up_proj.weight.data *= 1e6
    text = error(packed(tmp_path / "large", large, [8]), "--half")
    assert "model.layers.0.mlp.up_proj: a scale is too large for float16; leave out --half" in text
    assert "--to mlx takes no --base" in error(checkpoint, "--base", "base.gguf")
    shutil.copytree(checkpoint, tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter").mkdir()
    assert "it takes one model, without adapters beside it" in error(tmp_path / "adapted")
    assert cli.main(["export", str(checkpoint), "--to", "float", str(tmp_path / "out"), "--half"]) == 2
    assert "--to float takes no --half" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(MoQError, match="is not empty"):
        export_mlx(checkpoint, tmp_path / "full")
