"""Fine-tunes a tiny Llama on dialogues with TRL's `SFTTrainer`, at 4 bits in groups of 32; needs no network.

    python examples/sft/train.py --output_dir runs/sft

The run delivers a packed folder. Where `--converter` names llama.cpp's converter, its GGUF file follows. In the end
`generate.py` answers questions that were not trained on, in a process of its own with plain transformers.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from datasets import Dataset
from dialogues import dialogues
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from moq_hf import MoQCallback

HERE = Path(__file__).parent
# TRL takes the loss of what stands between the marks of generation.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def new_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One of Llama 2's kind, which llama.cpp's converter reads whatever its words are."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    marks = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[*marks, *numbers], show_progress=False)
    # Word by word: a thing is the same token before a period and before a question mark.
    tokenizer.train_from_iterator((word for text in texts for word in re.findall(r"\w+|\S", text)), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    made.chat_template = TEMPLATE
    return made


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 2 layers and random weights, in the place of a pretrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(args: argparse.Namespace) -> SFTTrainer:
    """Train; the callback writes the packed folder `quantized` into the output folder."""
    rows, _ = dialogues()
    tokenizer = new_tokenizer([message["content"] for row in rows for message in row["messages"]])
    set_seed(args.seed)
    settings = SFTConfig(
        str(args.output_dir),
        seed=args.seed,
        max_steps=args.max_steps,
        per_device_train_batch_size=32,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.max_steps // 20,
        logging_steps=max(1, args.max_steps // 10),
        max_length=64,
        assistant_only_loss=True,
        activation_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = SFTTrainer(
        new_model(tokenizer),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[MoQCallback(args.moq_config)],
    )
    trainer.train()
    return trainer


def to_gguf(args: argparse.Namespace, packed: Path) -> str:
    """Write the packed folder as GGUF; what became of it, for the reader."""
    if args.converter is None:
        return "GGUF: left out, since --converter does not name llama.cpp's convert_hf_to_gguf.py"
    if importlib.util.find_spec("gguf") is None:
        return "GGUF: left out, since the package gguf is not installed"
    out = args.output_dir / "model-q4_0.gguf"
    export = [sys.executable, "-m", "moq_hf", "export", packed, "--to", "gguf", out]
    # The converter makes the frame of the file, and the export puts the trained integers into it.
    subprocess.run([str(word) for word in [*export, "--converter", args.converter]], check=True)
    return f"GGUF: {out}, {out.stat().st_size / 1e6:.2f} MB"


def main() -> None:
    """Train, convert, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sft"))
    parser.add_argument("--moq_config", default="lm-w4", help="a preset or a JSON file")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py")
    args = parser.parse_args()
    train(args)
    packed = args.output_dir / "quantized"
    print(to_gguf(args, packed), flush=True)
    subprocess.run([sys.executable, str(HERE / "generate.py"), str(packed)], check=True)


if __name__ == "__main__":
    main()
