"""A folder of floats holds the weights that the packed checkpoint computes with, and what else lay beside them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from packed_bert import SHAPE, checkpoint, config_of
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from moq_hf import MoQError, cli, dequantize_model, quantize_model, save_quantized
from moq_hf.export.floats import export_floats
from moq_hf.packed.files import size_of


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    folder = tmp_path_factory.mktemp("floats") / "packed"
    return checkpoint(folder, model, config_of(quantize_embeddings=8), [4, 9])


def test_the_weights_are_those_that_are_computed_with(packed: Path, tmp_path: Path) -> None:
    made = export_floats(packed, tmp_path / "out")
    one = BertForSequenceClassification.from_pretrained(packed).eval()
    other = BertForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)
    assert all(type(module) is torch.nn.Linear for module in other.modules() if isinstance(module, torch.nn.Linear))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names and not names & {"moq_state.json", "README.md"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert made == tmp_path / "out" and size_of(made) > size_of(packed)


def test_conv1d_unpacked_while_loading(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)).eval()
    quantize_model(model, config_of())
    save_quantized(model, tmp_path / "packed")
    export_floats(tmp_path / "packed", tmp_path / "out")
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        found = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()(ids).logits
        assert torch.equal(found, model(ids).logits)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_all_files_of_a_tokenizer_and_of_pooling_go_with_the_weights(packed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(packed, tmp_path / "packed")
    beside = {"bpe.codes", "source.spm", "prophetnet.tokenizer", "1_Pooling/config.json"}
    (folder / "1_Pooling").mkdir()
    for name in beside:
        (folder / name).write_text("{}")
    made = export_floats(folder, tmp_path / "out")
    assert beside < {path.relative_to(made).as_posix() for path in Path(made).rglob("*")}


def test_a_buffer_of_a_table_is_no_weight(tmp_path: Path) -> None:
    """compressed-tensors makes a parameter of it, which llama.cpp's converter does not know."""
    config = hf.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, head_dim=16,
    )  # fmt: skip
    hf.set_seed(0)
    model = hf.Gemma3ForCausalLM(config).eval()
    names = {name for name in model.state_dict() if name != "lm_head.weight"}
    packed = {"quantize_bits": {"target_bits": 4}, "quantize_group_size": 16, "quantize_embeddings": 8}
    source = save_quantized(quantize_model(model, packed), tmp_path / "packed")
    export_floats(source, tmp_path / "floats")
    assert {*load_file(tmp_path / "floats" / "model.safetensors")} == names
    plain = dequantize_model(hf.Gemma3ForCausalLM.from_pretrained(source))
    assert {name for name, _ in plain.named_parameters()} == names
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(plain.eval()(ids).logits, model(ids).logits)


def test_what_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(MoQError, match="is not empty"):
        export_floats(packed, tmp_path / "full")
    shutil.copytree(packed, tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter").mkdir()
    with pytest.raises(MoQError, match="has adapters"):
        export_floats(tmp_path / "adapted", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert cli.main(["export", str(packed), "--to", "float", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize("given", ["packed", ".", "inner/.."])
def test_a_folder_that_is_not_named_lies_beside_the_checkpoint(
    given: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(packed, tmp_path / "packed")
    (folder / "inner").mkdir()
    monkeypatch.chdir(tmp_path if given == "packed" else folder)
    assert cli.main(["export", given, "--to", "float"]) == 0
    assert "packed-float: plain floats with the quantized values" in capsys.readouterr().out
    assert size_of(tmp_path / "packed-float") > size_of(packed)
    assert cli.main(["export", given, "--to", "float"]) == 2
    assert "packed-float is not empty: give a new folder" in capsys.readouterr().err
    # The other two have names of their own.
    (tmp_path / "packed.gguf").write_text("")
    assert cli.main(["export", given, "--to", "gguf", "--base", "base.gguf"]) == 2
    assert "packed.gguf exists already" in capsys.readouterr().err
    (tmp_path / "packed-onnx").write_text("")
    assert cli.main(["export", given, "--to", "onnx"]) == 2
    assert "packed-onnx exists already" in capsys.readouterr().err
