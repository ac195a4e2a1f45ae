"""Packed experts: matrices under the names of the files, from which plain transformers computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import CONFIGS, FAMILIES, IDS, at_bits, mixture
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moq_hf import MoQCallback, MoQError, dequantize_model, quantize_model, save_quantized, verify_quantized
from moq_hf.formats.stored import by_matrix
from moq_hf.model.convert import quant_layers
from moq_hf.packed.reading import stored_weights
from moq_hf.packed.state import read_state, served_by, write_state
from moq_hf.packed.verify import recorded
from moq_hf.quantizer import dequantize

GROUPS = {"quantize_group_size": 16}
PARAMETER = "model.layers.1.mlp.experts.gate_up_proj"
OWN = {
    "Mixtral": ("model.layers.1.block_sparse_moe.experts", "w1", "w3", "w2"),
    "Qwen3-MoE": ("model.layers.1.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "OLMoE": ("model.layers.1.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "DeepSeek-V3": ("model.layers.1.mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_from_the_files(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(mixture(name), at_bits(4, **GROUPS))
    found = verify_quantized(save_quantized(model, tmp_path / "packed"), model)
    other = loaded(tmp_path / "packed")
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        for one in (model, other):
            one.config._experts_implementation = implementation
        assert torch.equal(logits(other), logits(model)), implementation
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    layer = found.layers[PARAMETER]
    assert (layer.bits, layer.shape, layer.scales[0]) == (
        4,
        quant_layers(model)[PARAMETER].matrix_shape,
        layer.shape[0],
    )
    if name == "GPT-OSS":
        # Transposed, with the gate and the other half interleaved: no place in the format.
        assert (layer.kind, layer.stored, layer.matrices) == ("experts_t", "dense", None)
        assert tensors[PARAMETER].shape == model.get_parameter(PARAMETER).shape
        assert "at full size: transposed experts are not packed (model.layers.*.mlp.experts.gate_up" in caplog.text
        return
    place, gate, up, down = OWN[name]
    assert (layer.kind, layer.stored, layer.group) == ("experts", "packed", "experts")
    assert layer.matrices == tuple(f"{place}.{i}.{half}" for i in range(4) for half in (gate, up))
    assert {f"{place}.3.{p}.weight_{part}" for p in (gate, up, down) for part in ("packed", "scale", "shape")} <= set(
        tensors
    )
    assert not any(".experts." in key and key.endswith(".weight") for key in tensors)
    groups = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["config_groups"]
    # Loaders take the first group that names experts.
    assert next(iter(groups)) == "experts" and groups["experts"]["targets"] == [
        rf"re:.*\.experts\.\d+\.(?:{'|'.join(sorted((gate, up, down)))})$"
    ]
    assert found.file_bytes < 0.4 * found.float_bytes and recorded(tmp_path / "packed").mean_bits == found.mean_bits


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (at_bits(1, quantize_groups=1), "dense"),
        (at_bits(2, quantize_groups=2), "packed"),
        (at_bits(8, quantize_groups="per_channel"), "packed"),
        (at_bits(4, quantize_algo={"scale_dtype": "bfloat16"}, **GROUPS), "packed"),
        (at_bits(4, quantize_algo={"rounding": "stochastic"}, **GROUPS), "packed"),
        (at_bits(4, quantize_type="asymmetric", **GROUPS), "dense"),
        (at_bits(12), "dense"),
    ],
)
def test_grids(config: dict[str, Any], stored: str, tmp_path: Path) -> None:
    model = quantize_model(mixture(), config)
    for layout in ("packed", "unpacked", "floats")[: 3 if config["quantize_bits"]["target_bits"] in (1, 2, 12) else 2]:
        found = verify_quantized(save_quantized(model, tmp_path / layout, layout=layout), model)
        assert found.layers[PARAMETER].stored == ("dense" if layout == "floats" else stored)
        assert torch.equal(logits(loaded(tmp_path / layout)), logits(model)), layout


def test_mixed_bits_have_one_scheme_and_floats_keep_the_names_of_the_model(tmp_path: Path) -> None:
    model = quantize_model(mixture(), at_bits(4, **GROUPS))
    layers = quant_layers(model)
    for name, layer in layers.items():
        layer.set_bits(2 if "experts" in name and "layers.0" in name else 3 if "layers.0" in name else 4)
    for layout in ("packed", "unpacked"):
        folder = save_quantized(model, tmp_path / layout, layout=layout)
        found = verify_quantized(folder, model)
        assert {layer.group for name, layer in found.layers.items() if "experts" in name} == {"experts"}
        assert torch.equal(logits(loaded(folder)), logits(model))
    weights = stored_weights(tmp_path / "packed")
    codes = torch.cat([weights[f"model.layers.0.block_sparse_moe.experts.{i}.w2"].codes for i in range(4)])
    assert codes.shape == (4 * 32, 64) and set(codes.unique().tolist()) == {-2, -1, 0, 1}
    layers[PARAMETER].set_bits(32)
    found = verify_quantized(save_quantized(model, tmp_path / "some"), model)
    assert found.layers[PARAMETER].stored == "float"
    assert torch.equal(logits(loaded(tmp_path / "some")), logits(model))
    # Neither may experts be taken apart that are not quantized at all.
    model = quantize_model(mixture(), at_bits(4, modules_to_not_convert=["experts", "lm_head"], **GROUPS))
    verify_quantized(save_quantized(model, tmp_path / "none"), model)
    assert PARAMETER in load_file(tmp_path / "none" / "model.safetensors")
    assert torch.equal(logits(loaded(tmp_path / "none")), logits(model))


def test_a_loaded_model_goes_on(tmp_path: Path) -> None:
    model = quantize_model(mixture(), at_bits(4, **GROUPS))
    expected = logits(model)
    save_quantized(model, tmp_path / "packed")
    other = dequantize_model(loaded(tmp_path / "packed"))
    assert torch.equal(logits(other), expected)
    verify_quantized(tmp_path / "packed", other)
    verify_quantized(tmp_path / "packed", loaded(tmp_path / "packed"))
    other.save_pretrained(tmp_path / "float")
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in load_file(tmp_path / "float" / "model.safetensors")
    assert torch.equal(logits(loaded(tmp_path / "float")), expected)
    quantize_model(other, at_bits(4, **GROUPS))
    save_quantized(other, tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(other))


def test_damage_is_named(tmp_path: Path) -> None:
    model = quantize_model(mixture(), at_bits(4, **GROUPS))
    save_quantized(model, tmp_path)
    model.get_parameter(PARAMETER).data[3] *= -1
    with pytest.raises(MoQError, match=r"block_sparse_moe.experts.3.w1.weight differs from the model's"):
        verify_quantized(tmp_path, model)
    state = read_state(tmp_path)
    matrices = state["layers"][PARAMETER]["matrices"]
    for wrong, fragment in (
        (matrices[:3], "do not belong to a weight"),
        ([], "the weights cannot be read"),
        ([*matrices[:-1], "elsewhere"], "the weights cannot be read"),
    ):
        state["layers"][PARAMETER]["matrices"] = wrong
        write_state(tmp_path, state)
        with pytest.raises(MoQError, match=fragment) as error:
            verify_quantized(tmp_path)
        assert str(tmp_path) in str(error.value)


def run(folder: Path, callback: MoQCallback, steps: int, **more: Any) -> Trainer:
    rows = torch.randint(3, 48, (32, 8), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=100, learning_rate=1e-2, save_strategy="steps", save_steps=4, **more,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=mixture(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])


def test_what_a_stock_trainer_evaluated_is_delivered_and_a_resumed_run_ends_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "quantize_bits": {"start_bits": 5, "target_bits": 3},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        "quantize_algo": {"scale_refresh": 3},
        "prove": False,
        **GROUPS,
    }
    trainer = run(tmp_path / "one", MoQCallback(config), 8)
    trainer.train()
    assert "8 linear layers and 4 expert parameters in 2 blocks" in capsys.readouterr().out
    assert "only" not in caplog.text
    model: Any = trainer.model
    assert quant_layers(model)[PARAMETER].moq.bits == 3
    folder = save_quantized(model, tmp_path / "packed")
    verify_quantized(folder, model)
    assert torch.equal(logits(loaded(folder)), logits(model))
    kept = load_file(tmp_path / "one" / "checkpoint-8" / "model.safetensors")
    assert PARAMETER in kept and "_moq_weight_conversions" not in vars(model)
    resumed = run(tmp_path / "one", MoQCallback(config), 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    again: Any = resumed.model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(logits(again), logits(model))
    best = run(
        tmp_path / "best", MoQCallback(config), 8, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4,
        metric_for_best_model="loss",
    )  # fmt: skip
    best.train()
    assert best.evaluate()["eval_loss"] == best.state.best_metric


def test_scales_in_half_precision_and_what_servers_are_asked(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["Mixtral"](), dtype=torch.bfloat16).eval()
    model = quantize_model(model, at_bits(4, quantize_group_size=32, quantize_algo={"scale_dtype": "bfloat16"}))
    found = verify_quantized(save_quantized(model, tmp_path), model)
    other = loaded(tmp_path)
    assert other.dtype == torch.bfloat16 and torch.equal(logits(other), logits(model))
    name = f"{OWN['Mixtral'][0]}.3.w3"
    assert load_file(tmp_path / "model.safetensors")[f"{name}.weight_scale"].dtype == torch.bfloat16
    # Servers meet the matrices, and so does the export to GGUF.
    answers = {one.server.key: one.answer for one in served_by(tmp_path)}
    assert (answers["vllm"], answers["llama.cpp"], answers["onnxruntime"]) == ("yes", "not tried", "no")
    layer, weight = by_matrix(found.layers)[name], stored_weights(tmp_path)[name]
    assert (layer.kind, layer.shape, layer.scales) == ("linear", (64, 32), (64, 1))
    rows = quant_layers(model)[PARAMETER].quantized_weight()[3, 64:]
    assert torch.equal(dequantize(*weight, dtype=torch.bfloat16), rows)
