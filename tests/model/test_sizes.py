"""What share of a model is quantized, its bits and its size: of the whole model, in every text."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tiny_runs import over_the_model, stock, trained
from torch import nn

from moq_hf import MoQConfig, save_quantized, verify_quantized
from moq_hf.model.sizes import in_words, percent
from moq_hf.packed.card import write_card
from moq_hf.training.controller import MoQController

CONFIG = {
    "quantize_bits": {"start_bits": 4, "target_bits": 4},
    "quantize_groups": "per_channel",
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 2},
}
WORDS = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip

# PEFT 0.21 asks for it by its old name; can go with a PEFT that does not.
PEFT_WARNS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**WORDS, intermediate_size=64, num_local_experts=8))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=900, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def controller_of(model: nn.Module, **more: Any) -> MoQController:
    return MoQController(model, MoQConfig.from_dict({**CONFIG, **more}), total_steps=9)


def numbers_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def low_share(controller: MoQController) -> str:
    (note,) = (note for note in controller.warnings() if "quantized layers" in note)
    return note


@pytest.mark.parametrize("counts", [True, False])
def test_experts_count_unless_the_config_leaves_them_out(counts: bool) -> None:
    model = mixtral()
    left = [] if counts else ["experts"]
    controller = controller_of(model, modules_to_not_convert=[*left, "lm_head"])
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    quantized = 2 * 4 * 32 * 32 + experts * counts
    share = quantized / numbers_of(model)
    assert len(controller.layers) == (12 if counts else 8)
    assert controller.sizes.share == share and controller.sizes.mean_bits == 32
    for _ in range(3):
        controller.step()
    assert controller.has_arrived and controller.sizes.share == share
    assert controller.sizes.mean_bits == pytest.approx(32 - 28 * share, rel=1e-12)
    assert controller.metrics()["moq/quantized_share"] == round(share, 4)
    told = f"{100 * share:.1f} % of the model's {in_words(numbers_of(model))} parameters"
    assert f"quantized: {told}" in controller.summary()
    if counts:
        assert "8 linear layers and 4 expert parameters in 2 blocks" in controller.summary()
    else:
        assert low_share(controller) == f"only {told} are in quantized layers"
        left_out = f", and the expert parameters, which are {percent(experts / numbers_of(model))} of the parameters"
        assert left_out in controller.summary()


def test_a_bert_with_a_large_vocabulary_is_told_of_its_tables(tiny_bert: hf.BertForSequenceClassification) -> None:
    tiny_bert.resize_token_embeddings(2000)
    controller = controller_of(tiny_bert)
    assert "only " in low_share(controller)
    size = sum(p.numel() for name, p in tiny_bert.named_parameters() if "_embeddings.weight" in name)
    told = f"classifier, and the embedding tables, which are {percent(size / numbers_of(tiny_bert))} of the parameters"
    assert controller.summary().endswith(f"; left in float: {told} (embeddings=8 quantizes them)")
    # Where the config or a server says so, there is nothing to be done about it.
    for more in ({"modules_to_not_convert": ["embeddings", "pooler", "classifier"]}, {"serve": ["vllm"]}):
        more = {"modules_to_not_convert": ["pooler"], **more}
        assert controller_of(tiny_bert, **more).summary().endswith(told.partition("classifier")[2])

    controller = controller_of(tiny_bert, quantize_embeddings=8)
    linear = sum(layer.float_weight.numel() for layer in controller.layers.values())
    tables = sum(table.float_weight.numel() for table in controller.embeddings.values())
    total = numbers_of(tiny_bert)
    assert controller.sizes.share == (linear + tables) / total > 0.9 and controller.warnings() == []
    assert "3 embedding tables to 8 bits; quantized: 9" in controller.summary()
    for _ in range(3):
        controller.step()
    assert controller.sizes.mean_bits == pytest.approx(
        (4 * linear + 8 * tables + 32 * (total - linear - tables)) / total
    )


def test_tied_weights_count_once() -> None:
    model = gpt2()
    controller = controller_of(model)
    quantized = 16 * 48 + 16 * 16 + 2 * 16 * 64
    assert controller.sizes.quantized == quantized and controller.sizes.total == numbers_of(model)
    assert "left in float: lm_head, and the embedding tables, which are 8" in controller.summary()


def test_a_weight_of_two_quantized_layers_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].weight = model[0].weight
    controller = controller_of(model)
    assert (controller.sizes.quantized, controller.sizes.total) == (64, 64 + 8 + 8 + 18)
    controller.step()
    controller.step()
    assert controller.sizes.mb == pytest.approx((64 / 2 + 8 * 4 + 34 * 4) / 1e6)


def test_float_parameters_have_the_bits_of_their_own_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8), nn.Linear(8, 2))
    controller = controller_of(model)
    assert controller.sizes.mean_bits == pytest.approx((72 * 16 + 90 * 32) / 162)
    controller.step()
    controller.step()
    assert controller.sizes.mean_bits == pytest.approx((128 * 4 + 8 * 16 + 26 * 32) / 162)


@PEFT_WARNS
def test_adapters_count_as_float(tiny_bert: hf.BertForSequenceClassification) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_bert, peft.LoraConfig(r=64, target_modules=["query", "dense"]))
    controller = controller_of(model)
    weights = sum(layer.float_weight.numel() for layer in controller.layers.values())
    assert controller.sizes.share == weights / numbers_of(model) < 0.5


def test_the_run_tells_the_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    trainer = trained(stock(tmp_path))
    share = r"72\.1 % of the model's 6,034 parameters"
    last = re.escape(f"{over_the_model(3, trainer.model):.2f}")
    assert re.search(
        f"quantized: {share}; left in float: classifier, and the embedding tables, which ", capsys.readouterr().out
    )
    assert "only" not in caplog.text
    assert verify_quantized(tmp_path / "quantized").parameters == (4352, 6034)
    card = (tmp_path / "quantized" / "README.md").read_text()
    told = f"{share} are quantized, which makes {last} bits per parameter over the whole model"
    assert re.search(told, card) and re.search(f"quantized: {share}; mean {last} bits over the whole model", card)


@pytest.mark.parametrize("make", [mixtral, gpt2])
def test_a_folder_tells_what_the_controller_told(make: Any, tmp_path: Path) -> None:
    model = make()
    controller = controller_of(model)
    for _ in range(3):
        controller.step()
    save_quantized(model, tmp_path / "packed", controller=controller)
    found = verify_quantized(tmp_path / "packed", model)
    assert found.parameters == (controller.sizes.quantized, numbers_of(model))
    assert found.mean_bits == pytest.approx(controller.sizes.mean_bits)
    line = f"quantized: {controller.sizes.coverage}; mean {controller.sizes.mean_bits:.2f} bits over the whole model"
    assert found.table().splitlines()[-1] == line
    assert controller.sizes.coverage in write_card(tmp_path / "packed").read_text()


def bert() -> nn.Module:
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2}
    return hf.BertModel(hf.BertConfig(vocab_size=99, num_hidden_layers=1, **shape))


def modernbert() -> nn.Module:
    """Unpacked while loading, so that all codes are as wide as the widest."""
    ends = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 1, "bos_token_id": 2, "eos_token_id": 1}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return hf.ModernBertForSequenceClassification(hf.ModernBertConfig(vocab_size=900, **ends, **shape))


def t5() -> nn.Module:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=60, **shape, decoder_start_token_id=0))


TWO = {"quantize_bits": {"start_bits": 2, "target_bits": 2}}


@pytest.mark.parametrize(
    ("make", "config", "widest"),
    [
        (bert, {"quantize_group_size": 32}, None),
        (lambda: bert().bfloat16(), {"quantize_group_size": 32}, None),
        (bert, {"quantize_group_size": 32, "quantize_algo": {"scale_dtype": "float16"}}, None),
        (bert, {"quantize_groups": 2}, None),
        (modernbert, {**TWO, "quantize_embeddings": 8}, None),
        (modernbert, {**TWO, "quantize_embeddings": 2}, None),
        # Layers of several bits.
        (t5, {}, 8),
        (mixtral, {"quantize_bits": {"start_bits": 3, "target_bits": 3}}, 5),
    ],
)
def test_sizes_in_training_are_those_of_the_files(
    make: Any, config: dict[str, Any], widest: int | None, tmp_path: Path
) -> None:
    model = make().eval()
    controller = controller_of(model, **{"quantize_schedule": {}, **config})
    if widest is not None:
        next(iter(controller.layers.values())).set_bits(widest)
    save_quantized(model, tmp_path)
    # Shapes of packed weights are not counted.
    tensors = load_file(tmp_path / "model.safetensors").items()
    stored = sum(tensor.nbytes for name, tensor in tensors if not name.endswith("weight_shape"))
    assert controller.sizes.mb == pytest.approx(stored / 1e6)


def test_layers_that_are_float_still_count_as_float_in_a_folder(
    tiny_bert: hf.BertForSequenceClassification, tmp_path: Path
) -> None:
    controller = controller_of(tiny_bert, quantize_embeddings=8)
    save_quantized(tiny_bert, tmp_path / "packed", controller=controller)
    assert verify_quantized(tmp_path / "packed").mean_bits == controller.sizes.mean_bits == 32


def test_a_convolution_takes_what_it_takes_in_float() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(8, 8), nn.Linear(8, 2))
    moq = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": 1}
    controller = MoQController(model, MoQConfig.from_dict({**moq, "quantize_convolutions": True}))
    others = 8 + 8 + 2 * 8 + 2
    assert controller.sizes.quantized == 288 + 64 and controller.sizes.total == 288 + 64 + others
    # As it is saved: the scale of a convolution lies in moq_state.json, that of all rows of a layer stands for each.
    assert controller.sizes.mb == pytest.approx((288 * 4 + 64 / 2 + 8 * 4 + others * 4) / 1e6)
    assert controller.sizes.mean_bits == pytest.approx((352 * 4 + others * 32) / (352 + others))


@pytest.mark.parametrize("tables", [8, 2])
def test_tables_that_widen_all_codes_of_a_file_are_told_of(tables: int) -> None:
    controller = controller_of(modernbert(), **TWO, quantize_embeddings=tables, quantize_schedule={})
    told = [note for note in controller.warnings() if "embeddings: 2 keeps" in note]
    assert len(told) == (tables == 8)


def test_layers_that_no_file_packs_are_told_of_before_the_first_step() -> None:
    text = "every quantized layer is saved as rounded floats, at full size: Conv1D layers, as GPT-2 has them, are not "
    assert f"{text}packed; the file will be as large as in float" in controller_of(gpt2()).warnings()
    assert not any("full size" in note for note in controller_of(mixtral()).warnings())
