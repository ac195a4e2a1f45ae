"""The size of a delivered file, known ahead of time, compared with the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ViTConfig,
    ViTForImageClassification,
)
from transformers import LlamaForCausalLM as Llama

from moq_hf import MoQConfig, quantize_model, save_quantized
from moq_hf.model.convert import prepare_model
from moq_hf.model.selection import take_inventory
from moq_hf.model.sizes import FileSize


def bert() -> BertForSequenceClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=16, **sizes))


def vit() -> ViTForImageClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))


def llama(tied: bool) -> Llama:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Llama(LlamaConfig(vocab_size=64, intermediate_size=64, tie_word_embeddings=tied, **sizes))


def prepared(model: Any, **more: Any) -> tuple[MoQConfig, Any, Any, Any]:
    config = MoQConfig.from_dict({"quantize_bits": {"start_bits": 8, "target_bits": 4}, **more})
    inventory = take_inventory(model, config)
    return config, inventory, *prepare_model(inventory, config)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bert", {}),
        ("bert", {"quantize_groups": "per_channel", "quantize_embeddings": 8}),
        ("bert", {"quantize_groups": 4}),
        ("bert", {"quantize_group_size": 16, "quantize_algo": {"range": "full", "scale_dtype": "bfloat16"}}),
        ("half", {"quantize_groups": "per_channel"}),
        ("llama", {}),
        ("tied", {"quantize_embeddings": 8}),
        # Its files have other names than its modules.
        ("vit", {"quantize_groups": "per_channel"}),
        ("asymmetric", {"quantize_groups": 4, "quantize_type": "asymmetric", "quantize_embeddings": 8}),
    ],
)
def test_it_is_the_size_of_the_file(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    choices = (2, 3, 8) if kind == "asymmetric" else (1, 2, 3, 8, 4, 7)
    model = vit() if kind == "vit" else llama(kind == "tied") if kind in ("llama", "tied") else bert()
    if kind == "half":
        model = model.to(torch.bfloat16)
    config, inventory, layers, tables = prepared(model, **more)
    bits = {name: choices[k % len(choices)] for k, name in enumerate(layers)}
    for name, width in bits.items():
        layers[name].set_bits(width)
    for table in tables.values():
        table.moq.bits = config.embeddings
    file = FileSize(inventory, layers, tables)
    assert file.why_alike() is None
    found = file.of_rest() + sum(file.of_layer(name, width) for name, width in bits.items())
    save_quantized(model, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    # Counted are offsets of the most digits: a file is within its budget.
    assert 0 <= found - size <= 250
    assert found - size < 0.015 * size


def test_files_whose_codes_are_alike_are_named() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    for model, more, words in (
        (gpt2, {}, "Conv1D layers are saved as rounded floats"),
        (bert(), {"quantize_type": "asymmetric"}, "asymmetric weights are unpacked while loading"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), {}, "only models of transformers"),
    ):
        _, inventory, layers, tables = prepared(model, **more)
        why = FileSize(inventory, layers, tables).why_alike()
        assert why is not None and words in why


def test_what_the_pages_say_of_sizes(tmp_path: Path) -> None:
    """3 bits in groups of 32 take as much space as 4 bits per channel; in memory, once it has run, as much as float."""
    # The scales of channels are 32 bits for 768 weights and more.
    sizes = {"hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 3072}
    files, held = [], []
    for name, more in (("w4", {}), ("w3", {"group_size": 32})):
        model = BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=16, **sizes))
        plain = sum(value.nbytes for value in model.state_dict().values())
        folder = save_quantized(quantize_model(model, MoQConfig.load(name, **more)), tmp_path / name)
        files.append((folder / "model.safetensors").stat().st_size)
        loaded = BertForSequenceClassification.from_pretrained(folder).eval()
        loaded(torch.ones(1, 8, dtype=torch.long))
        held.append(sum(value.nbytes for value in loaded.state_dict().values()) / plain)
    # The scales stay beside the floats.
    assert files[1] == pytest.approx(files[0], rel=0.02) and held == pytest.approx([1.0, 1 + 1 / 32], rel=0.01)
