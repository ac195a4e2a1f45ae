"""What moq_hf and a library beside it do together, in the environment of the Python that runs this.

    python -P benchmarks/neighbor_uses.py basics trl peft

`versions.py neighbors` makes the environments, with the wheel in them, and runs this there; -P keeps the checkout out.
Each use prints a line `RESULT` and JSON: what was tried, and what came of it.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# vLLM's main process runs the model itself, with a small cache; nobody is asked for anything.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
}

import torch
import transformers as hf
from model_zoo import Stranger

import moq_hf
from moq_hf import MoQCallback, dequantize_model, verify_quantized

PROMPT = [7, 8, 9, 10]
NEW_TOKENS = 24
# A run of axolotl.
AXOLOTL = """
base_model: float
plugins: [moq_hf.integrations.axolotl.MoQPlugin]
moq: lm-w4
datasets: [{path: texts.jsonl, type: completion}]
dataset_prepared_path: prepared
output_dir: out
sequence_len: 64
sample_packing: false
micro_batch_size: 8
gradient_accumulation_steps: 1
max_steps: 20
learning_rate: 0.005
optimizer: adamw_torch
lr_scheduler: constant
val_set_size: 0
save_strategy: "no"
bf16: false
attn_implementation: sdpa
use_cpu: true
"""
WORDS = [f"w{number}" for number in range(64)]


def bert() -> Any:
    """A tiny classifier."""
    hf.set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = hf.BertConfig(vocab_size=64, num_attention_heads=2, max_position_embeddings=32, **sizes)
    return hf.BertForSequenceClassification(config)


def llama() -> Any:
    """A tiny language model, of sizes that vLLM takes."""
    hf.set_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return hf.LlamaForCausalLM(config)


def pretrained() -> Any:
    """The language model of a folder that has a tokenizer too, as some programs read both again."""
    llama().save_pretrained("float")
    words().save_pretrained("float")
    return hf.AutoModelForCausalLM.from_pretrained("float")


def counting() -> list[dict[str, Any]]:
    """Numbers in their order, from each start: what follows a prompt is sure."""
    rows = [[3 + (start + step) % 61 for step in range(32)] for start in range(61)]
    return [{"input_ids": row, "labels": row} for row in rows]


def labelled() -> list[dict[str, Any]]:
    """Sentences of numbers by whether they begin low."""
    return [{"input_ids": row["input_ids"], "labels": int(row["input_ids"][0] > 30)} for row in counting()]


def arguments(cls: Any = None, **more: Any) -> Any:
    """Of a short run on a CPU."""
    settings = {"max_steps": 20, "per_device_train_batch_size": 16, "learning_rate": 5e-3, "save_strategy": "no"}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1000}
    return (cls or hf.TrainingArguments)(tempfile.mkdtemp(dir="."), **{**settings, **more})


def words() -> Any:
    """A tokenizer of the numbers as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "w3"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def sentences() -> Any:
    """The numbers as texts."""
    from datasets import Dataset

    return Dataset.from_list([{"text": " ".join(WORDS[word] for word in row["input_ids"])} for row in counting()])


def trained(trainer: Any) -> Path:
    """Train; the folder that was delivered and proved.

    Raises:
        AssertionError: Nothing was delivered, or it is not what was trained.
    """
    trainer.train()
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, MoQCallback))
    assert callback.delivered is not None, "nothing was delivered"
    assert "Verified" in callback.delivered.summary, callback.delivered.summary
    verify_quantized(callback.delivered.path, trainer.model)
    return Path(callback.delivered.path).resolve()


def loads(model: Any, folder: Path, stranger: Stranger) -> str:
    """Have a process without moq_hf load the folder; its layout.

    Raises:
        AssertionError: Its answers differ from those of the model in memory.
    """
    reply = stranger.load(folder, model, prompt(), generate=True)
    assert reply.get("equal"), reply
    state = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    return str(state["layout"])


def prompt() -> dict[str, torch.Tensor]:
    """The beginning of a text."""
    ids = torch.tensor([PROMPT])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def classified(bits: int, stranger: Stranger) -> str:
    """Train a classifier, and have its folder loaded; its layout."""
    model = bert()
    trainer = hf.Trainer(model, arguments(), train_dataset=labelled(), callbacks=[MoQCallback(f"w{bits}")])
    return loads(model, trained(trainer), stranger)


def counted(steps: int = 120, callbacks: Any = None) -> tuple[Any, Path]:
    """A language model that learns to count, at 4 bits in groups of 32, and its folder."""
    model = llama()
    used = callbacks or [MoQCallback("lm-w4")]
    trainer = hf.Trainer(model, arguments(max_steps=steps), train_dataset=counting(), callbacks=used)
    return model, trained(trainer)


def basics(stranger: Stranger) -> dict[str, str]:
    """A classifier at each width and a language model: trained, delivered, proved, loaded."""
    found = {f"BERT, {bits} bits": attempt(lambda bits=bits: classified(bits, stranger)) for bits in (8, 4, 3, 2)}
    return {**found, "Llama, 4 bits in groups": attempt(lambda: loads(*counted(), stranger))}


def vllm(stranger: Stranger) -> str:
    """It serves the folder."""
    from vllm import LLM, SamplingParams

    _, folder = counted()
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = plain.generate(**prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(PROMPT) :].tolist()
    served = LLM(str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    settings = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    (answer,) = served.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)
    equal = sum(one == other for one, other in zip(answer.outputs[0].token_ids, expected, strict=True))
    assert equal == NEW_TOKENS, f"{equal} of {NEW_TOKENS} tokens are those of transformers"
    return f"vLLM serves the folder: {equal} of {NEW_TOKENS} tokens are those of transformers"


def trl(stranger: Stranger) -> str:
    """Its trainers of instructions and of preferences."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    texts = [row["text"].split() for row in sentences()]
    pairs = [{"prompt": text[:8], "chosen": text[8:12], "rejected": text[20:24]} for text in texts]
    rows = [{key: " ".join(["", *part] if key != "prompt" else part) for key, part in pair.items()} for pair in pairs]
    ways = ((SFTTrainer, SFTConfig, sentences()), (DPOTrainer, DPOConfig, Dataset.from_list(rows)))
    for cls, settings, data in ways:
        args = arguments(settings, max_length=64, bf16=False)
        callbacks = [MoQCallback("lm-w4")]
        trainer = cls(pretrained(), args=args, train_dataset=data, processing_class=words(), callbacks=callbacks)
        loads(trainer.model, trained(trainer), stranger)
    return "TRL's `SFTTrainer` and `DPOTrainer` train, and what they deliver loads"


def peft(stranger: Stranger) -> str:
    """LoRA on a quantized base."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    folder = trained(hf.Trainer(model, arguments(), train_dataset=counting(), callbacks=[MoQCallback("lm-w4")]))
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    again = PeftModel.from_pretrained(base, folder / "adapter").eval()
    assert torch.equal(again(**prompt()).logits, model.eval()(**prompt()).logits), "other answers"
    return "PEFT's LoRA trains; base and adapter load with equal answers"


def sentence_transformers(stranger: Stranger) -> str:
    """Its trainer of embeddings."""
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer import modules as parts

    hf.set_seed(0)
    body = tempfile.mkdtemp(dir=".")
    hf.BertModel(bert().config).save_pretrained(body)
    words().save_pretrained(body)
    model = library.SentenceTransformer(modules=[parts.Transformer(body), parts.Pooling(32, "mean")], device="cpu")
    texts = [row["text"] for row in sentences()]
    trainer = library.SentenceTransformerTrainer(
        model,
        arguments(library.SentenceTransformerTrainingArguments),
        train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts[1:] + texts[:1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[MoQCallback("w4")],
    )
    folder = trained(trainer)
    again = library.SentenceTransformer(str(folder), device="cpu")
    assert (again.encode(texts) == model.encode(texts)).all(), "other vectors"
    return "Sentence Transformers' trainer trains; the folder gives equal vectors"


def llmcompressor(stranger: Stranger) -> str:
    """A folder of its own trains on."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    pretrained()
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(model="float", recipe=recipe, output_dir="rounded")
    model = dequantize_model(hf.AutoModelForCausalLM.from_pretrained("rounded"))
    callback = MoQCallback("lm-w4", group_size=128)
    trainer = hf.Trainer(model, arguments(), train_dataset=counting(), callbacks=[callback])
    loads(model, trained(trainer), stranger)
    return "a folder that llm-compressor rounded (W4A16) trains on, and what is delivered loads"


def axolotl(stranger: Stranger) -> str:
    """What `axolotl train` does, with the plugin named in its YAML."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    pretrained()
    sentences().to_json("texts.jsonl")
    Path("run.yml").write_text(AXOLOTL, encoding="utf-8")
    settings = load_cfg("run.yml")
    model, _, _ = train(cfg=settings, dataset_meta=load_datasets(cfg=settings))
    folder = Path("out", "quantized").resolve()
    verify_quantized(folder, model)
    loads(model, folder, stranger)
    return "axolotl's `train` runs with `MoQPlugin`, and what it delivers loads"


USES: dict[str, Callable[[Stranger], Any]] = {
    "basics": basics,
    "vLLM": vllm,
    "TRL": trl,
    "PEFT": peft,
    "Sentence Transformers": sentence_transformers,
    "llm-compressor": llmcompressor,
    "axolotl": axolotl,
}


def attempt(use: Callable[[], Any]) -> Any:
    """What a use gives, or its error in a line."""
    try:
        return use()
    except Exception as error:
        traceback.print_exc()
        return f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> None:
    """Try what is asked for, each in a folder of its own."""
    assert "site-packages" in moq_hf.__file__, f"{moq_hf.__file__} is not the wheel's"
    torch.set_num_threads(1)
    stranger = Stranger()
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = attempt(lambda name=name: USES[name](stranger))
            print("RESULT", json.dumps([name, found]), flush=True)
            os.chdir("..")
    stranger.close()
    # Engines leave threads behind that never end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
