"""Each rule with a model that passes and one that does not."""

from dataclasses import replace
from typing import Any

import pytest

from moq_hf.schedule import FLOAT_BITS
from moq_hf.serving.description import Description, Weight, shortened
from moq_hf.serving.rules import verdict
from moq_hf.serving.servers import CONVERTER, GGUF, ONNX, SERVERS, SGLANG, TRANSFORMERS, VLLM, VLLM_CPU, Server

WEIGHT = Weight("linear", 256, 256, 4, 128)
ATTENTION = "model.layers.0.self_attn"


def described(architecture: str = "LlamaForCausalLM", **more: Any) -> Description:
    weights = {f"{ATTENTION}.{name}": WEIGHT for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return Description(architecture, weights, floats=["model.embed_tokens", "lm_head"], **more)


def with_grid(**changes: Any) -> Description:
    model = described()
    return replace(model, weights={name: replace(weight, **changes) for name, weight in model.weights.items()})


def with_layer(name: str, weight: Weight, architecture: str = "LlamaForCausalLM") -> Description:
    model = described(architecture)
    return replace(model, weights={**model.weights, name: weight})


def reasons(model: Description, server: Server) -> str:
    return " | ".join(map(str, verdict(model, server).reasons))


@pytest.mark.parametrize("server", [server for server in SERVERS if server is not ONNX])
def test_the_common_grid_is_served(server: Server) -> None:
    found = verdict(described(), server)
    assert (found.answer, found.reasons) == ("yes", ())


@pytest.mark.parametrize(
    ("bits", "symmetric", "servers"),
    [
        (1, True, {TRANSFORMERS, GGUF}),
        (2, True, {TRANSFORMERS, VLLM, GGUF, CONVERTER}),
        (3, True, {TRANSFORMERS, VLLM, GGUF}),
        (4, True, {TRANSFORMERS, VLLM, VLLM_CPU, SGLANG, GGUF, CONVERTER}),
        (6, True, {TRANSFORMERS, VLLM, GGUF}),
        (8, True, {TRANSFORMERS, VLLM, SGLANG, GGUF, CONVERTER}),
        (4, False, {TRANSFORMERS, VLLM, VLLM_CPU, SGLANG, GGUF, CONVERTER}),
        (3, False, {TRANSFORMERS, VLLM, GGUF}),
        (8, False, {TRANSFORMERS, VLLM, CONVERTER}),
    ],
)
def test_bits(bits: int, symmetric: bool, servers: set[Server]) -> None:
    model = with_grid(bits=bits, symmetric=symmetric)
    assert {server.key for server in SERVERS if verdict(model, server).answer == "yes"} == {s.key for s in servers}


def test_a_reason_says_what_is_served() -> None:
    assert reasons(with_grid(bits=3), SGLANG) == (
        "its kernels take 4 or 8 bits, not 3 (model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, "
        "model.layers.0.self_attn.v_proj and 1 more); 4 or 8 bits are served"
    )


@pytest.mark.parametrize(
    ("size", "refused"),
    [
        (8, {VLLM, SGLANG, GGUF}),
        (16, {SGLANG, GGUF}),
        (32, set()),
        (256, {SGLANG}),
        (None, {CONVERTER}),
    ],
)
def test_groups(size: int | None, refused: set[Server]) -> None:
    model = with_grid(group_size=size)
    assert {s.key for s in SERVERS if s is not ONNX and verdict(model, s).reasons} == {s.key for s in refused}


def test_columns_and_rows() -> None:
    name = "model.layers.0.mlp.down_proj"
    for columns, refused in ((4096, set()), (4128, {"sglang"}), (4112, {"vllm-cpu", "sglang", "llama.cpp"})):
        model = with_layer(name, Weight("linear", 256, columns, 4))
        found = {s.key for s in (VLLM, VLLM_CPU, SGLANG, GGUF) if "(in_features)" in reasons(model, s)}
        assert found == refused, columns
    for rows, refused in ((256, set()), (288, {"sglang"}), (264, {"vllm-cpu", "sglang"})):
        model = with_layer(name, Weight("linear", rows, 256, 4, 128))
        found = {s.key for s in (VLLM, VLLM_CPU, SGLANG, GGUF) if "(out_features)" in reasons(model, s)}
        assert found == refused, rows


def test_gguf_has_blocks_for_whole_rows_alone() -> None:
    name = "backbone.layers.0.mixer.conv1d"
    convolution = Weight("conv", 64, 4, 4, packed=False)
    assert f"a block has 32 columns, which do not divide those of these tables and convolutions ({name})" in reasons(
        with_layer(name, convolution), GGUF
    )
    table = with_layer("model.embed_tokens", Weight("embedding", 64, 48, 8))
    assert "a block has 32 columns" in reasons(table, GGUF)
    for fine in (replace(convolution, bits=FLOAT_BITS), replace(convolution, columns=64)):
        assert reasons(with_layer(name, fine), GGUF) == ""


def test_gguf_has_rows_of_q_k_and_v_in_another_order() -> None:
    model = with_layer("transformer.h.0.self_attention.query_key_value", Weight("linear", 384, 128, 4, 32))
    assert reasons(model, GGUF) == ""
    for architecture in ("BloomForCausalLM", "GPTNeoXForCausalLM"):
        assert "rows of this layer in another order" in reasons(replace(model, architecture=architecture), GGUF)


def test_rows_of_a_fused_layer_count_together() -> None:
    model = described()
    rows = {"q_proj": 256, "k_proj": 24, "v_proj": 40}
    weights = {f"{ATTENTION}.{name}": replace(WEIGHT, rows=count) for name, count in rows.items()}
    assert reasons(replace(model, weights=weights), VLLM_CPU) == ""
    weights[f"{ATTENTION}.v_proj"] = replace(WEIGHT, rows=48)
    assert "(out_features)" in reasons(replace(model, weights=weights), VLLM_CPU)


def test_zero_points_fill_words() -> None:
    weights = {f"{ATTENTION}.{name}": replace(WEIGHT, symmetric=False) for name in ("q_proj", "k_proj", "v_proj")}
    model = replace(described(), weights=weights)
    assert reasons(model, VLLM) == ""
    short = replace(model, weights={**weights, f"{ATTENTION}.k_proj": replace(WEIGHT, symmetric=False, rows=4)})
    assert f"must fill whole words of 32 bits ({ATTENTION}.k_proj)" in reasons(short, VLLM)
    assert reasons(short, GGUF) == ""


@pytest.mark.parametrize("server", [VLLM, VLLM_CPU, SGLANG])
def test_fused_layers_have_one_grid(server: Server) -> None:
    name = f"{ATTENTION}.q_proj"
    other = with_layer(name, replace(WEIGHT, group_size=64))
    assert "one layer of q_proj, k_proj, v_proj (4 bits in groups of 128 and 4 bits in groups of 64)" in reasons(
        other, server
    )
    model = described()
    left = {layer: weight for layer, weight in model.weights.items() if layer != name}
    left_out = replace(model, weights=left, floats=[*model.floats, name])
    assert "(4 bits in groups of 128 and floats)" in reasons(left_out, server)
    assert reasons(replace(model, weights={f"{ATTENTION}.o_proj": WEIGHT}, floats=list(model.weights)), server) == ""
    for free in (GGUF, CONVERTER):
        assert reasons(left_out, free) == ""


def test_a_dense_grid_counts_as_floats_beside_the_others() -> None:
    model = with_layer(f"{ATTENTION}.q_proj", replace(WEIGHT, bits=12, packed=False))
    assert "and floats" in reasons(model, VLLM)
    assert "no block holds more than 8 bits" in reasons(model, GGUF)


def test_other_bits_in_another_layer() -> None:
    model = with_layer("model.layers.1.mlp.down_proj", replace(WEIGHT, bits=8))
    assert not reasons(model, VLLM) and not reasons(model, SGLANG) and not reasons(model, GGUF)
    assert "one grid for all layers, not 4 bits in groups of 128 and 8 bits in groups of 128" in reasons(
        model, CONVERTER
    )


def test_tables_and_heads() -> None:
    table = with_layer("model.embed_tokens", Weight("embedding", 512, 256, 8, packed=False))
    for server in (VLLM, VLLM_CPU, SGLANG, CONVERTER):
        assert "embedding tables must be floats (model.embed_tokens)" in reasons(table, server)
    assert not reasons(table, GGUF) and not reasons(table, TRANSFORMERS)
    head = with_layer("lm_head", replace(WEIGHT, rows=512))
    assert not reasons(head, VLLM) and not reasons(head, SGLANG)


def test_poolers_and_classifiers() -> None:
    for name in ("bert.pooler.dense", "classifier", "head.dense", "classifier.out_proj"):
        assert f"it makes these layers in float, whatever the checkpoint holds ({name})" in reasons(
            with_layer(name, WEIGHT), VLLM
        )
    # The pooler of a base model is not loaded.
    assert reasons(with_layer("pooler.dense", WEIGHT, "BertModel"), VLLM) == ""
    assert "drops the pooler (pooler.dense)" in reasons(with_layer("pooler.dense", WEIGHT, "BertModel"), GGUF)
    assert reasons(described("BertModel"), GGUF) == ""
    assert "which this classifier needs" in reasons(described("BertForSequenceClassification"), GGUF)


def test_conv1d() -> None:
    model = with_layer("transformer.h.0.attn.c_attn", replace(WEIGHT, kind="conv1d"))
    for server in (VLLM, SGLANG, CONVERTER, ONNX):
        assert "Conv1D" in reasons(model, server)
    assert not reasons(model, GGUF)


def test_experts_are_alike_and_called_by_their_own_names() -> None:
    experts = [f"model.layers.0.block_sparse_moe.experts.{index}.w1" for index in range(2)]
    model = described("MixtralForCausalLM")
    alike = replace(model, weights={**model.weights, **dict.fromkeys(experts, WEIGHT)})
    assert reasons(alike, VLLM) == "" and "needs AMX and was not tried" in reasons(alike, VLLM_CPU)
    other = replace(alike, weights={**alike.weights, experts[1]: replace(WEIGHT, bits=8)})
    assert "all experts of a block must have one grid" in reasons(other, VLLM)
    fused = replace(model, tensors=["model.layers.0.mlp.experts.gate_up_proj"])
    assert "it looks for each expert by its own name" in reasons(fused, VLLM)
    assert reasons(replace(fused, architecture="GptOssForCausalLM"), VLLM) == ""


def test_kinds_of_models_for_onnx() -> None:
    for name in ("BertForSequenceClassification", "BertForTokenClassification", "BertModel"):
        assert verdict(described(name), ONNX).answer == "yes"
    assert "LlamaForCausalLM is not exported" in reasons(described(), ONNX)
    assert "a decoder beside an encoder" in reasons(described("BartModel", is_encoder_decoder=True), ONNX)


def test_a_class_without_rules_is_unknown() -> None:
    found = verdict(described("DebertaV2ForSequenceClassification"), VLLM)
    assert found.answer == "unknown" and "no model of its own for DebertaV2ForSequenceClassification" in found.notes[0]
    # A classifier or a base model of a causal model is made from that.
    for name in ("Qwen3ForSequenceClassification", "Qwen3Model", "Gemma3TextModel"):
        assert verdict(described(name), VLLM).answer == "yes"


def test_what_was_proven_counts_for_transformers() -> None:
    assert "it does not answer as the model did: logits differ" in reasons(
        described(unserved="logits differ"), TRANSFORMERS
    )


def test_scales_in_half_precision() -> None:
    for model, rounded in ((described(), True), (described(scales="bfloat16"), False)):
        assert any("half precision" in note for note in verdict(model, VLLM).notes) == rounded


def quantized(targets: list[str], ignore: Any = (), **group: Any) -> dict[str, Any]:
    scheme = {"targets": targets, "format": "pack-quantized", "weights": {"strategy": "group"}, **group}
    return {"config_groups": {"group_0": scheme}, "format": "pack-quantized", "ignore": list(ignore)}


@pytest.mark.parametrize("server", [VLLM, SGLANG])
def test_layouts_of_folders(server: Server) -> None:
    targets = [r"re:.*self_attn\.[qkvo]_proj$"]
    assert reasons(described(quantization=quantized(targets, ["re:.*lm_head$"])), server) == ""
    old = described(quantization=quantized(targets, weights={"strategy": "block"}))
    assert "the strategies channel and group, not block; save it again" in reasons(old, server)
    mixed = described(quantization=quantized(targets, format="int-quantized"))
    assert "the format pack-quantized, not int-quantized" in reasons(mixed, server)
    ignored = described(quantization=quantized(targets, [r"re:.*o_proj"]))
    assert f"ignore matches packed layers ({ATTENTION}.o_proj)" in reasons(ignored, server)


@pytest.mark.parametrize("server", [VLLM, SGLANG])
def test_targets_match_by_the_server_s_names(server: Server) -> None:
    name = "bert.encoder.layer.0.attention.self.query"
    model = Description("BertModel", {name: WEIGHT})
    assert reasons(model, server) == ""
    exact = replace(model, quantization=quantized([name]))
    assert "no target matches its names, such as" in reasons(exact, server)
    own = "query" if server is VLLM else "qkv_proj"
    assert f"attention.output.{own}" in reasons(exact, server)
    for target in (rf"re:.*layer\.0\.attention\.(self|output)\.{own}$", "Linear"):
        assert reasons(replace(model, quantization=quantized([target])), server) == ""


def test_names_are_shortened() -> None:
    layers = [f"layers.{index}.{name}" for index in range(3) for name in "abcd"]
    assert shortened(layers) == "layers.*.a (3), layers.*.b (3), layers.*.c (3) and 1 more"
