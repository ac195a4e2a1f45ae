"""What a decoder's graph is traced with and compared on."""

from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models

from moq_hf import MoQError
from moq_hf.export.compare import SENTENCES, Checkpoint, _tokenized, most_tokens
from moq_hf.export.decoder import _cache_name, inputs_after, with_cache
from moq_hf.export.onnx import traced

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_what_lies_before_a_sliding_window_is_in_the_cache_too() -> None:
    hf.set_seed(0)
    config = hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=4)
    model = hf.Gemma2ForCausalLM(config).eval()
    ids = torch.randint(3, 32, (1, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs = inputs_after(model, batch, 9)
    past = [inputs.pop(name) for name in list(inputs) if "past" in name]
    with torch.no_grad():
        expected = model(**batch).logits[:, 9:]
        with with_cache(model):
            answered = model(**inputs, past_key_values=past)["logits"]
    assert {len(tensor[0, 0]) for tensor in past} == {9}
    torch.testing.assert_close(answered, expected)


class Renamed(hf.LlamaForCausalLM):
    """Calls its cache `cache`, as transformers does from 5.24 on, where the old name is a warning."""

    def forward(self, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **{_cache_name(super().forward): cache}, **kwargs)
        return {"logits": outputs.logits, "cache": cache}


def test_the_cache_has_two_names() -> None:
    hf.set_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval()
    batch = {"input_ids": torch.randint(3, 32, (1, 12)), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    expected = inputs_after(model, batch, 9)
    model.__class__ = Renamed
    torch.testing.assert_close(inputs_after(model, batch, 9), expected)


def test_another_cache_is_one_error() -> None:
    model = hf.Lfm2ForCausalLM(hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])).eval()
    with pytest.raises(MoQError, match="cannot export Lfm2ForCausalLM"):
        traced(model, {"input_ids": torch.ones(1, 8, dtype=torch.long)})


@pytest.mark.parametrize("special", [{"eos_token": "b"}, {}])
def test_a_tokenizer_without_a_padding_token_is_compared_and_stays_so(special: dict[str, str]) -> None:
    words: Any = Tokenizer(models.BPE({"a": 0, "b": 1, "e": 2}, []))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    batches = _tokenized(Checkpoint(model, tokenizer, None, None, {}), SENTENCES, 16)  # type: ignore[arg-type]
    masks = [batch["attention_mask"] for batch in batches]
    assert any(not bool(mask.all()) for mask in masks)
    # The cache is tried with the first tokens of a batch, which must not be padding.
    assert all(torch.equal(mask, mask.sort(dim=1, descending=True).values) for mask in masks)
    assert tokenizer.pad_token is None


@pytest.mark.parametrize(("kind", "tokens"), [("Roberta", 60), ("Bert", 64)])
def test_the_most_tokens_that_a_model_takes(kind: str, tokens: int) -> None:
    words: Any = Tokenizer(models.BPE({"a": 0, "b": 1, "e": 2}, []))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
    sizes = {**SIZES, "max_position_embeddings": 64, "pad_token_id": 3}
    model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes)).eval()
    assert most_tokens(Checkpoint(model, tokenizer, None, None, {})) == tokens  # type: ignore[arg-type]
    with torch.no_grad():
        model(torch.ones(1, tokens, dtype=torch.long))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.ones(1, tokens + 1, dtype=torch.long))
