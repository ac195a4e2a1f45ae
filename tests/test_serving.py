"""What each server takes: its row against a description, the check before the first step, and a folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from repo import ROOT
from tiny_runs import arguments

from moq_hf import MoQCallback, MoQConfig, MoQConfigError, MoQError, quantize_model, quantizer, save_quantized
from moq_hf.cli import main
from moq_hf.grid import FP4, Format, Grid, InputGrid, InputScale, PerChannel, PerGroup
from moq_hf.model import delivery
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory
from moq_hf.model.selection import take_inventory
from moq_hf.packed.state import served_by
from moq_hf.servers import (
    EXECUTORCH,
    GGUF,
    MLX,
    NAMED,
    ONNX,
    SERVERS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    VLLM_CPU,
    Server,
)
from moq_hf.serving import Description, verdict
from moq_hf.weight_matrix import Kind, to_rows
from moq_hf.weight_spec import WeightSpec


def weight_of(
    kind: Kind = "linear",
    shape: tuple[int, int] = (256, 256),
    bits: int = 4,
    size: int | None = 128,
    symmetric: bool = True,
    stored: str = "packed",
    rounded: InputScale | None = None,
    format: Format = "int",
) -> WeightSpec:
    grid = Grid(PerGroup(size) if size else PerChannel(), symmetric=symmetric, format=format)
    return WeightSpec(kind, shape, bits, grid, stored, inputs=InputGrid(8, rounded) if rounded else None)


WEIGHT = weight_of()
# Layers that vLLM loads as floats.
VLLM_UNNAMED = {
    "MiniCPM3ForCausalLM": "model.layers.0.self_attn.q_a_proj",
    "BloomForCausalLM": "transformer.h.0.self_attention.query_key_value",
    "MambaForCausalLM": "backbone.layers.0.mixer.dt_proj",
    "JambaForCausalLM": "model.layers.0.mamba.in_proj",
    "FalconH1ForCausalLM": "model.layers.0.mamba.out_proj",
}
ATTENTION = "model.layers.0.self_attn"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def described(architecture: str = "LlamaForCausalLM", **more: Any) -> Description:
    weights = {f"{ATTENTION}.{name}": WEIGHT for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return Description(architecture, weights, floats=["model.embed_tokens", "lm_head"], **more)


def with_grid(**changes: Any) -> Description:
    model = described()
    return replace(model, weights=dict.fromkeys(model.weights, weight_of(**changes)))


def with_layer(name: str, weight: WeightSpec, architecture: str = "LlamaForCausalLM") -> Description:
    model = described(architecture)
    return replace(model, weights={**model.weights, name: weight})


@pytest.mark.parametrize("server", [server for server in SERVERS if server not in (ONNX, EXECUTORCH)])
def test_the_common_grid_is_served(server: Server) -> None:
    found = verdict(described(), server)
    # Nothing was ever run with SGLang.
    assert (found.answer, found.reasons) == ("not tried" if server is SGLANG else "yes", [])


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"bits": 1}, {VLLM, VLLM_CPU, SGLANG}),
        ({"bits": 3}, {VLLM_CPU, SGLANG}),
        ({"bits": 8}, {VLLM_CPU}),
        ({"symmetric": False}, set()),
        ({"symmetric": False, "bits": 8}, {VLLM_CPU, SGLANG, GGUF}),
        ({"size": 8}, {VLLM, SGLANG, GGUF, MLX}),
        ({"size": 16}, {SGLANG, GGUF, MLX}),
        ({"size": 32}, set()),
        ({"size": 256}, {SGLANG}),
        ({"size": None, "shape": (256, 4096)}, set()),
        ({"size": None, "shape": (256, 4128)}, {SGLANG}),
        ({"size": None, "shape": (256, 4112)}, {VLLM_CPU, SGLANG, GGUF, MLX}),
        ({"shape": (288, 256)}, {SGLANG}),
        ({"shape": (264, 256)}, {VLLM_CPU, SGLANG}),
    ],
)
def test_which_servers_take_a_grid(changes: dict[str, Any], refused: set[Server]) -> None:
    """For the other bits there are, the page's table is made: `test_the_page_has_the_servers`."""
    model = with_grid(**changes)
    # ExecuTorch takes no inputs in float.
    expected = {server.key for server in {*refused, EXECUTORCH}}
    assert {server.key for server in SERVERS if verdict(model, server).reasons} == expected


Q_PROJ = f"{ATTENTION}.q_proj"
LEFT_OUT = replace(
    described(),
    weights={name: WEIGHT for name in described().weights if name != Q_PROJ},
    floats=["lm_head", Q_PROJ],
)
TABLE = with_layer("model.embed_tokens", weight_of("embedding", (512, 256), 8, None, stored="dense"))
POOLER = with_layer("pooler.dense", WEIGHT, "BertModel")
ONE_BY_ONE = [f"model.layers.0.block_sparse_moe.experts.{index}.w1" for index in range(2)]
EXPERTS = replace(described("MixtralForCausalLM"), weights=dict.fromkeys([Q_PROJ, *ONE_BY_ONE], WEIGHT))
WHOLE = "model.layers.0.mlp.experts.gate_up_proj"
UNPACKED = with_layer(WHOLE, weight_of("experts", stored="dense"), "MixtralForCausalLM")
ALSO_WHOLE = replace(described("MixtralForCausalLM"), floats=[WHOLE])
W8A8 = {"bits": 8, "size": None}
IN_FLOAT = "it takes these layers in float, whatever the checkpoint holds"
NO_NAMES = "it looks for each expert by its own name"


@pytest.mark.parametrize(
    ("model", "server", "text"),
    [
        (with_grid(size=16), SGLANG, "its groups are 32, 64 or 128, not 16"),
        (with_grid(shape=(256, 4112), size=None), SGLANG, "a multiple of 128 columns (in_features), not 4112"),
        (with_grid(shape=(264, 256)), SGLANG, "a multiple of 64 rows (out_features), not 264"),
        (
            with_grid(bits=3),
            SGLANG,
            "its kernels take 4 or 8 bits, not 3 (model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, "
            "model.layers.0.self_attn.v_proj and 1 more); 4 or 8 bits are served",
        ),
        *(
            (with_layer(Q_PROJ, weight_of(size=64)), server, "(4 bits in groups of 128 and 4 bits in groups of 64)")
            for server in (VLLM, VLLM_CPU, SGLANG)
        ),
        *((LEFT_OUT, server, "(4 bits in groups of 128 and floats)") for server in (VLLM, VLLM_CPU, SGLANG)),
        (LEFT_OUT, GGUF, ""),
        (replace(LEFT_OUT, weights={f"{ATTENTION}.o_proj": WEIGHT}, floats=[*LEFT_OUT.weights]), VLLM, ""),
        # A dense grid counts as floats beside the others.
        (with_layer(Q_PROJ, weight_of(bits=12, stored="dense")), VLLM, "and floats"),
        (with_layer(Q_PROJ, weight_of(bits=12, stored="dense")), GGUF, "take 1, 2, 3, 4, 5, 6, 7 or 8 bits, not 12"),
        *((with_layer("model.layers.1.mlp.down_proj", weight_of(bits=8)), s, "") for s in (VLLM, SGLANG, GGUF)),
        *((TABLE, s, "embedding tables must be floats (model.embed_tokens)") for s in (VLLM, VLLM_CPU, SGLANG)),
        *((TABLE, server, "") for server in (GGUF, TRANSFORMERS)),
        *((with_layer("lm_head", weight_of(shape=(512, 256))), server, "") for server in (VLLM, SGLANG)),
        *(
            (with_layer(name, WEIGHT), VLLM, f"{IN_FLOAT} ({name})")
            for name in ("bert.pooler.dense", "classifier", "head.dense", "classifier.out_proj")
        ),
        # vLLM does not load the pooler of a base model at all; llama.cpp's converter drops it.
        (POOLER, VLLM, ""),
        (POOLER, GGUF, "(pooler.dense)"),
        (described("BertModel"), GGUF, ""),
        (described("BertForSequenceClassification"), GGUF, "which this class needs"),
        (described("BloomForCausalLM"), GGUF, "in another order"),
        # They are delivered as floats.
        *((with_layer("h.0.c_attn", weight_of("conv1d")), server, "") for server in (VLLM, SGLANG, GGUF)),
        (with_layer("h.0.c_attn", weight_of("conv1d")), MLX, "it takes no quantized Conv1D layers"),
        (EXPERTS, VLLM, ""),
        (EXPERTS, VLLM_CPU, "it takes no packed experts"),
        (
            replace(EXPERTS, weights={**EXPERTS.weights, ONE_BY_ONE[1]: weight_of(bits=8)}),
            VLLM,
            "one layer of all experts of a block (4 bits in groups of 128 and 8 bits",
        ),
        (UNPACKED, VLLM, NO_NAMES),
        (UNPACKED, GGUF, "it has no place for experts that are one tensor in the files"),
        (UNPACKED, GGUF, "GPT-OSS in MXFP4 needs no export: llama.cpp's converter copies its codes"),
        # The files have the names of each where no layer has codes.
        (replace(UNPACKED, weights={WHOLE: UNPACKED.weights[WHOLE]}), VLLM, ""),
        (ALSO_WHOLE, VLLM, NO_NAMES),
        (ALSO_WHOLE, GGUF, ""),
        (replace(ALSO_WHOLE, architecture="GptOssForCausalLM"), VLLM, ""),
        *((described(name), ONNX, f"{name} is not exported") for name in ("MambaForCausalLM", "XLNetModel")),
        *(
            (described(name), MLX, f"{name} is not exported; decoders that mlx-lm has")
            for name in ("BertModel", "LlamaForSequenceClassification", "OPTForCausalLM")
        ),
        (described("BartModel", is_encoder_decoder=True), ONNX, "BartModel is not exported"),
        (described(unserved="logits differ"), TRANSFORMERS, "it does not answer as the model did: logits differ"),
        *(
            (with_layer(name, WEIGHT, architecture), VLLM, f"({name}); name them in modules_to_not_convert")
            for architecture, name in VLLM_UNNAMED.items()
        ),
        *((with_layer(name, WEIGHT), VLLM, "") for name in VLLM_UNNAMED.values()),
        (with_grid(**W8A8), VLLM_CPU, "its kernels take 4 bits, not 8"),
        (with_grid(bits=3, rounded="per_token"), VLLM_CPU, "its kernels take 4 bits, not 3"),
    ],
)
def test_why_a_server_refuses_a_model(model: Description, server: Server, text: str) -> None:
    found = " | ".join(verdict(model, server).reasons)
    assert text in found if text else found == ""


ASYMMETRIC = InputGrid(8, "per_token", symmetric=False)


def for_xnnpack(
    inputs: InputGrid | None = ASYMMETRIC, scales: str = "bfloat16", full: bool = False, **changes: Any
) -> Description:
    weight = weight_of(**changes)
    weight = replace(weight, inputs=inputs, grid=replace(weight.grid, full=full))
    return replace(with_layer(f"{ATTENTION}.q_proj", weight), weights={"layer": weight}, scales=scales)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        ({"size": None}, []),
        ({"bits": 2, "size": 64}, []),
        (
            {"inputs": None},
            [
                "it rounds inputs to 8 bits (per_token, asymmetric), which the folder does not",
                '"symmetric": false}',
            ],
        ),
        ({"inputs": InputGrid(8, "per_token")}, ['"scale": "per_token", "symmetric": false} are served']),
        ({"full": True}, ["its kernels take positive scales", 'range "narrow" is served']),
        ({"scales": "float32"}, ['its scales are bfloat16, not float32; scale_dtype "bfloat16" is served']),
        ({"bits": 8}, ["its kernels take 2, 3 or 4 bits, not 8"]),
        ({"size": 16}, ["its groups are a multiple of 32, not 16"]),
        ({"symmetric": False}, ["2, 3 or 4 bits without zero points are served"]),
    ],
)
def test_what_executorch_takes(changes: dict[str, Any], texts: list[str]) -> None:
    reasons = verdict(for_xnnpack(**changes), EXECUTORCH).reasons
    assert bool(reasons) == bool(texts) and all(text in " | ".join(reasons) for text in texts)


def test_naming_executorch_trains_what_it_takes() -> None:
    grid = MoQConfig(bits=4, group_size=32, serve=["executorch"]).grid_of("float16")
    assert (grid.scale_dtype, grid.at(4).is_full) == ("bfloat16", False)
    assert MoQConfig(bits=4, range="full", serve=["executorch"]).float32_grid.at(4).is_full


def test_inputs_that_no_folder_rounds_are_an_error_with_the_reason() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with pytest.raises(MoQError, match=r"ExecuTorch.*: the folder will have inputs in float, because ") as error:
        quantize_model(model, "executorch", heads=True)
    # It has what this would ask for.
    assert "activations" not in str(error.value)


def test_a_format_that_a_server_does_not_take_is_its_only_reason() -> None:
    weight = WeightSpec("linear", (40, 40), 8, Grid(PerChannel(), format="fp8"), stored="packed")
    reasons = verdict(Description("LlamaForCausalLM", {"layer": weight}, scales="bfloat16"), EXECUTORCH).reasons
    assert reasons == ['it does not take fp8 (layer); format "int" is served']


def test_what_executorch_was_tried_with() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "executorch.json").read_text(encoding="utf-8"))
    models = document["models"].values()
    assert {model["model"] for model in models} == {*EXECUTORCH.tried.split()}
    for model in models:
        assert model["versions"]["executorch"] == EXECUTORCH.version
        assert model["proof"] == {"agrees": True, "largest_difference": 0.0, "inputs": "rounded"}
        assert model["largest_difference_of_torchao"] == 0.0
        assert model["largest_difference"] < 0.01 * model["largest_output"]
        assert model["layers_outside_xnnpack"] == 0
        assert model.get("same_tokens") == model.get("tokens")


ROUNDED = with_grid(bits=8, size=None, shape=(20, 100), rounded="static")
PER_TOKEN = with_grid(rounded="per_token")


@pytest.mark.parametrize(
    ("model", "server", "answer", "note"),
    [
        *((described(name), ONNX, "yes", None) for name in ("BertForTokenClassification", "BertModel")),
        *((described(name), ONNX, "yes", None) for name in ("BertForSequenceClassification", "Qwen3ForCausalLM")),
        (described("MistralForCausalLM"), ONNX, "not tried", "no MistralForCausalLM was tried with it"),
        (described("DebertaV2Model"), VLLM, "not tried", "no DebertaV2Model was tried with it"),
        # What does not fit is refused all the same.
        (described("DebertaV2Model"), SGLANG, "not tried", "no DebertaV2Model was tried with it"),
        (
            replace(with_grid(bits=3), architecture="DebertaV2Model"),
            SGLANG,
            "no",
            "no DebertaV2Model was tried with it",
        ),
        (described(), VLLM, "yes", "scales are rounded to half precision there"),
        (described(scales="bfloat16"), VLLM, "yes", None),
        # Products of int8 have kernels of their own.
        *((ROUNDED, server, "yes", None) for server in (VLLM, VLLM_CPU)),
        (ROUNDED, GGUF, "no", "it rounds inputs in blocks of its own"),
        (
            with_grid(**W8A8, rounded="per_token"),
            VLLM_CPU,
            "yes",
            "its scale for a token is the largest magnitude over 127, not over 127.5",
        ),
        (PER_TOKEN, VLLM_CPU, "yes", "its kernels leave inputs beside packed weights in float"),
        (PER_TOKEN, VLLM, "yes", "its kernels leave inputs beside packed weights in float, all but Humming's"),
        (PER_TOKEN, TRANSFORMERS, "yes", None),
    ],
)
def test_what_a_server_makes_of_a_model(model: Description, server: Server, answer: str, note: str | None) -> None:
    found = verdict(model, server)
    assert found.answer == answer
    assert note in found.notes if note else found.notes == ()


def test_what_is_known_of_vllm_is_what_was_run() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "served.json").read_text(encoding="utf-8"))
    assert document["servers"]["vllm"] == VLLM.version and document["agree"] == document["asked"]
    runs = document["classes"]
    assert {*VLLM.tried.split()} == {name for name, run in runs.items() if run["serves"]}
    refused = {name for _, classes in VLLM.refused for name in classes.split()}
    assert refused <= {name for name, run in runs.items() if not run["serves"]}
    for case in document["cases"].values():
        served = case["servers"]["torch-kernel"]["serves"]
        # The rules had a word for each case that was run.
        assert case["rules"]["vllm"]["answer"] == ("yes" if served else "no"), case["model"]


# ---- before training


def llama() -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=False))


def moq(serve: list[str], bits: int = 4, **more: Any) -> dict[str, Any]:
    more.setdefault("quantize_group_size", 64)
    return {"quantize_bits": {"start_bits": 8, "target_bits": bits}, "serve": serve, **more}


def test_the_preset_for_language_models_passes() -> None:
    quantize_model(llama(), MoQConfig.load("lm-w4", serve=["transformers", "vllm", "sglang", "llama.cpp"]))


def test_all_reasons_are_one_error() -> None:
    config = moq(["vllm", "sglang", "llama.cpp"], 3, modules_to_not_convert=["lm_head", "q_proj"])
    with pytest.raises(MoQError) as caught:
        quantize_model(llama(), config)
    lines = str(caught.value).splitlines()
    assert lines[0] == "serve: what these servers cannot take"
    assert [line.split(":")[0] for line in lines[1:]] == ["  - vLLM, CUDA 0.32.0"] + 2 * ["  - SGLang 0.5.23"]
    assert lines[1] == (
        "  - vLLM, CUDA 0.32.0: it makes one layer of q_proj, k_proj, v_proj (3 bits in groups of 64 and floats) "
        "(model.layers.*.self_attn.q_proj (2), model.layers.*.self_attn.k_proj (2), model.layers.*.self_attn.v_proj "
        "(2)); all of them quantized alike, or all of them in float, are served"
    )
    assert "its kernels take 4 or 8 bits, not 3" in lines[3]


def test_the_target_counts_and_not_the_start() -> None:
    quantize_model(llama(), {**moq(["sglang"]), "quantize_bits": {"start_bits": 7, "target_bits": 4}})
    with pytest.raises(MoQError, match="not 7"):
        quantize_model(llama(), moq(["sglang"], 7))


def test_conv1d_is_described_by_its_transpose() -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    config = MoQConfig.from_dict(moq(["transformers"], quantize_group_size=32))
    found = delivery.describe(take_inventory(model, config), config, 4).weights["transformer.h.0.attn.c_attn"]
    assert (found.kind, found.shape) == ("conv1d", (96, 32))
    with pytest.raises(MoQError, match="it takes no quantized Conv1D layers"):
        quantize_model(model, moq(["executorch"], quantize_group_size=32))


@pytest.mark.parametrize(
    ("architecture", "server", "reason"),
    [
        ("BertForSequenceClassification", GGUF, "llama.cpp's converter drops the pooler, which this class needs"),
        ("MptForCausalLM", VLLM, "it runs no model of this class, quantized or not"),
        ("T5ForConditionalGeneration", MLX, f"T5ForConditionalGeneration is not exported; {MLX.instead}"),
    ],
)
def test_a_class_that_is_not_served_gets_no_advice_on_its_grid(architecture: str, server: Server, reason: str) -> None:
    weight = WeightSpec("linear", (30, 100), 7, Grid(PerGroup(10), symmetric=False), stored="packed")
    found = verdict(Description(architecture, {"layer": weight}), server)
    assert found.answer == "no" and found.reasons == [reason]
    # Of a class that is served it has some.
    assert verdict(Description("LlamaForCausalLM", {"layer": weight}), server).reasons


def test_convolutions_are_described_by_their_matrices_as_floats() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **sizes))
    bits = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
    for grid in ({**bits, "quantize_group_size": 32}, {"quantize_format": "mxfp4"}):
        config = MoQConfig.from_dict({**grid, "serve": ["transformers"], "quantize_convolutions": True})
        inventory = take_inventory(model, config)
        name = next(name for name in inventory.layers if name.endswith("projection"))
        found = delivery.describe(inventory, config, 4).weights[name]
        assert (found.kind, found.shape, found.row_size) == ("conv", (32, 192), None)
        assert not found.is_served_as_codes and found.format == "int"


def test_the_groups_of_a_table_are_those_of_its_grid() -> None:
    config = {"quantize_format": "nvfp4", "quantize_embeddings": 2, "serve": ["llama.cpp"]}
    words = r"a multiple of 32, not 16 \(model.embed_tokens\); embeddings 8 is served"
    with pytest.raises(MoQError, match=words):
        quantize_model(llama(), config)
    quantize_model(llama(), {**config, "quantize_embeddings": 8})


def test_a_head_that_is_a_table_too_is_described_as_a_table() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True))
    config = moq(["vllm"], quantize_heads=True)
    with pytest.raises(MoQError, match=r"embedding tables must be floats \(model.embed_tokens\)"):
        quantize_model(model, config)
    quantize_model(model, {**config, "serve": ["llama.cpp"]})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_s_names_are_not_the_server_s() -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    config = MoQConfig.from_dict(moq(["vllm"]))
    found = delivery.describe(take_inventory(model, config), config, 4)
    assert found.architecture == "LlamaForCausalLM"
    assert any(name.endswith("model.layers.0.self_attn.q_proj") for name in found.weights)
    assert not any("lora" in name for name in (*found.weights, *found.floats))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_beside_the_model(tmp_path: Path) -> None:
    def adapted(lora: str | None) -> Any:
        model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
        return quantize_model(model, moq(["mlx", "llama.cpp", "vllm"], lora=lora))

    refused = r"mlx-lm by moq-hf export 0.32.2: it takes one model, without adapters beside it; LoRA with"
    with pytest.raises(MoQError, match=refused) as error:
        adapted(None)
    assert "vLLM" not in str(error.value) and "llama.cpp by moq-hf export" in str(error.value)
    model = quantize_model(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])), moq(["vllm"]))
    save_quantized(model, tmp_path / "beside")
    found = {verdict.server: verdict for verdict in served_by(tmp_path / "beside")}
    assert {server for server in SERVERS if "without adapters" in str(found[server].reasons)} == {
        GGUF,
        ONNX,
        EXECUTORCH,
        MLX,
    }
    assert "its own options for them" in str(found[VLLM].notes) and "adapter" not in str(found[TRANSFORMERS].notes)
    for export in ("mlx", "onnx", "float"):
        assert main(["export", str(tmp_path / "beside"), "--to", export, str(tmp_path / export)]) == 2
    save_quantized(adapted("merged"), tmp_path / "merged")
    assert not any("adapters" in str(verdict.reasons) for verdict in served_by(tmp_path / "merged"))


def test_a_stock_trainer_stops_before_the_first_step(tmp_path: Path) -> None:
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    callback = MoQCallback(moq(["vllm"], modules_to_not_convert=["lm_head", "up_proj"]))
    with pytest.raises(MoQError, match="it makes one layer of gate_proj, up_proj"):
        hf.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=data, callbacks=[callback])


def test_what_vllm_lacks_on_the_cpu_is_a_warning() -> None:
    config = MoQConfig.from_dict(moq(["vllm"], 8, activation_quantization={"enabled": True}))
    notes = delivery.notes(take_inventory(llama(), config), config)
    assert any(
        note.startswith("serve: vLLM, CUDA 0.32.0 takes it, but vLLM, CPU 0.32.0 does not: its kernels take 4 bits")
        for note in notes
    )
    # They are trained in half precision, unless the config says otherwise.
    assert not any("scales are rounded to half precision there" in note for note in notes)
    algo = {"quantize_algo": {"scale_dtype": "float32"}}
    config = MoQConfig.from_dict(moq(["vllm"], **algo))
    notes = delivery.notes(take_inventory(llama(), config), config)
    assert any("scales are rounded to half precision there" in note for note in notes)
    assert delivery.notes(take_inventory(llama(), config), MoQConfig.from_dict(moq(["transformers"]))) == []


def test_fused_layers_drop_together() -> None:
    # So whatever a run ends with, they have the same bits.
    inventory = Inventory.of(llama())
    blocks = inventory.blocks(inventory.linears)
    assert {block.count(".") for block in blocks if block != "lm_head"} == {2} and len(blocks) == 3


def test_words_of_the_config() -> None:
    assert MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}}).serve == ("transformers",)
    config = MoQConfig.from_dict(moq(["vllm", "llama.cpp"]))
    assert MoQConfig.from_dict(config.to_dict()) == config and config.to_dict()["serve"] == ["vllm", "llama.cpp"]
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.from_dict(moq(["vlm"]))
    assert str(caught.value) == (
        'MoQ config: serve: ["vlm"] is not legal; it must be a list of "transformers" or "vllm" or "sglang" or '
        '"llama.cpp" or "onnxruntime" or "executorch" or "mlx" (did you mean "vllm"?)'
    )
    assert set(NAMED) <= {server.key for server in SERVERS}


@pytest.mark.parametrize(
    ("serve", "dtype", "scales"),
    [
        ("vllm", "float32", "bfloat16"),
        ("vllm", "float16", "float16"),
        ("llama.cpp", "float32", "float16"),
        ("mlx", "float32", "float16"),
        ("mlx", "bfloat16", "bfloat16"),
        ("transformers", "bfloat16", "float32"),
    ],
)
def test_scales_are_trained_in_the_dtype_that_the_server_loads(serve: str, dtype: str, scales: str) -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_group_size": 32, "serve": [serve]}
    model = quantize_model(llama().to(getattr(torch, dtype)), config)
    layers = quant_layers(model).values()
    assert {layer.moq.grid.scale_dtype for layer in layers} == {scales}
    for layer in layers:
        stored = quantizer.quantize(
            to_rows(layer.float_weight, layer.kind), 4, layer.moq.grid, ratio=layer.moq.ratio
        ).scale
        assert torch.equal(stored.to(getattr(torch, scales)).float(), stored)


def test_fused_layers_must_round_their_inputs_alike() -> None:
    overrides = {"*.q_proj": {"activations": {"symmetric": True}}}
    config = {"bits": 8, "activations": {"symmetric": False}, "overrides": overrides}
    with pytest.raises(
        MoQError, match=r"one layer of q_proj, k_proj, v_proj \(.*inputs of 8 bits static, asymmetric\)"
    ):
        take_inventory(llama(), MoQConfig.from_dict({**config, "serve": ["vllm"]}))
    overrides = {f"*.{name}_proj": {"activations": {"symmetric": True}} for name in "qkv"}
    take_inventory(llama(), MoQConfig.from_dict({**config, "overrides": overrides, "serve": ["vllm"]}))


def test_experts_are_asked_about_one_by_one() -> None:
    def mixture() -> hf.MixtralForCausalLM:
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False))

    config = MoQConfig.from_dict(moq(["vllm", "sglang", "llama.cpp"]))
    found = delivery.describe(take_inventory(mixture(), config), config, 4)
    weight = found.weights["model.layers.1.mlp.experts.3.gate_up_proj"]
    assert (weight.shape, weight.as_served) == ((512, 128), "4 bits in groups of 64")
    assert not any("proj" in name and "experts" in name for name in found.floats)
    assert sum(".experts." in name for name in found.weights) == 16
    with pytest.raises(MoQError, match=r"looks for each expert by its own name .*gate_up_proj"):
        quantize_model(mixture(), moq(["vllm"], modules_to_not_convert=["experts", "lm_head"]))
    with pytest.raises(MoQError, match=r"no place for experts that are one tensor in the files .*gate_up_proj"):
        quantize_model(mixture(), moq(["llama.cpp"], quantize_type="asymmetric"))


# ---- a folder


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
    expected = dict.fromkeys(found, "yes") | {"sglang": "not tried", "executorch": "no"}
    assert answers(found) == expected
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("served by\n")[2].splitlines()
    # SGLang has two notes.
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == [
        "transformers 5.23.0",
        "vLLM, CUDA 0.32.0",
        "vLLM, CPU 0.32.0",
        "SGLang 0.5.23",
        "llama.cpp by moq-hf export gguf 0.19.0",
        "ONNX Runtime by moq-hf export 1.31.1",
        "ExecuTorch by examples/executorch 1.5.1",
        "mlx-lm by moq-hf export 0.32.2",
    ]
    assert lines[1].split("  ")[-1].strip() == "scales are rounded to half precision there"


def test_a_left_out_layer_is_seen_in_the_files(tmp_path: Path) -> None:
    found = written(tmp_path, llama(), modules_to_not_convert=["lm_head", "gate_proj"])
    assert "it makes one layer of gate_proj, up_proj" in str(found["vllm"].reasons[0])
    assert answers(found)["llama.cpp"] == "yes"


def test_a_damaged_config_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    written(tmp_path, llama())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "architectures": 3}), encoding="utf-8")
    with pytest.raises(MoQError, match=r"config\.json: architectures must be"):
        served_by(tmp_path)


# ---- the page

HEAD = "| server | version | bits | with zero points | groups | columns | rows |"


def row(server: Server) -> str:
    any_of = ["-" if size == 1 else f"multiples of {size}" for size in (server.multiple, server.columns, server.rows)]
    groups = ", ".join(map(str, server.groups)) or any_of[0]
    bits = [", ".join(map(str, sorted(legal))) or "-" for legal in (server.symmetric, server.asymmetric)]
    bits = [re.sub(r"^(\d+), .* (\d+)$", r"\1 to \2", text) if text.count(",") > 3 else text for text in bits]
    return f"| {' | '.join([server.title, server.version, *bits, groups, *any_of[1:]])} |"


def test_the_page_has_the_servers() -> None:
    page = (ROOT / "docs" / "reference" / "support.md").read_text(encoding="utf-8")
    table = [HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |", *map(row, SERVERS)]
    assert "\n".join(["<!-- servers -->", *table, "<!-- end of servers -->"]) in page


def test_rows_are_sound() -> None:
    assert len({server.key for server in SERVERS}) == len(SERVERS) and all(server.version for server in SERVERS)
    # A legal group fits the multiple as well.
    assert all(size % server.multiple == 0 for server in SERVERS for size in server.groups)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_who_takes_codes_that_are_floats(name: Format) -> None:
    size = FP4[name].group_size
    weights = {"model.layers.0.mlp.down_proj": weight_of(shape=(64, 96), size=size, format=name)}
    model = Description("LlamaForCausalLM", weights, scales="bfloat16")
    answers = {server.key: verdict(model, server) for server in SERVERS}
    taken = {key for key, found in answers.items() if not found.reasons}
    assert taken == {"transformers", "vllm", "onnxruntime"} | ({"llama.cpp"} if name == "mxfp4" else set())
    assert f"it does not take {name}" in answers["sglang"].reasons[0]
    if name == "nvfp4":
        # Four groups are a block.
        assert "a multiple of 64 columns (in_features), not 96" in answers["llama.cpp"].reasons[0]
    alike = {"shape": (64, 64), "size": size}
    siblings = {
        "model.layers.0.self_attn.q_proj": weight_of(**alike, format=name),
        "model.layers.0.self_attn.k_proj": weight_of(**alike),
    }
    assert f"(4 bits in groups of {size} and {name})" in str(verdict(replace(model, weights=siblings), VLLM).reasons)
