"""What embeddings are taught with: how texts compare, where they lie, and relations between tokens."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from moq_hf import MoQError
from moq_hf.training.embeddings import (
    embedding_loss,
    embeddings_in,
    queries_keys_values,
    relation_loss,
    similarity_loss,
)

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum()


def test_similarities_by_hand() -> None:
    student, teacher = torch.randn(5, 8), torch.randn(5, 8)
    losses = []
    for index in range(5):
        others = [other for other in range(5) if other != index]
        cosines = [torch.cosine_similarity(x[index], x[others], dim=-1) / 0.05 for x in (student, teacher)]
        losses.append(divergence(*cosines))
    torch.testing.assert_close(similarity_loss(student, teacher), torch.stack(losses).mean())
    assert similarity_loss(teacher, 3 * teacher).item() == pytest.approx(0.0, abs=1e-5)
    # A text alone has no neighbors.
    assert similarity_loss(student[:1], teacher[:1]) == 0.0
    torch.testing.assert_close(embedding_loss(student, teacher), 1 - torch.cosine_similarity(student, teacher).mean())
    with pytest.raises(MoQError, match="a vector has 8 numbers in the model and 4 in the teacher; set it to 0"):
        embedding_loss(student, teacher[:, :4])


def test_relations_by_hand() -> None:
    student, teacher = ([torch.randn(2, 3, 4, 6) for _ in range(3)] for _ in range(2))
    parts = []
    for ours, theirs in zip(student, teacher, strict=True):
        tokens = []
        for text, count in enumerate((3, 2)):
            for token in range(count):
                heads = [
                    divergence(*(x[text, head, :count] @ x[text, head, token] / 6**0.5 for x in (ours, theirs)))
                    for head in range(3)
                ]
                tokens.append(torch.stack(heads).mean())
        parts.append(torch.stack(tokens).mean())
    torch.testing.assert_close(relation_loss(student, teacher, MASK), torch.stack(parts).mean())
    assert relation_loss(teacher, teacher, None) == 0.0


def test_vectors_of_texts() -> None:
    states = torch.randn(2, 4, 3)
    means = torch.stack([states[0, :3].mean(0), states[1, :2].mean(0)])
    torch.testing.assert_close(embeddings_in({"last_hidden_state": states}, MASK), means)
    torch.testing.assert_close(embeddings_in({"last_hidden_state": states}, None), states.mean(1))
    assert torch.equal(embeddings_in({"last_hidden_state": states, "sentence_embedding": means}, None), means)
    with pytest.raises(MoQError, match="the model's output has logits; set both to 0"):
        embeddings_in({"logits": states}, MASK)


@pytest.mark.parametrize(
    ("config", "model", "heads"),
    [
        (hf.BertConfig, hf.BertModel, (4, 4)),
        (hf.MPNetConfig, hf.MPNetModel, (4, 4)),
        (hf.DistilBertConfig, hf.DistilBertModel, (4, 4)),
        (hf.DebertaV2Config, hf.DebertaV2Model, (4, 4)),
        (hf.ModernBertConfig, hf.ModernBertModel, (4, 4)),
        (hf.Qwen3Config, hf.Qwen3Model, (4, 2)),
    ],
)
def test_queries_keys_and_values_of_families(config: Any, model: Any, heads: tuple[int, int]) -> None:
    more = {"num_key_value_heads": heads[1], "head_dim": 4, "pad_token_id": 0, "max_position_embeddings": 16}
    if config is hf.ModernBertConfig:
        more |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    made = model(config(**SIZES, **more)).eval()
    with torch.no_grad(), queries_keys_values(made) as found:
        made(input_ids=IDS, attention_mask=MASK)
    assert [tuple(part.shape) for part in found] == [(2, heads[0], 4, 4), (2, heads[1], 4, 4), (2, heads[1], 4, 4)]
    assert not any(module._forward_hooks for module in made.modules())
    with queries_keys_values(made, wanted=0.0) as nothing:
        made(input_ids=IDS, attention_mask=MASK)
    assert nothing == []


def test_one_layer_with_fewer_keys_than_queries_is_refused() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    model = hf.Phi3Model(hf.Phi3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with (
        pytest.raises(MoQError, match="one layer gives queries, keys and values of different sizes"),
        queries_keys_values(model),
    ):
        pass


def test_a_model_without_attention() -> None:
    with (
        pytest.raises(MoQError, match=r"distillation\.relations: no layers of the model have names"),
        queries_keys_values(nn.Sequential(nn.Linear(2, 2))),
    ):
        pass
