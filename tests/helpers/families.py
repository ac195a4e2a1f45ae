"""More families: sound, pictures, state spaces, experts, encoders with decoders, and a model of PyTorch's own layers.

Each is a class of transformers with a tiny config and a batch with labels. `python tests/helpers/families.py`, at the
root of the repository, trains all of them and renews their table in docs/reference/support.md.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import support
import torch
import transformers as t
from model_zoo import CONFIG, SIZES, Outcome, Stranger, arguments, outcome_of
from transformers import Trainer, set_seed

from moq_hf import MoQCallback
from moq_hf.model.inventory import CONVOLUTIONS, LINEARS

WORDS = 60
TEXT = {**SIZES, "vocab_size": WORDS}
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SOUND = {
    **SIZES, "conv_dim": (16,), "conv_kernel": (10,), "conv_stride": (5,), "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
PICTURE = {**SIZES, "image_size": 16, "patch_size": 8}
# The token that stands for a part of a picture.
IMAGE = 59
SEEING = {
    **TEXT, **ENDS, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": 58, "vision_start_token_id": 57, "vision_end_token_id": 56}
BOTH = {
    **ENDS, "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
}  # fmt: skip


def words() -> dict[str, Any]:
    """Sentences."""
    ids = torch.randint(3, WORDS, (4, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def sentences() -> dict[str, Any]:
    """Sentences to be learned by heart."""
    batch = words()
    return {**batch, "labels": batch["input_ids"].clone()}


def classes(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with two classes."""
    return {**batch, "labels": torch.tensor([0, 1, 0, 1])}


def pictures(side: int = 16) -> dict[str, Any]:
    """Pictures."""
    return {"pixel_values": torch.randn(4, 3, side, side)}


def seen(count: int, **picture: torch.Tensor) -> dict[str, Any]:
    """Sentences in which this many tokens stand for a picture."""
    batch = words()
    batch["input_ids"][batch["input_ids"] == IMAGE] = 3
    batch["input_ids"][:, 1 : 1 + count] = IMAGE
    return {**batch, "labels": batch["input_ids"].clone(), **picture}


def patches() -> dict[str, Any]:
    """Sentences with pictures of four patches, as Qwen's processors cut them."""
    grid = torch.tensor([[1, 2, 2]] * 4)
    batch = seen(1, pixel_values=torch.randn(4, 4, 2 * 3 * 8 * 8), image_grid_thw=grid)
    return {**batch, "mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}


HEAD = ["model", "layers quantized", "share", "left in float", "delivered", *support.COLUMNS]


class Family(NamedTuple):
    """One family: class, config, batch, whether its convolutions are quantized too, and the part left in float."""

    kind: Any
    config: Callable[[], Any]
    batch: Callable[[], dict[str, Any]]
    convolutions: bool = False
    tower: str | None = None


WITH = ", with convolutions"
FAMILIES = {
    "Wav2Vec2": Family(
        t.Wav2Vec2ForSequenceClassification, lambda: t.Wav2Vec2Config(**SOUND),
        lambda: classes({"input_values": torch.randn(4, 800)}),
    ),
    "WavLM": Family(
        t.WavLMForSequenceClassification, lambda: t.WavLMConfig(**SOUND),
        lambda: classes({"input_values": torch.randn(4, 800)}),
    ),
    "Whisper": Family(
        t.WhisperForConditionalGeneration,
        lambda: t.WhisperConfig(
            **BOTH, max_source_positions=20, max_target_positions=32, num_mel_bins=8, suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        lambda: {"input_features": torch.randn(4, 8, 40), "labels": torch.randint(3, WORDS, (4, 6))},
    ),
    "Mamba": Family(
        t.MambaForCausalLM,
        lambda: t.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=8, **ENDS), sentences,
    ),
    "FalconMamba": Family(
        t.FalconMambaForCausalLM,
        lambda: t.FalconMambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=8, **ENDS),
        sentences,
    ),
    "Mamba2": Family(
        t.Mamba2ForCausalLM,
        lambda: t.Mamba2Config(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, expand=2,
            n_groups=1, chunk_size=4, **ENDS,
        ),
        sentences,
    ),
    "Jamba": Family(
        t.JambaForCausalLM,
        lambda: t.JambaConfig(
            **TEXT, **ENDS, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
            mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            use_mamba_kernels=False,
        ),
        sentences,
    ),
    "Mixtral": Family(
        t.MixtralForCausalLM,
        lambda: t.MixtralConfig(**TEXT, **ENDS, num_key_value_heads=2, num_local_experts=4), sentences,
    ),
    "Qwen3-MoE": Family(
        t.Qwen3MoeForCausalLM,
        lambda: t.Qwen3MoeConfig(
            **TEXT, **ENDS, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            head_dim=8,
        ),
        sentences,
    ),
    "BART": Family(
        t.BartForConditionalGeneration, lambda: t.BartConfig(**BOTH, max_position_embeddings=32), sentences
    ),
    "Marian": Family(t.MarianMTModel, lambda: t.MarianConfig(**BOTH, max_position_embeddings=32), sentences),
    "XLNet": Family(
        t.XLNetForSequenceClassification,
        lambda: t.XLNetConfig(vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=64),
        lambda: classes(words()),
    ),
    "DINOv2": Family(
        t.Dinov2ForImageClassification, lambda: t.Dinov2Config(**PICTURE), lambda: classes(pictures())
    ),
    "Swin": Family(
        t.SwinForImageClassification,
        lambda: t.SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2),
        lambda: classes(pictures()),
    ),
    "SegFormer": Family(
        t.SegformerForImageClassification,
        lambda: t.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
            strides=[2, 2], num_attention_heads=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
        ),
        lambda: classes(pictures(32)),
    ),
    "CLIP": Family(
        t.CLIPModel,
        lambda: t.CLIPConfig(
            text_config={**TEXT, **ENDS, "max_position_embeddings": 32}, vision_config=PICTURE, projection_dim=16
        ),
        lambda: {**words(), **pictures(), "return_loss": True},
    ),
    f"ResNet{WITH}": Family(
        t.ResNetForImageClassification,
        lambda: t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        lambda: classes(pictures()), True,
    ),
    f"ConvNeXt{WITH}": Family(
        t.ConvNextForImageClassification,
        lambda: t.ConvNextConfig(
            hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=32, layer_scale_init_value=1.0
        ),
        lambda: classes(pictures(32)), True,
    ),
    f"ViT{WITH}": Family(
        t.ViTForImageClassification, lambda: t.ViTConfig(**PICTURE), lambda: classes(pictures()), True
    ),
}  # fmt: skip
# Language models that see: these alone are quantized, and what sees is left in float by one name.
FAMILIES |= {
    "LLaVA": Family(
        t.LlavaForConditionalGeneration,
        lambda: t.LlavaConfig(
            text_config=t.LlamaConfig(**TEXT, **ENDS), vision_config=t.CLIPVisionConfig(**PICTURE),
            image_token_index=IMAGE, vision_feature_layer=-1,
        ),
        lambda: seen(4, **pictures()), tower="vision_tower",
    ),
    "Qwen2-VL": Family(
        t.Qwen2VLForConditionalGeneration,
        lambda: t.Qwen2VLConfig(
            text_config=SEEING,
            vision_config={
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2
            },
            **TOKENS,
        ),
        patches, tower="visual",
    ),
    "Qwen2.5-VL": Family(
        t.Qwen2_5_VLForConditionalGeneration,
        lambda: t.Qwen2_5_VLConfig(
            text_config=SEEING,
            vision_config={
                "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "patch_size": 8,
                "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
            },
            **TOKENS,
        ),
        patches, tower="visual",
    ),
    "Gemma 3": Family(
        t.Gemma3ForConditionalGeneration,
        lambda: t.Gemma3Config(
            text_config=t.Gemma3TextConfig(**TEXT, **ENDS, num_key_value_heads=2, head_dim=8),
            vision_config=t.SiglipVisionConfig(**PICTURE), image_token_index=IMAGE, mm_tokens_per_image=4,
        ),
        lambda: {
            **(batch := seen(4, **pictures())), "token_type_ids": (batch["input_ids"] == IMAGE).long()
        },
        tower="vision_tower",
    ),
    "SmolVLM": Family(
        t.SmolVLMForConditionalGeneration,
        lambda: t.SmolVLMConfig(
            text_config=t.LlamaConfig(**TEXT, **ENDS), vision_config=t.SmolVLMVisionConfig(**PICTURE),
            image_token_id=IMAGE, scale_factor=2, pad_token_id=0,
        ),
        lambda: seen(1, pixel_values=torch.randn(4, 1, 3, 16, 16)), tower="vision_model",
    ),
}  # fmt: skip
FAMILIES |= {f"{name}{WITH}": FAMILIES[name]._replace(convolutions=True) for name in ("Wav2Vec2", "Whisper")}
# One of each kind.
REPRESENTATIVE = {
    ("BART",), ("CLIP",), ("Gemma 3",), ("Mamba2",), ("Mixtral",), ("Swin",), ("XLNet",), (f"Whisper{WITH}",),
}  # fmt: skip


def cells(name: str, found: Outcome) -> list[str]:
    """What its row in docs/reference/support.md has of a family."""
    tower = FAMILIES[name].tower
    parts = (tower if tower in layer.split(".") else layer for layer in found.in_float)
    heads = ", ".join(f"`{part}`" for part in dict.fromkeys(parts))
    return [found.cell(), f"{100 * found.share:.0f} %", heads, found.layout]


def served(name: str) -> list[str]:
    """Its cells for the servers."""
    family = FAMILIES[name]
    model = family.kind(family.config())
    kept = family.tower
    return [support.answer(model, server, family.convolutions, kept) for server in support.COLUMNS.values()]


def outcome(name: str, folder: Path, stranger: Stranger) -> Outcome:
    """Train to 4 bits in a stock Trainer, and load what it delivers in a process without moq_hf."""
    family = FAMILIES[name]
    set_seed(0)
    model = family.kind(family.config())
    batch = family.batch()
    rows = [{key: part[i] if torch.is_tensor(part) else part for key, part in batch.items()} for i in range(4)]

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {k: torch.stack([i[k] for i in items]) if torch.is_tensor(items[0][k]) else items[0][k] for k in batch}

    config = {**CONFIG, "quantize_groups": "per_channel", "quantize_convolutions": family.convolutions}
    if family.tower is not None:
        config["modules_to_not_convert"] = [family.tower]
    callback = MoQCallback(config)
    trainer = Trainer(model, arguments(folder, remove_unused_columns=False), collate, rows, callbacks=[callback])
    inputs = {key: tensor for key, tensor in batch.items() if torch.is_tensor(tensor)}
    layers = LINEARS + (CONVOLUTIONS if family.convolutions else ())
    return outcome_of(trainer, stranger, inputs, generate=True, classes=layers)


def main() -> int:
    """Train every family; where each loads as it was evaluated, renew the table."""
    torch.set_num_threads(1)
    stranger, rows, bad = Stranger(), [HEAD], 0
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(name, Path(folder), stranger)
        rows.append([name, *cells(name, found), *served(name)])
        if found.reply.get("equal") is not True:
            bad += 1
            print(f"{name}: {found.reply}")
    stranger.close()
    if not bad:
        support.renew("families", rows)
    return bad


if __name__ == "__main__":
    sys.exit(main())
