"""Distillation: training a quantized model to follow a float teacher of the same shape.

The loss is a weighted sum of means over a batch:

- logits: the cross entropy of the student's class probabilities with the teacher's, both at temperature 1; class by
  class where several may be true; for a regression, the squared difference. Positions whose label is -100 do not
  count: in a model that predicts the next token, those before it.
- hidden: the squared difference of hidden states over the teacher's mean square, averaged over the embedding output and
  all layers. Padding does not count.
- similarity, embedding, relations: compare embeddings and relations between tokens, see `embeddings`.
- labels: the task's own loss.

Logits and hidden states as in TernaryBERT (Zhang et al., 2020, arXiv 2009.12812), which has no labels, and adds
attention scores; those do not exist with fused attention.
"""

import contextlib
import copy
import inspect
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import MoQConfig
from ..config_fields import DistillationConfig
from ..errors import MoQError, explained
from ..model.convert import dequantize_model, is_quantized
from ..model.inventory import is_packed
from ..names import pretrained, without_fsdp, without_peft
from ..seams.transformers import FUSED_HEAD
from .embeddings import (
    embedding_loss,
    embeddings_in,
    queries_keys_values,
    relation_loss,
    similarity_loss,
)
from .samples import by_name, names_of_inputs

logger = logging.getLogger(__name__)

_STATES = {
    "hidden_states": "attention_mask",
    "encoder_hidden_states": "attention_mask",
    "decoder_hidden_states": None,
    # Sentence Transformers'.
    "all_layer_embeddings": "attention_mask",
}
# Settings that both models must have in common: the meaning of inputs and of outputs, and
# the shapes that are compared.
_COMMON = ("vocab_size", "num_labels", "model_type")
_COMMON_IN = {
    "hidden": ("hidden_size", "num_hidden_layers"),
    "relations": ("num_attention_heads",),
}
# The parts of the loss, in the words of the config.
PARTS = {
    "labels": "the task's own",
    "logits": "the teacher's logits",
    "hidden": "its hidden states",
    "similarity": "the teacher's similarities",
    "embedding": "the teacher's embeddings",
    "relations": "the teacher's relations of tokens",
}
# The name of the part `labels` in the log.
TASK = "task"


def load_teacher(
    source: str | PreTrainedModel,
    model: nn.Module,
    config: DistillationConfig,
    device: torch.device,
    init_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The teacher, frozen, in evaluation mode and on `device`.

    Args:
        source: A model, or the folder or Hub id of one of `model`'s class.
        model: The student; of a `PeftModel`, the model inside it.
        config: What will be compared.
        device: The device on which the model trains; with FSDP2 and ZeRO the model is
            not there yet.
        init_kwargs: Arguments for `from_pretrained`, if `source` is a name.

    Raises:
        MoQError: There is no such model, or it does not fit the student.
    """
    student: Any = without_peft(model)
    check_kind(student, "distillation")
    teacher: Any = source
    if isinstance(source, str):
        cls: Any = without_fsdp(type(student))
        where = "" if Path(source).is_dir() else ", which is no folder here,"
        with explained(
            f"distillation.teacher: cannot load {source}{where} as {type(student).__name__}"
        ):
            teacher, loading_info = cls.from_pretrained(
                source, output_loading_info=True, **(init_kwargs or {})
            )
        missing = loading_info["missing_keys"]
        if missing:
            raise MoQError(
                f"distillation.teacher: {source} holds no weights for {', '.join(sorted(missing))}: "
                f"fine-tune it on the task first, as {type(student).__name__}"
            )
        if is_packed(teacher):
            teacher = dequantize_model(teacher)
            logger.warning(
                "moq_hf: the teacher %s is a quantized model, which teaches with its rounded weights",
                source,
            )
    elif not isinstance(source, PreTrainedModel):
        raise MoQError(
            f"distillation: the teacher must be a transformers model, got {type(source).__name__}; of a PEFT model "
            "give what merge_and_unload() returns"
        )
    _check_teacher(student, teacher, config, _COMMON)
    ours = student.config.id2label
    theirs = teacher.config.id2label
    labels = [*(ours or {}).values(), *(theirs or {}).values()]
    # Names that transformers makes up say nothing about the task.
    made_up = any(str(label).startswith("LABEL_") for label in labels)
    if ours and theirs and not made_up and ours != theirs:
        raise MoQError(
            f"distillation: the labels are {ours} in the model and {theirs} in the teacher"
        )
    # As the Trainer does for the student, since nothing is generated.
    teacher.config.use_cache = False
    teacher.requires_grad_(False).train(False)
    return cast(PreTrainedModel, teacher.to(device))


def check_kind(model: nn.Module, key: str) -> None:
    """Check that a model is one of transformers, which can follow a teacher; errors begin with `key`.

    Raises:
        MoQError: It is not.
    """
    if isinstance(model, PreTrainedModel):
        return
    way = ""
    if hasattr(model, "encode"):
        way = (
            "; its Trainer follows a teacher with loss=MoQDistillation(model, teacher)"
        )
    raise MoQError(
        f"{key}: needs a transformers model, got {type(model).__name__}{way}"
    )


def _check_teacher(
    model: nn.Module,
    teacher: nn.Module,
    config: DistillationConfig,
    common: Sequence[str],
) -> None:
    """Check that a teacher is another model, in float, and that the two can be compared.

    Raises:
        MoQError: It does not.
    """
    shared = {id(parameter) for parameter in model.parameters()}
    both = [
        name
        for name, parameter in teacher.named_parameters()
        if id(parameter) in shared
    ]
    if both:
        raise MoQError(
            f"distillation: the teacher shares parameters with the model in training ({', '.join(both)}): give a copy "
            "that was made before training"
        )
    if is_quantized(teacher) or is_packed(teacher):
        raise MoQError(
            "distillation: the teacher is quantized: give a float model, or call moq_hf.dequantize_model(teacher) "
            "first, to follow what it computes now"
        )
    hints = dict.fromkeys(common, "")
    for part, names in _COMMON_IN.items():
        if getattr(config, part):
            hints |= dict.fromkeys(names, f"; set distillation.{part} to 0")
    for name, hint in hints.items():
        ours, theirs = (
            getattr(pretrained(each).config, name, None) for each in (model, teacher)
        )
        if ours != theirs:
            raise MoQError(
                f"distillation: {name} is {ours} in the model and {theirs} in the teacher{hint}"
            )


@contextlib.contextmanager
def running_alone(teacher: nn.Module, student: nn.Module) -> Iterator[None]:
    """Make sure that a teacher's forward pass runs none of the student's modules.

    A deep copy of a model whose `forward` was replaced on the object, as TRL's Trainers
    do, calls the model that it was copied from.

    Raises:
        MoQError: It runs some.
    """
    own = {*teacher.modules()}
    ran: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        ran.append(module)

    handles = [
        module.register_forward_pre_hook(note)
        for module in student.modules()
        if module not in own
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if ran:
        raise MoQError(
            "distillation: the teacher's forward pass runs the model in training: it is a copy of a model whose "
            "forward was replaced, as TRL's Trainers do; copy the model before a Trainer has it, or load the teacher "
            "from a folder"
        )


class MoQDistillation(nn.Module):
    """Follow a float teacher on texts alone: a loss for the Trainers of Sentence Transformers, beside a `MoQCallback`.

    Its parts are means over the columns of the data set, each multiplied by its weight;
    the Trainer adds them up and logs them. Labels are not read.

    Args:
        model: The `SentenceTransformer` that the Trainer has.
        teacher: A float model, which must be another object; None copies `model` as it
            is now, so the loss must be made before the Trainer.
        dropout: Whether the model keeps its dropout; otherwise the first batch switches
            it off for good.
        **weights: `similarity`, `embedding`, `relations` and `hidden`, as in the
            config's `distillation`. Those left out are 0; without any, `similarity` and
            `embedding` are 1.

    Raises:
        MoQConfigError: A weight is illegal, all of them are 0, or `dropout` is not a
            bool.
        MoQError: There is no teacher and the model is quantized already; or the teacher
            is quantized, has another vocabulary, or cannot be compared with the model.

    >>> loss = MoQDistillation(nn.Linear(4, 2), embedding=2.0)
    >>> loss.teacher is loss.model, loss.config.embedding, loss.config.similarity
    (False, 2.0, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None = None,
        dropout: bool = False,
        **weights: float,
    ) -> None:
        super().__init__()
        if teacher is None and is_quantized(model):
            raise MoQError(
                "distillation: the model is quantized already: give a float teacher"
            )
        weights = weights or {"similarity": 1.0, "embedding": 1.0}
        given = {**dict.fromkeys(PARTS, 0.0), **weights, "dropout": dropout}
        # A config is checked as a whole, so it needs some bits.
        config = {"bits": 8, "distillation": given}
        self.config = MoQConfig.from_dict(config).distillation
        if teacher is not None:
            _check_teacher(model, teacher, self.config, ("vocab_size",))
        self.model = model
        self.teacher = copy.deepcopy(model) if teacher is None else teacher
        self.teacher.requires_grad_(False)
        self._runs_alone = False

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Any = None
    ) -> dict[str, Tensor]:
        """The parts of the loss for a batch, scalars; `sentence_features` has the tokens of each column."""
        self.teacher.eval()
        # In each call, since a hyperparameter search gives the loss a new model for each trial.
        if not self.config.dropout:
            switch_off_dropout(self.model)
        total: dict[str, Any] = Counter()
        columns = list(sentence_features)
        for features in columns:
            student, ours = self._outputs(self.model, features)
            check: Any = contextlib.nullcontext()
            if not self._runs_alone:
                check = running_alone(self.teacher, self.model)
            with torch.no_grad(), check:
                teacher, theirs = self._outputs(self.teacher, features)
            self._runs_alone = True
            parts = loss_parts(
                student, teacher, features, self.config, None, (ours, theirs)
            )
            for name, part in weighted(parts, self.config).items():
                total[name] += part / len(columns)
        return dict(total)

    def _outputs(
        self, model: nn.Module, features: Mapping[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """A model's output for its features, and its queries, keys and values."""
        parts = (m for m in model.modules() if isinstance(m, PreTrainedModel))
        settings: Any = next(parts).config
        before = settings.output_hidden_states
        # Sentence Transformers returns the states of all layers if the config says so.
        settings.output_hidden_states = bool(self.config.hidden)
        try:
            with queries_keys_values(model, self.config.relations) as found:
                return model(dict(features)), found
        finally:
            settings.output_hidden_states = before


def switch_off_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Make a model in training drop nothing: no units, no paths and no layers.

    Dropout adds noise to what a student should match, since the teacher has none. A share
    that a model reads from its config at each call stays: Wav2Vec2's layerdrop,
    ProphetNet's dropout.

    Returns:
        Each module with dropout, the attribute that holds the share, and the share that
        it had, above 0 up to 1.
    """
    shares = [
        (module, name, share)
        for module in model.modules()
        for name, share in vars(module).items()
        if isinstance(share, float) and share and _is_dropout(module, name)
    ]
    for module, name, _ in shares:
        setattr(module, name, 0.0)
    return shares


def _is_dropout(module: nn.Module, name: str) -> bool:
    """True if the name of an attribute says that it is a share to drop: attention_dropout, resid_pdrop, layerdrop, ...

    Modules of Sentence Transformers only save some of these; modules inside them drop.
    """
    if name == "p":
        return "Dropout" in type(module).__name__
    return "drop" in name and name not in getattr(module, "config_keys", ())


class Pass(NamedTuple):
    """A forward pass.

    Attributes:
        inputs: The inputs by name.
        output: The model's output.
        relations: Its queries, keys and values, if they are compared.
        is_fused: Whether the output has the loss of labels without logits, as TRL asks
            for it.
    """

    inputs: dict[str, Any]
    output: Any
    relations: list[Tensor]
    is_fused: bool


@contextlib.contextmanager
def passes_of(
    model: nn.Module, student: nn.Module, config: DistillationConfig
) -> Iterator[list[Pass]]:
    """Collect all forward passes with gradients; they return hidden states if these are compared.

    Args:
        model: The model in training as it is called, wrapped or not.
        student: The model inside it.
        config: What is compared.
    """
    found: list[Pass] = []
    asked = {"output_hidden_states": True} if config.hidden else {}

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, **asked}) if torch.is_grad_enabled() else None

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            inputs = by_name(names_of_inputs(student), args, kwargs)
            lacks_logits = isinstance(output, Mapping) and not logits_in(output)
            is_fused = FUSED_HEAD in kwargs or ("labels" in kwargs and lacks_logits)
            found.append(Pass(inputs, output, [*relations], is_fused))
        relations.clear()

    with (
        queries_keys_values(student, config.relations) as relations,
        model.register_forward_pre_hook(ask, with_kwargs=True),
        model.register_forward_hook(take, with_kwargs=True),
    ):
        yield found


def with_logits(
    passes: list[Pass],
    model: nn.Module,
    student: nn.Module,
    config: DistillationConfig,
) -> list[Pass]:
    """Make forward passes again without their labels if TRL's head left out the logits; see `passes_of`."""
    if not any(each.is_fused for each in passes):
        return passes
    with passes_of(model, student, config) as again:
        for each in passes:
            model(**{k: v for k, v in each.inputs.items() if k != "labels"})
    return [
        full._replace(inputs=each.inputs)
        for each, full in zip(passes, again, strict=True)
    ]


def fingerprint(teacher: nn.Module) -> int:
    """A checksum of the parameters' names and bytes, 0 to 2^32 - 1; it tells a resumed run if the teacher changed."""
    total = 0
    for name, parameter in teacher.named_parameters():
        data = parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
        total = zlib.crc32(data, zlib.crc32(name.encode(), total))
    return total


def loss_parts(
    student: Any,
    teacher: Any,
    inputs: Mapping[str, Any],
    config: DistillationConfig,
    problem: str | None = None,
    relations: Sequence[Sequence[Tensor]] = ((), ()),
) -> dict[str, Tensor]:
    """The parts of the loss that compare two outputs, as in the module's docstring, before their weights.

    Args:
        student: Output of the student, with hidden states if `config.hidden` is not 0.
        teacher: Output of the teacher for the same `inputs`.
        inputs: The batch of both, of which `attention_mask` is read, and `labels` as from
            `labels_at_logits`.
        config: The weights.
        problem: See `logits_loss`.
        relations: Queries, keys and values of the student and of the teacher, if
            `config.relations` is not 0.

    Returns:
        Scalars, float32, by the names of their weights, without `labels` and without parts of weight 0.

    Raises:
        MoQError: The outputs have no names, no logits, or no hidden states.
    """
    for output in (student, teacher):
        if not isinstance(output, Mapping):
            raise MoQError(
                f"distillation: the model's output has no names (return_dict), it is {type(output).__name__}"
            )
    parts = {}
    if config.logits:
        ours = logits_in(student)
        theirs = logits_in(teacher)
        if not ours:
            raise MoQError(
                "distillation: nothing in the model's output is named as logits are (..._logits, logits_per_...), "
                f"only {', '.join(student)}; set distillation.logits to 0"
            )
        parts["logits"] = logits_loss(ours, theirs, inputs.get("labels"), problem)
    if config.hidden:
        parts["hidden"] = _hidden_loss(student, teacher, inputs)
    mask = inputs.get("attention_mask")
    if config.similarity or config.embedding:
        vectors = [embeddings_in(output, mask) for output in (student, teacher)]
        if config.similarity:
            parts["similarity"] = similarity_loss(*vectors)
        if config.embedding:
            parts["embedding"] = embedding_loss(*vectors)
    if config.relations:
        parts["relations"] = relation_loss(relations[0], relations[1], mask)
    return parts


def weighted(
    parts: Mapping[str, Tensor], config: DistillationConfig
) -> dict[str, Tensor]:
    """Each part of the loss, multiplied by its weight; the loss is their sum.

    >>> weighted({"task": torch.tensor(1.0), "hidden": torch.tensor(2.0)}, DistillationConfig(hidden=0.5))
    {'task': tensor(1.), 'hidden': tensor(1.)}
    """
    return {
        name: part * getattr(config, "labels" if name == TASK else name)
        for name, part in parts.items()
    }


def logits_in(output: Any) -> dict[str, Tensor]:
    """The logits in a model's output, float32, by name, including CLIP's `logits_per_image`; empty without any.

    Logits of routers, a tuple with an entry for each layer, are left out.
    """
    return {
        name: output[name].float()
        for name in output
        if (name.endswith("logits") or name.startswith("logits_per_"))
        and isinstance(output[name], Tensor)
    }


def logits_loss(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    labels: Any,
    problem: str | None = None,
) -> Tensor:
    """The cross entropy of class probabilities with the teacher's, a scalar; the mean if there are several logits.

    Args:
        student: The student's logits, from `logits_in`.
        teacher: The teacher's logits.
        labels: Positions where these are -100 do not count. All positions count if the
            labels have another shape.
        problem: `problem_type` of the model's config: with `multi_label_classification`
            each class has its own probability; with `regression`, or one logit and no
            type, the loss is the squared difference.
    """
    losses = [
        _cross_entropy(student[name], teacher[name], labels, problem)
        for name in student
    ]
    return torch.stack(losses).mean()


def labels_at_logits(model: nn.Module, labels: Any) -> Any:
    """The labels, each at the position of the logits that predict it.

    In a decoder-only model that generates, a label is predicted at the position before
    its own, as in the loss of transformers, and the last position gets -100. Other
    models keep their labels.
    """
    model = without_peft(model)
    generates = getattr(model, "can_generate", None)
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return labels
    if generates is None or not generates():
        return labels
    if getattr(model.config, "is_encoder_decoder", False):
        return labels
    return nn.functional.pad(labels[..., 1:], (0, 1), value=-100)


def check_hidden(model: nn.Module, config: DistillationConfig) -> None:
    """Check that the model can return what distillation compares.

    Raises:
        MoQError: Its forward pass takes no `output_hidden_states`.
    """
    if config.hidden and not takes(without_peft(model), "output_hidden_states"):
        raise MoQError(
            f"distillation: the forward pass of {type(model).__name__} takes no output_hidden_states; set "
            "distillation.hidden to 0 to compare logits only"
        )


def takes(model: nn.Module, name: str) -> bool:
    """True if a model's forward pass has an argument with that name, or takes any keyword argument."""
    kinds = inspect.signature(model.forward).parameters
    return name in kinds or any(
        kind.kind is kind.VAR_KEYWORD for kind in kinds.values()
    )


def _cross_entropy(
    student: Tensor, teacher: Tensor, labels: Any, problem: str | None
) -> Tensor:
    if problem == "regression" or (problem is None and student.shape[-1] == 1):
        return nn.functional.mse_loss(student, teacher)
    if problem == "multi_label_classification":
        return nn.functional.binary_cross_entropy_with_logits(
            student, teacher.sigmoid()
        )
    given = teacher.softmax(-1)
    # A class that a mask rules out is infinitely unlikely for both.
    loss = -(given * student.log_softmax(-1).masked_fill(given == 0, 0.0)).sum(-1)
    if isinstance(labels, Tensor) and labels.shape == loss.shape:
        kept = labels.ne(-100)
        return (loss * kept).sum() / kept.sum().clamp(min=1)
    return loss.mean()


def _hidden_loss(
    student: Mapping[str, Any], teacher: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Tensor:
    states = []
    for name, mask_name in _STATES.items():
        mask = inputs.get(mask_name) if mask_name else None
        ours, theirs = student.get(name) or (), teacher.get(name) or ()
        if len(ours) != len(theirs):
            raise MoQError(
                f"distillation: the model gave {len(ours)} hidden states and its teacher {len(theirs)}, as layerdrop "
                "causes; leave distillation.dropout false, or set distillation.hidden to 0"
            )
        states += [
            _state_loss(a.float(), b.float(), mask)
            for a, b in zip(ours, theirs, strict=True)
        ]
    if not states:
        raise MoQError(
            "distillation: the model's output has no hidden states; set distillation.hidden to 0"
        )
    return torch.stack(states).mean()


def _state_loss(student: Tensor, teacher: Tensor, mask: Any) -> Tensor:
    error = (student - teacher).square().mean(-1)
    size = teacher.square().mean(-1)
    if isinstance(mask, Tensor) and mask.shape == error.shape:
        error = error * mask
        size = size * mask
    return error.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny)
