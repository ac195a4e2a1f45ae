"""Which servers take which packed folders: our rules, asked beside the servers themselves.

    python benchmarks/served.py make FOLDER                 # in moq_hf's environment: folders and reference answers
    VLLM/bin/python benchmarks/served.py serve FOLDER       # where requirements-vllm.txt is installed: real answers
    python benchmarks/served.py report FOLDER               # in moq_hf's environment: rules against servers

Tiny models with random weights, one for each case. `serve` generates 16 tokens with vLLM on the CPU in bfloat16,
greedy, with log-probabilities, or pools the outputs of an encoder. Where its kernels for the CPU lack a width, it
does the same with a plain one in PyTorch: what answers rightly is laid out as vLLM reads it. It also asks vLLM's CUDA
kernels and schemes whether they accept each layer, which needs no GPU. With `--sglang DIR`, an unpacked wheel, it
asks SGLang's code that matches names. Cases that were tried already are left out, unless they are named.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PROMPT = [1, 5, 17, 99, 230, 411, 8, 64]
TOKENS = 16
RESULTS = Path(__file__).parent / "results" / "served.json"

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
BERT = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "num_labels": 3,
}
GPT2 = {"vocab_size": 512, "n_positions": 256, "n_embd": 256, "n_layer": 2, "n_head": 4}
WINDOW = {"local_attention": 128, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
TIED = {**LLAMA, "tie_word_embeddings": True}
EXPERTS = {**LLAMA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MAMBA = {
    **LLAMA,
    "state_size": 16,
    "time_step_rank": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 32,
}
MAMBA2 = {
    **MAMBA,
    "mamba_n_heads": 32,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 512,
    "attn_layer_indices": [1],
}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
# By the class of the model: the sizes of its config.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": {**LLAMA, "head_dim": 64},
    "Gemma3ForCausalLM": {**LLAMA, "head_dim": 64, "tie_word_embeddings": True},
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "GPT2LMHeadModel": GPT2,
    "BertModel": BERT,
    "BertForSequenceClassification": BERT,
    "BertForTokenClassification": BERT,
    "ModernBertModel": {**BERT, **WINDOW},
    "ModernBertForSequenceClassification": {**BERT, **WINDOW},
}
# Classes that are asked about by one case each, on the grid of `b4_g32` in bfloat16. Not here: DeepSeek-V2 and
# GPT-NeoX, with whose floats vLLM 0.32.0 answers something else on a CPU too.
CLASSES: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": LLAMA,
    "ArceeForCausalLM": LLAMA,
    "BambaForCausalLM": MAMBA2,
    "BloomForCausalLM": {**TIED, "n_layer": 2, "n_head": 4},
    "Cohere2ForCausalLM": TIED,
    "CohereForCausalLM": TIED,
    "Ernie4_5ForCausalLM": {**LLAMA, "head_dim": 64},
    "Exaone4ForCausalLM": {**LLAMA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
    "FalconH1ForCausalLM": MAMBA2,
    "FalconMambaForCausalLM": MAMBA,
    "Gemma2ForCausalLM": {**TIED, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128},
    "GemmaForCausalLM": {**TIED, "head_dim": 64},
    "Glm4ForCausalLM": {**LLAMA, "head_dim": 64},
    "GlmForCausalLM": {**LLAMA, "head_dim": 64},
    "GPTBigCodeForCausalLM": GPT2,
    "GPTJForCausalLM": {**GPT2, "rotary_dim": 32},
    "GraniteForCausalLM": LLAMA,
    "GraniteMoeForCausalLM": EXPERTS,
    "HeliumForCausalLM": {**LLAMA, "head_dim": 64},
    "JambaForCausalLM": {**MAMBA, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {**LLAMA, "block_ff_dim": 512, "layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {**MAMBA, "num_heads": 32, "head_dim": 16, "n_groups": 1},
    "MambaForCausalLM": MAMBA,
    "MiniCPM3ForCausalLM": {**LLAMA, **LATENT, "num_key_value_heads": 4},
    "MistralForCausalLM": {**LLAMA, "head_dim": 64},
    "MptForCausalLM": {"d_model": 256, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "max_seq_len": 256},
    "NemotronForCausalLM": LLAMA,
    "Olmo2ForCausalLM": LLAMA,
    "Olmo3ForCausalLM": {**LLAMA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
    "OlmoForCausalLM": LLAMA,
    "OlmoeForCausalLM": EXPERTS,
    "OPTForCausalLM": {**LLAMA, "ffn_dim": 512, "word_embed_proj_dim": 256},
    "Phi3ForCausalLM": LLAMA,
    "PhiForCausalLM": {**LLAMA, "num_key_value_heads": 4},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 256},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 64},
    "SeedOssForCausalLM": {**LLAMA, "head_dim": 64},
    "SmolLM3ForCausalLM": LLAMA,
    "StableLmForCausalLM": LLAMA,
    "Starcoder2ForCausalLM": LLAMA,
    "RobertaModel": BERT,
    "RobertaForSequenceClassification": BERT,
    "XLMRobertaModel": BERT,
    "XLMRobertaForSequenceClassification": BERT,
    "ModernBertForTokenClassification": {**BERT, **WINDOW},
    "DistilBertForSequenceClassification": {
        "vocab_size": 512,
        "dim": 256,
        "hidden_dim": 512,
        "n_layers": 2,
        "n_heads": 4,
    },
    "LlamaForSequenceClassification": {**LLAMA, "num_labels": 3},
    "Qwen2ForSequenceClassification": {**LLAMA, "num_labels": 3},
    "Qwen3ForSequenceClassification": {**LLAMA, "head_dim": 64, "num_labels": 3},
}
MODELS |= CLASSES
# Layers for which their class is refused: with these in float it is served.
IN_FLOAT = {
    "BloomForCausalLM": ["query_key_value"],
    "FalconH1ForCausalLM": ["in_proj", "out_proj"],
    "MiniCPM3ForCausalLM": ["q_a_proj"],
}


def bits(width: int, **config: Any) -> dict[str, Any]:
    """A config that quantizes to so many bits at once, in groups of 128 unless it says otherwise."""
    grouped = {} if {"quantize_groups", "quantize_group_size"} & config.keys() else {"quantize_group_size": 128}
    return {"quantize_bits": {"start_bits": width, "target_bits": width}, **grouped, **config}


ASYMMETRIC = {"quantize_algo": {"q_type": "asymmetric"}}
CHANNEL = {"quantize_groups": "per_channel"}
# Config, model, changes of its sizes, and what stands out: layers by part of their names with other bits, or a dtype.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    name: (config, model, sizes, more)
    for name, config, model, sizes, more in [
        ("b4_g16", bits(4, quantize_group_size=16), "LlamaForCausalLM", {}, {}),
        ("b4_g32", bits(4, quantize_group_size=32), "LlamaForCausalLM", {}, {}),
        ("b4_g64", bits(4, quantize_group_size=64), "LlamaForCausalLM", {}, {}),
        ("b4_g128", bits(4), "LlamaForCausalLM", {}, {}),
        ("b4_channel", bits(4, **CHANNEL), "LlamaForCausalLM", {}, {}),
        ("b4_default", bits(4, quantize_groups=1), "LlamaForCausalLM", {}, {}),
        ("b4_rows8", bits(4, quantize_groups=8), "LlamaForCausalLM", {}, {}),
        ("b8_rows8", bits(8, quantize_groups=8), "LlamaForCausalLM", {}, {}),
        ("b4_g128_asymmetric", bits(4, **ASYMMETRIC), "LlamaForCausalLM", {}, {}),
        ("b4_rows8_asymmetric", bits(4, quantize_groups=8, **ASYMMETRIC), "LlamaForCausalLM", {}, {}),
        ("b8_g128_asymmetric", bits(8, **ASYMMETRIC), "LlamaForCausalLM", {}, {}),
        ("b1_channel", bits(1, **CHANNEL), "LlamaForCausalLM", {}, {}),
        ("b2_g128", bits(2), "LlamaForCausalLM", {}, {}),
        ("b3_g128", bits(3), "LlamaForCausalLM", {}, {}),
        ("b5_g128", bits(5), "LlamaForCausalLM", {}, {}),
        ("b6_g128", bits(6), "LlamaForCausalLM", {}, {}),
        ("b8_g128", bits(8), "LlamaForCausalLM", {}, {}),
        ("b8_channel", bits(8, **CHANNEL), "LlamaForCausalLM", {}, {}),
        ("b12_g128", bits(12), "LlamaForCausalLM", {}, {}),
        ("embeddings", bits(4, quantize_embeddings=8), "LlamaForCausalLM", {}, {}),
        ("head", bits(4, quantize_heads=True), "LlamaForCausalLM", {}, {}),
        ("tied", bits(4), "LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
        ("bfloat16", bits(4), "LlamaForCausalLM", {}, {"dtype": "bfloat16"}),
        ("blocks_4_8", bits(4), "LlamaForCausalLM", {}, {"bits": {".layers.1.": 8}}),
        ("blocks_4_3", bits(4), "LlamaForCausalLM", {}, {"bits": {".layers.1.": 3}}),
        ("q_8_others_4", bits(4), "LlamaForCausalLM", {}, {"bits": {"q_proj": 8}}),
        ("without_mlp", bits(4, modules_to_not_convert=["lm_head", "layers.1.mlp"]), "LlamaForCausalLM", {}, {}),
        ("without_q", bits(4, modules_to_not_convert=["lm_head", "q_proj"]), "LlamaForCausalLM", {}, {}),
        ("without_up", bits(4, modules_to_not_convert=["lm_head", "up_proj"]), "LlamaForCausalLM", {}, {}),
        ("odd_columns", bits(4, **CHANNEL), "LlamaForCausalLM", {"intermediate_size": 528}, {}),
        ("qwen2", bits(4), "Qwen2ForCausalLM", {}, {}),
        ("qwen2_tied", bits(4), "Qwen2ForCausalLM", {"tie_word_embeddings": True}, {}),
        ("qwen3", bits(4), "Qwen3ForCausalLM", {}, {}),
        ("gemma3", bits(4), "Gemma3ForCausalLM", {}, {}),
        ("mixtral", bits(4), "MixtralForCausalLM", {}, {}),
        ("gpt2", bits(4, **CHANNEL), "GPT2LMHeadModel", {}, {}),
        ("bert", bits(4), "BertModel", {}, {}),
        ("bert_without_pooler", bits(4, modules_to_not_convert=["pooler"]), "BertModel", {}, {}),
        (
            "bert_sequence",
            bits(4, modules_to_not_convert=["pooler", "classifier"]),
            "BertForSequenceClassification",
            {},
            {},
        ),
        ("bert_token", bits(4), "BertForTokenClassification", {}, {}),
        ("modernbert", bits(4), "ModernBertModel", {}, {}),
        ("modernbert_sequence", bits(4), "ModernBertForSequenceClassification", {}, {}),
        *((name, bits(4, quantize_group_size=32), name, {}, {"dtype": "bfloat16"}) for name in CLASSES),
        *(
            (
                f"{name}_in_float",
                bits(4, quantize_group_size=32, modules_to_not_convert=parts),
                name,
                {},
                {"dtype": "bfloat16"},
            )
            for name, parts in IN_FLOAT.items()
        ),
    ]
}


def make(folder: Path, names: list[str]) -> None:
    """Write the folder of each case, and what plain transformers answers with it."""
    for name in names:
        if (folder / name / "reference.json").exists():
            continue
        try:
            _make(folder / name, *CASES[name])
            print(name, flush=True)
        except Exception as error:
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_json({"error": f"{type(error).__name__}: {error}"}, folder / name / "reference.json")
            print(name, type(error).__name__, error, flush=True)


def _make(folder: Path, config: dict[str, Any], kind: str, sizes: dict[str, Any], more: dict[str, Any]) -> None:
    import torch
    import transformers

    from moq_hf import MoQConfig, quantize_model, save_quantized
    from moq_hf.model.convert import quant_layers

    transformers.set_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**{**MODELS[kind], **sizes})).eval()
    # Larger weights make logits with clear differences.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.to(getattr(torch, more.get("dtype", "float32")))
    checked = MoQConfig.from_dict(config)
    quantize_model(model, checked)
    for part, width in more.get("bits", {}).items():
        for name, layer in quant_layers(model).items():
            if part in name:
                layer.set_bits(width)
    save_quantized(model, folder)
    _tokenizer().save_pretrained(folder)
    exact = _answers(cls, folder, "float32")
    rounded = _answers(cls, folder, "bfloat16", exact.get("tokens"))
    write_json({"class": kind, "float32": exact, "bfloat16": rounded}, folder / "reference.json")


def _tokenizer() -> Any:
    """One word for each token: vLLM pools with a tokenizer alone."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(512)}, unk_token="w3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w3", pad_token="w0", cls_token="w1", sep_token="w2"
    )


def _answers(cls: Any, folder: Path, dtype: str, followed: list[int] | None = None) -> dict[str, Any]:
    """What plain transformers answers in a dtype: tokens and the log-probabilities of `followed`, or outputs.

    Tokens of a model with random weights part soon, since its best two are often close. So log-probabilities are
    compared along the same tokens: those that float32 chose.
    """
    import torch

    from moq_hf import dequantize_model
    from moq_hf.model.inventory import is_packed

    model = cls.from_pretrained(folder)
    # Before the dtype changes: the packed layers' scales are float32.
    if is_packed(model):
        dequantize_model(model)
    model = model.to(getattr(torch, dtype)).eval()
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        output = model(prompt)
        if hasattr(output, "logits") and model.can_generate():
            made = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            chosen = made[0, len(PROMPT) :].tolist()
            followed = followed or chosen
            logits = model(torch.tensor([PROMPT + followed])).logits[0, len(PROMPT) - 1 : -1].float()
            along = torch.log_softmax(logits, -1).gather(1, torch.tensor(followed)[:, None])[:, 0]
            return {"tokens": chosen, "logprobs": along.tolist()}
    outputs = output.logits[0] if hasattr(output, "logits") else output.last_hidden_state[0]
    return {"outputs": outputs.float().tolist()}


def report(folder: Path, names: list[str], out: Path) -> None:
    """Ask our rules about each folder, and write what servers and rules say side by side."""
    from environment import environment, write

    from moq_hf.packed.state import served_by

    cases: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for name in names:
        reference, served = folder / name / "reference.json", folder / name / "served.json"
        if not reference.exists() or not served.exists():
            continue
        found = json.loads(served.read_text(encoding="utf-8"))
        if "error" in json.loads(reference.read_text(encoding="utf-8")):
            continue
        rules = {
            one.server.key: {"answer": one.answer, "reasons": [*map(str, one.reasons)], "notes": list(one.notes)}
            for one in served_by(folder / name)
        }
        cases[name] = {"config": CASES[name][0], "model": CASES[name][1], "rules": rules, "servers": found["servers"]}
        cases[name]["agree"] = {
            key: rules[key]["answer"] == ("yes" if server["serves"] else "no")
            for key, server in found["servers"].items()
            if key in rules and rules[key]["answer"] != "not tried" and server["serves"] is not None
        }
        wrong = [key for key, agree in cases[name]["agree"].items() if not agree]
        said = {key: server["serves"] for key, server in found["servers"].items()}
        print(name, said, f"WRONG: {', '.join(wrong)}" if wrong else "")
        versions = found["versions"]
    classes: dict[str, Any] = {}
    for name, case in cases.items():
        ran = case["servers"]["torch-kernel"]
        if not classes.get(case["model"], {}).get("serves"):
            kept = ("serves", "same_tokens_bfloat16", "largest_difference_bfloat16", "why")
            classes[case["model"]] = {"case": name, **{key: ran[key] for key in kept if key in ran}}
    agreements = [agree for case in cases.values() for agree in case["agree"].values()]
    document = {**environment("compressed_tensors"), "servers": versions, "classes": classes, "cases": cases}
    write({**document, "agree": sum(agreements), "asked": len(agreements)}, out)
    print(f"{sum(agreements)} of {len(agreements)} answers agree; {out}")


def write_json(document: Any, path: Path) -> None:
    """Write JSON."""
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Read the command line and do one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "serve", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked wheel of SGLang, to read")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json", help="of report")
    parser.add_argument("--quick", action="store_true", help="serve: keep what was generated, ask the others again")
    args = parser.parse_args(argv)
    names = args.cases or list(CASES)
    if args.step == "make":
        make(args.folder, names)
    elif args.step == "report":
        report(args.folder, names, args.out)
    else:
        import served_vllm

        again = args.cases is not None
        served_vllm.serve([args.folder / name for name in names], args.sglang, PROMPT, TOKENS, again, args.quick)


if __name__ == "__main__":
    sys.exit(main())
