"""A packed checkpoint is read once, whatever is asked of it, and all of it is checked on the way."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from safetensors.torch import load_file, save_file

from moq_hf import MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.packed import reading
from moq_hf.packed.reading import read_parts, stored_weights

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48}


@pytest.fixture(scope="module")
def model() -> Any:
    """With a table in bytes, to which the head is tied."""
    hf.set_seed(0)
    config = hf.LlamaConfig(**SHAPE, max_position_embeddings=16, tie_word_embeddings=True)
    return quantize_model(hf.LlamaForCausalLM(config).eval(), bits=4, embeddings=8)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor was read and had its digest taken."""
    counted: Counter[str] = Counter()
    read, digest = reading.read_tensor, reading.digest_of

    def counting(path: Path, name: str) -> Any:
        counted[name] += 1
        return read(path, name)

    def digesting(tensor: Any) -> str:
        counted["digests"] += 1
        return digest(tensor)

    monkeypatch.setattr(reading, "read_tensor", counting)
    monkeypatch.setattr(reading, "digest_of", digesting)
    return counted


def test_saving_and_verifying_and_codes_take_one_reading_each(model: Any, tmp_path: Path, reads: Counter[str]) -> None:
    save_quantized(model, tmp_path / "packed")
    names = load_file(tmp_path / "packed" / "model.safetensors").keys()
    once = dict.fromkeys(names, 1) | {"digests": len(names)}
    assert reads == once
    for read in (verify_quantized, lambda folder: verify_quantized(folder, model), stored_weights):
        reads.clear()
        read(tmp_path / "packed")
        assert reads == once


def test_the_parts_of_a_checkpoint(model: Any, tmp_path: Path) -> None:
    parts = {part.parameter: part for part in read_parts(save_quantized(model, tmp_path / "packed"))}
    assert parts.keys() == model.state_dict().keys() - {"lm_head.weight"}
    table = parts["model.embed_tokens.weight"]
    assert table.layer is not None and table.layer.stored == "int8" and table.layer.tied == ("lm_head",)
    norm = parts["model.norm.weight"]
    assert norm.layer is None and norm.codes is None and norm.tensor.equal(model.model.norm.weight)


def test_damage_is_noticed_in_every_tensor(model: Any, tmp_path: Path) -> None:
    """In the scales of a head that is tied to its table too, which nothing else reads."""
    folder = save_quantized(model, tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight_scale" in tensors
    for name, tensor in tensors.items():
        damaged = tensor.clone()
        damaged.view(-1)[-1] += 1
        save_file({**tensors, name: damaged}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(MoQError, match=f"tensor {name} is damaged"):
            verify_quantized(folder)


def test_a_difference_from_the_model_says_how_large_it_is(model: Any, tmp_path: Path) -> None:
    folder = save_quantized(model, tmp_path / "packed")
    model.model.norm.weight.data[3] += 0.25
    with pytest.raises(MoQError, match=r"packed: model\.norm\.weight differs from the model's by up to 0\.25"):
        verify_quantized(folder, model)
    model.model.norm.weight.data[3] -= 0.25
    verify_quantized(folder, model)
