"""A GGUF file holds the checkpoint's integers, takes the rest from its base, and refuses a base of another model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from moq_hf import MoQError, cli, quantize_model, quantizer, save_quantized
from moq_hf.export import gguf as gguf_module
from moq_hf.export.floats import export_floats
from moq_hf.export.gguf import GgufExport, export_gguf
from moq_hf.grid import Grid, PerGroup
from moq_hf.model.convert import quant_layers
from moq_hf.packed import reading
from moq_hf.packed.reading import Part, stored_weights
from moq_hf.weight_spec import WeightSpec

gguf = pytest.importorskip("gguf")

from gguf_base import permuted, write_base  # noqa: E402

Kind = gguf.GGMLQuantizationType
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def packed(folder: Path, model: Any, bits: list[int], **config: Any) -> Path:
    """A packed checkpoint; `bits` in turn on its layers."""
    quantize_model(model.eval(), {"quantize_bits": {"start_bits": 8, "target_bits": 8}, **config})
    for index, layer in enumerate(quant_layers(model).values()):
        layer.set_bits(bits[index % len(bits)])
    return save_quantized(model, folder)


def base_of(folder: Path, path: Path, kind: Any = Kind.F16, **more: Any) -> Path:
    """What the converter would make of the folder `export_floats` writes."""
    export_floats(folder, path.with_suffix(".floats"))
    return write_base(hf.AutoModelForCausalLM.from_pretrained(path.with_suffix(".floats")), path, kind, **more)


def llama(seed: int = 0) -> Any:
    hf.set_seed(seed)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "packed"
    bits = [4, 8, 3, 2, 1, 5, 6, 7]
    return packed(folder, llama(), bits, quantize_group_size=32, quantize_embeddings=8, quantize_heads=True)


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Path:
    return base_of(checkpoint, checkpoint.parent / "base.gguf")


@pytest.fixture(scope="module")
def exported(checkpoint: Path, base: Path) -> GgufExport:
    return export_gguf(checkpoint, checkpoint.parent / "made" / "out.gguf", base)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    return {t.name: t for t in reader.tensors}, {k: f.contents() for k, f in reader.fields.items() if "GGUF." not in k}


def floats_in(tensor: Any) -> Any:
    """What llama.cpp computes with."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def in_halves(weight: quantizer.Quantized) -> Any:
    """A symmetric weight of the checkpoint, with scales as GGUF has them."""
    return quantizer.dequantize(weight.codes, weight.scale.half().float()).numpy()


def assert_exact(found: GgufExport, place: str, weight: quantizer.Quantized) -> None:
    assert np.array_equal(floats_in(read(found.path)[0][place]), in_halves(weight))


def test_the_integers_are_those_of_the_checkpoint(checkpoint: Path, exported: GgufExport) -> None:
    tensors, _ = read(exported.path)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    places = {f"model.layers.{i}.{k}": f"blk.{i}.{v}" for i in (0, 1) for k, v in names.items()}
    places |= {f"model.layers.{i}.mlp.down_proj": f"blk.{i}.ffn_down" for i in (0, 1)}
    places |= {"lm_head": "output", "model.embed_tokens": "token_embd"}
    weights = stored_weights(checkpoint)
    assert weights.keys() == places.keys() == exported.layers.keys()
    for name, weight in weights.items():
        expected = in_halves(weight)
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            expected = permuted(expected, heads) if name.endswith(part) else expected
        tensor = tensors[f"{places[name]}.weight"]
        assert np.array_equal(floats_in(tensor), expected), name
        assert tensor.tensor_type.name == exported.layers[name]
    assert exported.layers["model.embed_tokens"] == "Q8_0"
    assert exported.types == {"Q4_0": 8, "Q8_0": 8, "F32": 5}


def test_everything_else_is_the_bases(base: Path, exported: GgufExport) -> None:
    before, said = read(base)
    after, says = read(exported.path)
    assert before.keys() == after.keys()
    norms = [name for name in before if "norm" in name]
    assert len(norms) == 5 and all(np.array_equal(before[name].data, after[name].data) for name in norms)
    assert says == {**said, "general.file_type": 7, "general.quantization_version": 2}


def test_the_report(base: Path, exported: GgufExport) -> None:
    assert exported.bytes == exported.path.stat().st_size < exported.base_bytes == base.stat().st_size
    assert 0 < exported.weight_error < 0.1
    assert "tensors: 5 F32, 8 Q4_0, 8 Q8_0\n" in exported.table() and "floats" not in exported.table()
    assert [path.name for path in exported.path.parent.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16])
def test_bases_of_other_floats_and_asymmetric_rows(tmp_path: Path, kind: Any) -> None:
    folder = packed(tmp_path / "packed", llama(), [4, 3], quantize_groups="per_channel", quantize_type="asymmetric")
    found = export_gguf(folder, tmp_path / "out.gguf", base_of(folder, tmp_path / "base.gguf", kind))
    assert found.types == {"Q4_1": 14, kind.name: 2, "F32": 5} if kind is Kind.BF16 else {"Q4_1": 14, "F32": 7}
    tensors, says = read(found.path)
    assert says["general.file_type"] == 3
    (codes, scale, zero) = stored_weights(folder)["model.layers.1.self_attn.k_proj"]
    exact = permuted(quantizer.dequantize(codes, scale, zero).numpy(), 2)
    error = np.abs(floats_in(tensors["blk.1.attn_k.weight"]) - exact)
    assert 0 < error.max() <= found.weight_error * float(scale.max())


def test_full_ranges_with_scales_that_float16_holds_are_exact(tmp_path: Path) -> None:
    algo = {"range": "full", "scale_dtype": "float16"}
    folder = packed(tmp_path / "packed", llama(), [4, 8, 2, 3], quantize_group_size=32, quantize_algo=algo)
    found = export_gguf(folder, tmp_path / "out.gguf", base_of(folder, tmp_path / "base.gguf"))
    assert found.weight_error == 0
    weights = stored_weights(folder)
    assert min(float(weight.scale.min()) for weight in weights.values()) < 0
    # The extra code is there.
    places = {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
    for (name, place), bits in zip(places.items(), (2, 3, 8), strict=True):
        weight = weights[f"model.layers.1.{name}"]
        assert int(weight.codes.min()) == -(2 ** (bits - 1))
        assert_exact(found, f"blk.1.{place}.weight", weight)


def test_conv1d_a_tied_head_and_tables_that_stay_floats(tmp_path: Path) -> None:
    hf.set_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=32))
    folder = packed(tmp_path / "packed", model, [4], quantize_groups="per_channel")
    found = export_gguf(folder, tmp_path / "out.gguf", base_of(folder, tmp_path / "base.gguf"))
    tensors, _ = read(found.path)
    assert list(tensors["blk.0.attn_qkv.weight"].shape) == [64, 192]
    assert_exact(found, "blk.0.attn_qkv.weight", stored_weights(folder)["transformer.h.0.attn.c_attn"])
    assert "output.weight" not in tensors and tensors["token_embd.weight"].tensor_type is Kind.F16


def test_position_tables_keep_the_bases_floats(tmp_path: Path) -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=32))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    folder = packed(tmp_path / "packed", model, [4], quantize_groups="per_channel", quantize_embeddings=8)
    found = export_gguf(folder, tmp_path / "out.gguf", base_of(folder, tmp_path / "base.gguf"))
    assert found.layers["transformer.wte"] == "Q8_0" and found.layers["transformer.wpe"] == "F16"
    assert "left as floats, as llama.cpp needs them: transformer.wpe" in found.table()
    model = hf.GPT2LMHeadModel(model.config)
    alone = packed(tmp_path / "alone", model, [32], quantize_embeddings=8, modules_to_not_convert=["wte"])
    with pytest.raises(MoQError, match=r"keeps transformer.wpe in float, and no other layer is quantized"):
        export_gguf(alone, tmp_path / "alone.gguf", base_of(alone, tmp_path / "alone.base"))


def test_grids_that_do_not_fit_are_one_error_before_anything_is_written(tmp_path: Path, base: Path) -> None:
    folder = packed(tmp_path / "packed", llama(), [4, 9], quantize_group_size=16)
    with pytest.raises(MoQError, match=r"its groups are a multiple of 32, not 16 \(model.layers") as raised:
        export_gguf(folder, tmp_path / "out.gguf", base)
    assert "its kernels take 1, 2, 3, 4, 5, 6, 7 or 8 bits, not 9 (model.layers" in str(raised.value)
    assert not (tmp_path / "out.gguf").exists()


def test_a_base_of_another_model_is_refused(tmp_path: Path, checkpoint: Path, base: Path) -> None:
    out = tmp_path / "out.gguf"

    def refused(wrong: Path, what: str) -> None:
        with pytest.raises(MoQError, match=what):
            export_gguf(checkpoint, out, wrong)
        assert list(tmp_path.glob("*out*")) == []

    model = hf.AutoModelForCausalLM.from_pretrained(base.with_suffix(".floats"))
    refused(write_base(llama(1), tmp_path / "seed.gguf"), "or has other weights: blk.0.attn_q.weight is not model.l")
    larger = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "intermediate_size": 160}))
    for name, tensor in model.state_dict().items():
        if "mlp" not in name:
            larger.get_parameter(name).data.copy_(tensor)
    refused(write_base(larger, tmp_path / "larger.gguf"), "is another model's, .* blk.0.ffn_gate.weight is not mo")
    lacking = write_base(model, tmp_path / "lacking.gguf", without=("blk.1.ffn_up.weight",))
    refused(lacking, "has no tensor for model.layers.1.mlp.up_proj:")
    refused(write_base(model, tmp_path / "q8.gguf", Kind.Q8_0), "holds Q8_0: it must be in floats")
    refused(write_base(model, tmp_path / "part.gguf", split__count=2), "is a part of a file")
    refused(tmp_path / "none.gguf", "none.gguf cannot be read as a GGUF file")
    (tmp_path / "text.gguf").write_text("text" * 100)
    refused(tmp_path / "text.gguf", "text.gguf cannot be read as a GGUF file")
    # The same weights with one row moved, in float and so that no known order agrees.
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.copy_(model.model.layers[0].self_attn.q_proj.weight.roll(1, 0))
    refused(write_base(model, tmp_path / "rows.gguf"), "in any order of rows that llama.cpp knows")


def test_a_tied_head_with_other_codes_than_its_table(tmp_path: Path, checkpoint: Path, base: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(base.with_suffix(".floats"))
    without_head = write_base(model, tmp_path / "base.gguf", without=("output.weight",))
    with pytest.raises(MoQError, match=r"token_embd\.weight"):
        export_gguf(checkpoint, tmp_path / "out.gguf", without_head)


def test_experts_share_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.w1" for i in range(3)]
    weights = {name: quantizer.quantize(torch.randn(8, 64), 4, Grid(PerGroup(32))) for name in names}
    layer = WeightSpec("linear", (8, 64), 4, Grid(PerGroup(32)), "packed")
    layers = dict.fromkeys(names, layer)

    def parts(folder: Path) -> Iterator[Part]:
        for name in names:
            yield Part(name, torch.empty(0), layers[name], weights[name])

    monkeypatch.setattr(gguf_module, "recorded", lambda folder: SimpleNamespace(state={"names": None}))
    monkeypatch.setattr(gguf_module, "read_parts", parts)
    monkeypatch.setattr(gguf_module, "check_taken", lambda folder, server: None)
    writer = gguf.GGUFWriter(tmp_path / "base.gguf", "llama")
    writer.add_block_count(1)
    floats = np.stack([quantizer.dequantize(*weights[name]).numpy() for name in names])
    writer.add_tensor("blk.0.ffn_gate_exps.weight", floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = export_gguf(tmp_path, tmp_path / "out.gguf", tmp_path / "base.gguf")
    tensor = read(found.path)[0]["blk.0.ffn_gate_exps.weight"]
    assert list(tensor.shape) == [64, 8, 3]
    assert np.array_equal(floats_in(tensor), np.stack(list(map(in_halves, weights.values()))))
    layers[names[1]] = replace(layer, bits=8)
    with pytest.raises(MoQError, match="one type for 3 experts, of which 3 are quantized, as Q4_0, Q8_0"):
        export_gguf(tmp_path, tmp_path / "other.gguf", tmp_path / "base.gguf")
    layers[names[1]] = replace(layer, stored="float")
    with pytest.raises(MoQError, match="one type for 3 experts, of which 2 are quantized, as Q4_0"):
        export_gguf(tmp_path, tmp_path / "other.gguf", tmp_path / "base.gguf")


def test_rows_that_no_word_has_are_cut_off_as_in_the_base(tmp_path: Path) -> None:
    folder = packed(tmp_path / "packed", llama(), [4], quantize_group_size=32, quantize_embeddings=8)
    export_floats(folder, tmp_path / "floats")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight[:90].detach())
    found = export_gguf(folder, tmp_path / "out.gguf", write_base(model, tmp_path / "base.gguf"))
    assert list(read(found.path)[0]["token_embd.weight"].shape) == [64, 90]
    assert found.layers["model.embed_tokens"] == "Q8_0"


def test_what_was_written_is_read_back(
    tmp_path: Path, checkpoint: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = gguf_module._Base.write

    def damaged(self: Any, path: Path) -> None:
        write(self, path)
        tensor = gguf.GGUFReader(path, "r+").tensors[3]
        tensor.data[0, 5] ^= 1

    monkeypatch.setattr(gguf_module._Base, "write", damaged)
    with pytest.raises(MoQError, match="was not read back as it was written"):
        export_gguf(checkpoint, tmp_path / "out.gguf", base)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_read_once(
    tmp_path: Path, checkpoint: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where llama.cpp's converter makes the base, transformers loads the checkpoint beside that."""
    read_tensor, reads = reading.read_tensor, Counter[str]()

    def counted(path: Path, name: str) -> torch.Tensor:
        reads[name] += 1
        return read_tensor(path, name)

    monkeypatch.setattr(reading, "read_tensor", counted)
    monkeypatch.setattr(gguf_module, "require", lambda *names: None)
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(f"import shutil, sys; shutil.copy({str(base)!r}, sys.argv[-1])")
    export_gguf(checkpoint, tmp_path / "out.gguf", converter=script)
    assert reads == Counter(load_file(checkpoint / "model.safetensors").keys())


def test_nothing_is_replaced(tmp_path: Path, checkpoint: Path, base: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for out in (base, tmp_path / "letter.txt"):
        with pytest.raises(MoQError, match="exists already: give a new name"):
            export_gguf(checkpoint, out, base)
    with pytest.raises(MoQError, match="is not empty: give a new folder"):
        export_gguf(checkpoint, tmp_path, base)


CONVERTER = """
import shutil, sys
from pathlib import Path

folder, *options, out = sys.argv[1:]
given, wanted = (Path(each, "model.safetensors").read_bytes() for each in (folder, {floats!r}))
assert given == wanted and options == ["--outtype", "f16", "--outfile"]
shutil.copy({base!r}, out)
"""


def test_one_command_runs_the_converter(
    tmp_path: Path,
    checkpoint: Path,
    base: Path,
    exported: GgufExport,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command is that of the docs; the converter may be given as its folder too."""
    monkeypatch.setattr(gguf_module, "require", lambda *names: None)
    monkeypatch.chdir(tmp_path)
    Path("runs/chat").mkdir(parents=True)
    Path("runs/chat/quantized").symlink_to(checkpoint)
    command = ["export", "runs/chat/quantized", "--to", "gguf", "runs/chat.gguf", "--converter"]
    script = Path("convert_hf_to_gguf.py")
    assert cli.main([*command, str(script)]) == 2
    assert "convert_hf_to_gguf.py is not there" in capsys.readouterr().err
    script.write_text("raise SystemExit('Model LlamaForCausalLM is not supported')")
    assert cli.main([*command, "."]) == 2
    assert "Model LlamaForCausalLM is not supported" in capsys.readouterr().err
    script.write_text(CONVERTER.format(floats=str(base.with_suffix(".floats")), base=str(base)))
    assert cli.main([*command, str(script)]) == 0
    assert Path("runs/chat.gguf").read_bytes() == exported.path.read_bytes()


def test_the_command(
    tmp_path: Path, checkpoint: Path, base: Path, exported: GgufExport, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    assert cli.main(["export", str(checkpoint), "--to", "gguf", str(out), "--base", str(base)]) == 0
    assert out.read_bytes() == exported.path.read_bytes()
    assert "read back: every code is that of the checkpoint" in capsys.readouterr().out
    for words, what in (
        (
            ["--to", "gguf", str(tmp_path / "new.gguf")],
            "GGUF needs one of --converter and --base: the path of llama.cpp's",
        ),
        (
            ["--to", "gguf", str(tmp_path / "new.gguf"), "--base", "a", "--converter", "b"],
            "convert_hf_to_gguf.py, which is in a clone of https://github.com/ggml-org/llama.cpp, or the file",
        ),
        (["--to", "gguf", str(out), "--base", str(base), "--flavors", "int8"], "--to gguf takes no --flavors"),
        (["--to", "onnx", str(out), "--base", str(base)], "--to onnx takes no --base"),
        (["--to", "onnx", str(out), "--converter", "c.py"], "--to onnx takes no --converter"),
        (["--to", "float", str(out), "--tolerance", "1"], "--to float takes no --tolerance"),
    ):
        assert cli.main(["export", str(checkpoint), *words]) == 2
        assert what in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), "--to", "gguf", str(out), "--base", str(base)]) == 2


def test_gguf_is_not_installed(checkpoint: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MoQError, match="gguf is not installed: pip install"):
        export_gguf(checkpoint, tmp_path / "out.gguf", base)


def test_a_format_is_refused_before_anything_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_quantized(quantize_model(llama().eval(), "fp8", prove=False), tmp_path / "fp8")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MoQError, match="it does not take fp8"):
        export_gguf(folder, tmp_path / "out.gguf")


def test_the_base_that_is_missing_is_named_as_arguments_are_in_python(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match="GGUF needs one of converter and base: the path"):
        export_gguf(checkpoint, tmp_path / "out.gguf")
    with pytest.raises(MoQError, match=r"is not there: convert_hf_to_gguf\.py is in a clone of https://github"):
        export_gguf(checkpoint, tmp_path / "out.gguf", converter=tmp_path)


def test_names_of_models_with_parts_and_without_heads(base: Path) -> None:
    found = gguf_module._Base(base)
    for name in (
        "model.layers.1.self_attn.q_proj",
        "layers.1.self_attn.q_proj",
        "language_model.model.layers.1.self_attn.q_proj",
        "model.language_model.layers.1.self_attn.q_proj",
    ):
        assert found.place_of(name) == "blk.1.attn_q.weight", name
    assert found.place_of("vision_tower.encoder.layers.1.self_attn.q_proj") == ""
    assert found.place_of("model.layers.1.mlp.experts.7.up_proj") == "blk.1.ffn_up_exps.weight"
