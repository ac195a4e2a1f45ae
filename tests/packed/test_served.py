"""Who can serve a folder, by what is in its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from moq_hf import MoQError, quantize_model, save_quantized
from moq_hf.cli import main
from moq_hf.packed.served import served_by, table

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def written(folder: Path, model: Any, bits: int = 4, **config: Any) -> dict[str, Any]:
    """What each server makes of a folder with the model, by the server's key."""
    config.setdefault("quantize_group_size", 64)
    quantize_model(model, {"quantize_bits": {"start_bits": bits, "target_bits": bits}, **config})
    save_quantized(model, folder)
    return {verdict.server.key: verdict for verdict in served_by(folder)}


def answers(found: dict[str, Any]) -> dict[str, str]:
    return {key: verdict.answer for key, verdict in found.items()}


def test_four_bits_in_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = written(tmp_path, llama())
    expected = dict.fromkeys(found, "yes") | {"onnxruntime": "no"}
    assert answers(found) == expected
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("served by\n")[2].splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "transformers 5.23.0",
        "vLLM, CUDA 0.32.0",
        "vLLM, CPU 0.32.0",
        "SGLang 0.5.23",
        "llama.cpp by moq-hf export gguf 0.19.0",
        "llama.cpp's converter gguf 0.19.0",
        "ONNX Runtime by moq-hf export 1.31.1",
    ]
    assert lines[1].split("  ")[-1] == "scales are rounded to half precision there"


def test_other_bits(tmp_path: Path) -> None:
    found = written(tmp_path, llama(), 3)
    assert [key for key, answer in answers(found).items() if answer == "yes"] == ["transformers", "vllm", "llama.cpp"]
    lines = table(list(found.values())).splitlines()
    assert lines[3].startswith("vLLM, CPU 0.32.0") and "its kernels take 4 bits, not 3" in lines[3]


def test_floats_on_their_grid(tmp_path: Path) -> None:
    found = answers(written(tmp_path, llama(), 12))
    assert (found["vllm"], found["sglang"], found["llama.cpp"]) == ("yes", "yes", "no")


def test_a_left_out_layer_is_seen_in_the_files(tmp_path: Path) -> None:
    found = written(tmp_path, llama(), modules_to_not_convert=["lm_head", "gate_proj"])
    assert "it makes one layer of gate_proj, up_proj" in str(found["vllm"].reasons[0])
    assert answers(found)["llama.cpp"] == "yes"


def test_same_reasons_are_said_once(tmp_path: Path) -> None:
    found = written(tmp_path, llama(), modules_to_not_convert=["lm_head", "gate_proj"])
    assert table(list(found.values())).count("it makes one layer") == 1
    assert "as vLLM, CUDA" in table(list(found.values()))


def test_experts_by_the_names_of_transformers_5(tmp_path: Path) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)).eval()
    found = written(tmp_path, model)
    names = json.loads((tmp_path / "moq_state.json").read_text(encoding="utf-8"))["tensors"]
    fused = any(name.endswith(".experts.gate_up_proj") for name in names)
    assert (answers(found)["vllm"] == "no") == fused


def edited(folder: Path, change: Any) -> dict[str, str]:
    """The answers after `quantization_config` was changed; its digest counts for `verify_quantized` alone."""
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document["quantization_config"])
    path.write_text(json.dumps(document), encoding="utf-8")
    return {verdict.server.key: verdict.answer for verdict in served_by(folder)}


def test_what_a_server_reads_is_what_counts(tmp_path: Path) -> None:
    written(tmp_path, llama())

    def to_blocks(settings: dict[str, Any]) -> None:
        for group in settings["config_groups"].values():
            group["weights"] |= {"strategy": "block", "block_structure": [1, 64]}

    found = edited(tmp_path, to_blocks)
    assert (found["vllm"], found["sglang"], found["llama.cpp"]) == ("no", "no", "yes")


def test_encoders_need_targets_that_match_the_server_s_names(tmp_path: Path) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    model = BertModel(BertConfig(**sizes, max_position_embeddings=16)).eval()
    written(tmp_path, model, modules_to_not_convert=["pooler"])

    def retarget(*targets: str) -> dict[str, str]:
        def change(settings: dict[str, Any]) -> None:
            settings["config_groups"]["group_0"]["targets"] = list(targets)
            settings["ignore"] = [r"re:.*pooler\.dense$"]

        return edited(tmp_path, change)

    assert retarget(r"re:.*encoder\.layer\.0\..*")["vllm"] == "yes"
    assert retarget(r"re:^(?:bert\.)?encoder\.layer\.0\.attention\.self\.query$")["vllm"] == "no"


def test_a_damaged_config_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    written(tmp_path, llama())
    with pytest.raises(MoQError, match=r"config\.json: quantization_config\.config_groups\.group_0\.targets must be"):
        edited(tmp_path, lambda settings: settings["config_groups"]["group_0"].update(targets=3))


def test_a_group_as_wide_as_the_rows_is_a_group(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 32, "intermediate_size": 64}))
    found = written(tmp_path, model, quantize_group_size=32)
    assert answers(found)["llama.cpp-converter"] == "yes"
