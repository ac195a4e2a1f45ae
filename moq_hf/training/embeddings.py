"""Losses on embeddings: their similarities, their directions, and the relations between tokens in the last layer.

They need no labels.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import MoQError
from ..model.inventory import Inventory

# Similarities are divided by this, as losses of Sentence Transformers do (scale 20).
TEMPERATURE = 0.05
# Layers that give queries, keys and values, apart or as one.
_NAMES = re.compile(r"[qkv](uery|ey|alue)?(_proj|_lin)?|.*qkv.*|c_attn", re.IGNORECASE)


def embeddings_in(output: Mapping[str, Any], mask: Any) -> Tensor:
    """The vectors of the texts of a batch, `[texts, size]`, float32.

    Args:
        output: The model's output, of which `sentence_embedding` is taken, which models
            of Sentence Transformers have, or else the mean of `last_hidden_state` over
            the tokens.
        mask: 1 for tokens, 0 for padding, `[texts, tokens]`; None counts all.

    Raises:
        MoQError: It has neither.
    """
    if "sentence_embedding" in output:
        return cast(Tensor, output["sentence_embedding"]).float()
    if "last_hidden_state" not in output:
        raise MoQError(
            "distillation: similarity and embedding compare sentence_embedding or last_hidden_state, and the model's "
            f"output has {', '.join(output)}; set both to 0"
        )
    states: Tensor = output["last_hidden_state"].float()
    kept = _tokens(states, mask).unsqueeze(-1)
    return (states * kept).sum(1) / kept.sum(1).clamp(min=1)


def embedding_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the cosine of each vector with the teacher's, the mean; both `[texts, size]`.

    As for the hidden states of DistilBERT (Sanh et al., 2019, arXiv 1910.01108).

    Raises:
        MoQError: Their sizes differ.
    """
    if student.shape != teacher.shape:
        raise MoQError(
            f"distillation.embedding: a vector has {student.shape[-1]} numbers in the model and {teacher.shape[-1]} in "
            "the teacher; set it to 0"
        )
    return 1 - nn.functional.cosine_similarity(student, teacher).mean()


def similarity_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The distance between the student's and the teacher's similarities in a batch; both `[texts, size]`.

    For each text, the cosines with the others, divided by `TEMPERATURE`, give a
    distribution over these; the loss is the divergence KL(teacher, student), averaged over
    texts, as in probabilistic knowledge transfer (Passalis and Tefas, 2018, arXiv
    1803.10837).
    """
    others = ~torch.eye(len(student), dtype=torch.bool, device=student.device)
    ours, theirs = (nn.functional.normalize(x) for x in (student, teacher))
    return _divergence(ours, theirs, TEMPERATURE, others).mean()


def relation_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Any
) -> Tensor:
    """The distance between the student's and the teacher's relations of tokens: of queries, of keys, and of values.

    The relations of a token are the softmax of its products with all tokens in a head,
    divided by the root of the head's size; the loss is KL(teacher, student), averaged over
    tokens, heads and the three kinds: MiniLMv2 (Wang et al., 2020, arXiv 2012.15828), with
    the heads of attention, in the last layer.

    Args:
        student: Three tensors `[texts, heads, tokens, size]` from `queries_keys_values`.
        teacher: The teacher's three tensors.
        mask: 1 for tokens, 0 for padding, `[texts, tokens]`; None counts all.
    """
    losses = []
    for ours, theirs in zip(student, teacher, strict=True):
        kept = _tokens(ours[:, 0], mask)
        root = ours.shape[-1] ** 0.5
        divergence = _divergence(ours, theirs, root, kept[:, None, None])
        losses.append(divergence.mean(1)[kept].mean())
    return torch.stack(losses).mean()


@contextlib.contextmanager
def queries_keys_values(model: nn.Module, wanted: Any = True) -> Iterator[list[Tensor]]:
    """Collect queries, keys and values of the last layer in a forward pass, `[texts, heads, tokens, size]`.

    Args:
        model: The model; its layers are found by name.
        wanted: If false, nothing is collected.

    Raises:
        MoQError: No layers have names for queries, keys and values.
    """
    found: list[Tensor] = []
    layers, size = _attention(model) if wanted else ([], 0)

    def take(_: nn.Module, __: Any, output: Tensor) -> None:
        # One layer may give all three.
        for part in output.chunk(3 // len(layers), -1):
            found.append(
                part.view(*part.shape[:-1], -1, size).transpose(-2, -3).float()
            )

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(take))
        yield found


def _attention(model: nn.Module) -> tuple[list[nn.Module], int]:
    """The layers of the last attention that give queries, keys and values, and the size of a head.

    Raises:
        MoQError: There are none.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, layer in Inventory.of(model).linears.items():
        parent, _, last = name.rpartition(".")
        if _NAMES.fullmatch(last):
            found.setdefault(parent, []).append(layer)
    if not found:
        raise MoQError(
            "distillation.relations: no layers of the model have names for queries, keys and values (query, q_proj, "
            "qkv_proj, ...); set it to 0"
        )
    body: Any = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    config = body.config
    layers = [*found.values()][-1]
    heads = config.num_attention_heads
    if len(layers) == 1 and getattr(config, "num_key_value_heads", heads) != heads:
        raise MoQError(
            "distillation.relations: one layer gives queries, keys and values of different sizes; set it to 0"
        )
    return layers, getattr(config, "head_dim", None) or config.hidden_size // heads


def _tokens(states: Tensor, mask: Any) -> Tensor:
    """The positions that count, bool `[texts, tokens]`."""
    return (
        torch.ones_like(states[..., 0], dtype=torch.bool)
        if mask is None
        else mask.bool()
    )


def _divergence(
    student: Tensor, teacher: Tensor, scale: float, others: Tensor
) -> Tensor:
    """KL(teacher, student) of the distributions over others that each vector's products, divided by `scale`, give."""
    # Cosines of neighbors differ by less than bfloat16 can tell.
    with torch.autocast(student.device.type, enabled=False):
        ours, theirs = (
            (x @ x.transpose(-1, -2) / scale)
            # Not infinite: there may be no others.
            .masked_fill(~others, torch.finfo(x.dtype).min)
            .log_softmax(-1)
            for x in (student, teacher)
        )
    loss = nn.functional.kl_div(ours, theirs, reduction="none", log_target=True)
    return loss.sum(-1)
