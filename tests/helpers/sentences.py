"""Tiny models of Sentence Transformers, and texts of the words that they know."""

from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [" ".join(WORDS[(index + step) % 10] for step in range(2 + index % 5)) for index in range(16)]
SMALL = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def body(folder: Path, cls: type[hf.PreTrainedModel] = hf.BertModel, **more: Any) -> str:
    hf.set_seed(0)
    cls(hf.BertConfig(**SMALL, max_position_embeddings=32, **more)).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*special, *WORDS])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    hf.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return str(folder)


def encoder(folder: Path, *more: nn.Module) -> Any:
    import sentence_transformers as library
    from sentence_transformers.sentence_transformer import modules as parts

    transformer = parts.Transformer(body(folder / "body"), max_seq_length=16)
    return library.SentenceTransformer(modules=[transformer, parts.Pooling(32, "mean"), *more], device="cpu")
