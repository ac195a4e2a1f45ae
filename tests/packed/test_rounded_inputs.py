"""Folders that say how inputs are rounded, and those that cannot: both compute what was evaluated so."""

import json
import shutil
from pathlib import Path
from typing import Any

import families
import model_zoo
import pytest
import tiny_runs
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from moq_hf import MoQCallback, MoQConfig, MoQError, cli, quantize_model, save_quantized, verify_quantized
from moq_hf.model.delivery import inputs_in_words
from moq_hf.model.selection import take_inventory
from moq_hf.packed.state import served_by


def rounding(bits: int = 8, scale: str = "static", **more: Any) -> dict[str, Any]:
    return {
        "quantize_bits": {"target_bits": bits},
        "quantize_groups": "per_channel",
        "activation_quantization": {"enabled": True, "scale": scale},
        **more,
    }


RANGES = {"symmetric": False, "percentile": 99.0, "window": 3}
ASYMMETRIC: Any = {"bits": 8, "embeddings": None, "activations": RANGES}
NARROW: Any = {"bits": 4, "embeddings": None, "activations": {"bits": 4, "scale": "per_token", "wide_bits": 8}}
TOKENS: Any = {
    "bits": 4,
    "group_size": 32,
    "range": "narrow",
    "scale_dtype": "bfloat16",
    "embeddings": None,
    "activations": {"scale": "per_token", "symmetric": False},
}
HALF = rounding(quantize_algo={"scale_dtype": "bfloat16"})


def delivered(folder: Path, family: str, task: str, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """What was said before the first step, and `moq_state.json`."""
    model = model_zoo.new_model(family, task).to(dtype)
    checked = MoQConfig.from_dict(config)
    said = inputs_in_words(take_inventory(model, checked), checked)
    rows = model_zoo.rows_of(task)
    args = model_zoo.arguments(folder, max_steps=2)
    hf.Trainer(model, args, train_dataset=rows, callbacks=[MoQCallback(config)]).train()
    verify_quantized(folder / "quantized", model)
    return said, json.loads((folder / "quantized" / "moq_state.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("family", "task", "config", "dtype", "said"),
    [
        ("BERT", "sequence classification", rounding(), torch.float32, "rounded inputs (W8A8, static)"),
        ("BERT", "token classification", rounding(scale="per_token"), torch.bfloat16, "(W8A8, per_token)"),
        ("Llama", "causal LM", HALF, torch.bfloat16, "(W8A8, static)"),
        ("Llama", "causal LM", rounding(3, "per_token", quantize_embeddings=8), torch.float32, "(W3A8, per_token)"),
        ("ViT", "image classification", rounding(4, "per_token"), torch.float32, "(W4A8, per_token)"),
        ("ModernBERT", "masked LM", rounding(), torch.float32, "(W8A8, static)"),
        ("BERT", "sequence classification", ASYMMETRIC, torch.float32, "(W8A8, static, asymmetric)"),
        ("BERT", "sequence classification", NARROW, torch.float32, "(W4A4 and W4A8, per_token)"),
        ("BERT", "sequence classification", TOKENS, torch.float32, "(W4A8, per_token, asymmetric)"),
        ("Llama", "causal LM", TOKENS, torch.bfloat16, "(W4A8, per_token, asymmetric)"),
        ("Llama", "causal LM", NARROW | {"scale_dtype": "bfloat16"}, torch.bfloat16, "(W4A4 and W4A8, per_token)"),
        ("Llama", "causal LM", ASYMMETRIC | {"scale_dtype": "bfloat16"}, torch.bfloat16, "(W8A8, static, asymmetric)"),
    ],
)
def test_folders_compute_with_rounded_inputs(
    family: str, task: str, config: Any, dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    """And weights of half precision keep it with scales of it."""
    words, state = delivered(tmp_path, family, task, config, dtype)
    assert words.startswith("rounded inputs (") and words.endswith(said)
    proof = state["proof"]
    assert (proof["agrees"], proof["largest_difference"], proof["inputs"]) == (True, 0.0, "rounded")
    card = (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    told = MoQConfig.from_dict(config).inputs_in_words
    assert f"with inputs rounded to {told}" in " ".join(card.split())
    written = json.loads((tmp_path / "quantized" / "config.json").read_text(encoding="utf-8"))
    has_half_scales = config is HALF or "scale_dtype" in config
    is_half = has_half_scales and dtype == torch.bfloat16
    assert written["dtype"] == ("bfloat16" if is_half else "float32")
    assert proof["dtype"] == ("bfloat16" if dtype == torch.bfloat16 else None)


def test_layers_of_a_folder_may_differ_in_their_inputs(tmp_path: Path) -> None:
    overrides = {"*.output.dense": {"activations": False}, "pooler": {"activations": {"scale": "per_token"}}}
    _, state = delivered(tmp_path, "BERT", "sequence classification", ASYMMETRIC | {"overrides": overrides})
    proof = state["proof"]
    assert (proof["agrees"], proof["largest_difference"], proof["inputs"]) == (True, 0.0, "rounded")
    card = (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    assert "8 bits (static, asymmetric); *.output.dense: float; pooler: 8 bits (per_token)" in " ".join(card.split())


@pytest.mark.parametrize(
    ("family", "task", "config", "said"),
    [
        ("GPT-2", "causal LM", rounding(), "they are Conv1D layers (transformer.h.*.attn.c_attn (2)"),
        ("ModernBERT", "masked LM", rounding(4, "per_token"), "transformers unpacks a model of its kind"),
        ("BERT", "masked LM", rounding(4), "static scales need 8 bits per channel"),
        ("BERT", "masked LM", rounding(quantize_algo={"q_type": "asymmetric"}), "their grid is asymmetric"),
        ("Llama", "causal LM", rounding(scale="per_tensor"), "scales are per_tensor"),
        ("Llama", "causal LM", rounding(4, "per_token", quantize_embeddings=4), "tables of fewer than 8 bits"),
    ],
)
def test_others_compute_with_float_activations_and_say_why(
    family: str, task: str, config: Any, said: str, tmp_path: Path
) -> None:
    words, state = delivered(tmp_path, family, task, config)
    assert words.startswith(f"float activations, because {said}")
    proof = state["proof"]
    assert (proof["agrees"], proof["largest_difference"], proof["inputs"]) == (True, 0.0, "float")
    assert "inputs are floats" in (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "said", "inputs"),
    [
        ("LoraConfig", "float activations, because PEFT's LoRA", "float"),
        ("IA3Config", "rounded inputs (W4A8, per_token)", "rounded"),
    ],
)
def test_lora_on_packed_layers_leaves_no_place_for_inputs(kind: str, said: str, inputs: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    more = {} if kind == "LoraConfig" else {"feedforward_modules": []}
    adapter = getattr(peft, kind)(target_modules=["k_proj"], **more)
    model = peft.get_peft_model(model_zoo.new_model("Llama", "causal LM"), adapter)
    config = MoQConfig.from_dict(rounding(4, "per_token"))
    assert inputs_in_words(take_inventory(model, config), config).startswith(said)
    args = model_zoo.arguments(tmp_path, max_steps=2)
    rows = model_zoo.rows_of("causal LM")
    hf.Trainer(model, args, train_dataset=rows, callbacks=[MoQCallback(config)]).train()
    state = json.loads((tmp_path / "quantized" / "moq_state.json").read_text(encoding="utf-8"))
    assert (state["proof"]["agrees"], state["proof"]["inputs"]) == (True, inputs)


def test_where_no_layout_can_be_loaded_the_proof_has_float_activations(tmp_path: Path) -> None:
    family = families.FAMILIES["DINOv2"]
    hf.set_seed(0)
    model, batch = family.kind(family.config()), family.batch()
    rows = [{key: part[index] for key, part in batch.items()} for index in range(4)]
    args = model_zoo.arguments(tmp_path, max_steps=2)
    hf.Trainer(model, args, train_dataset=rows, callbacks=[MoQCallback(rounding())]).train()
    state = json.loads((tmp_path / "quantized" / "moq_state.json").read_text(encoding="utf-8"))
    assert (state["layout"], state["proof"]["inputs"], state["rounds_inputs"]) == ("floats", "float", False)


@pytest.fixture(scope="module", params=["static", "per_token", "asymmetric", "tokens"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint in the middle; not to be changed."""
    # A worker may make it more than once, each time under another number.
    folder = tmp_path_factory.mktemp("run") / str(request.param)
    train(folder, config_of(folder))
    return folder


def config_of(run: Path) -> Any:
    asymmetric = {"asymmetric": RANGES, "tokens": TOKENS["activations"]}
    if run.name in asymmetric:
        return ASYMMETRIC | {"activations": asymmetric[run.name]}
    return rounding(scale=run.name)


def train(folder: Path, config: Any, resumed: bool = False) -> hf.BertForSequenceClassification:
    args = tiny_runs.arguments(folder, max_steps=4, save_strategy="steps", save_steps=2)
    model = tiny_runs.new_model()
    trainer = hf.Trainer(model, args, train_dataset=tiny_runs.rows(), callbacks=[MoQCallback(config)])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumed else None)
    return model


def test_a_resumed_run_and_pack_of_the_last_checkpoint_write_the_same_bytes(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    train(tmp_path, config_of(run), resumed=True)
    assert cli.main(["pack", str(run / "checkpoint-4"), str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "config.json"):
        expected = (run / "quantized" / name).read_bytes()
        assert (tmp_path / "quantized" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() == expected


def test_a_model_that_was_loaded_from_the_folder_is_verified(run: Path) -> None:
    model = hf.BertForSequenceClassification.from_pretrained(run / "quantized")
    inputs = {"input_ids": torch.arange(5, 15)[None]}
    proof = verify_quantized(run / "quantized", model, inputs=inputs).proof
    assert (proof.agrees, proof.largest_difference) == (True, 0.0)


def test_servers_of_the_folder(run: Path) -> None:
    found = {one.server.key: one for one in served_by(run / "quantized")}
    # BERT's pooler and heads are floats in vLLM.
    assert all("pooler" in reason for reason in found["vllm-cpu"].reasons)
    assert ("over 127" in str(found["vllm-cpu"].notes)) == (run.name == "per_token")


def test_another_range_of_the_model_or_scale_in_the_folder_is_noticed(tmp_path: Path) -> None:
    model = train(tmp_path, rounding())
    verify_quantized(tmp_path / "quantized", model)
    inputs: Any = model.get_submodule("bert.encoder.layer.1.output.dense")
    inputs.moq.inputs.range *= 2
    with pytest.raises(MoQError, match=r"bert\.encoder\.layer\.1\.output\.dense\.input_scale"):
        verify_quantized(tmp_path / "quantized", model)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".input_scale"))
    tensors[name] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(MoQError, match=name.replace(".", r"\.")):
        verify_quantized(tmp_path / "quantized")


def test_float_inputs_of_a_folder_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a run nobody has said it before."""
    model = model_zoo.new_model("BERT", "sequence classification")
    batch = model_zoo.inputs_of("sequence classification", model)
    told = "computes with float inputs, while the model in memory rounds those of bert"
    save_quantized(quantize_model(model, "w8", activations=8), tmp_path / "unknown", inputs=batch)
    assert caplog.text.count(told) == caplog.text.count("their static ranges are not known yet") == 1
    caplog.clear()
    save_quantized(quantize_model(model, "w8", activations=8, inputs=batch), tmp_path / "known", inputs=batch)
    assert told not in caplog.text
    scale = {"scale": "per_tensor"}
    save_quantized(quantize_model(model, "w8", activations=scale), tmp_path / "other", inputs=batch)
    assert caplog.text.count(told) == caplog.text.count("no packed folder of this form can say how; ") == 1
