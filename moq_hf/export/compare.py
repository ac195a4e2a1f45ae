"""Proves that an exported model answers as the checkpoint does: the data, the checkpoint's answers, the metrics."""

import contextlib
import copy
import functools
import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .. import quantizer
from ..config import MoQConfig
from ..errors import MoQError, check_choice, explained, listed, read_json, require
from ..grid import InputGrid
from ..inputs import InputObserver, load_ranges, new_inputs, range_of
from ..model.convert import dequantize_model
from ..model.inventory import Inventory, is_packed
from ..packed.files import ADAPTER
from ..packed.load_check import quiet
from ..packed.pack import model_class, read_config
from ..packed.reading import stored_weights
from ..packed.state import check_taken
from ..packed.verify import Verification, verify_quantized
from ..servers import ONNX

TOLERANCE = 1e-4
GLUE = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
PROCESSOR = "preprocessor_config.json"
_BATCH = 16
# The number of pictures that are compared.
_PICTURES = 8
# Their side in pixels, if neither the model nor its processor says it.
_SIDE = 224


@dataclass(frozen=True)
class Data:
    """The examples on which models are compared.

    Attributes:
        texts: One or two texts per example.
        labels: Class ids or scores; None if there are none.
        task: Name of the GLUE task, for the metric.

    >>> Data([("A good film.",), ("A bad one.",)], [1, 0], "sst2").task
    'sst2'
    """

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[float] | None = None
    task: str | None = None


# Sentences for callers who bring none. Their lengths differ, to test padding too.
SENTENCES = Data(
    [
        (line,)
        for line in """\
A quiet film that stays with you.
The plot makes no sense and the actors seem to know it.
He said that the meeting had been moved to Thursday because two of the speakers were late.
Prices rose by three percent in March.
Who wrote this?
The committee, which had met twice since the spring, could not agree on a date, a place or an agenda.
I would not call it good, but I would watch it again.
No.
Rain fell on the hills all night, and in the morning the river was over its banks.
The company said that its new engine uses a third less fuel than the one it replaces.
It was the best and the worst of their ideas.
Please send the report by noon.""".splitlines()
    ]
)


def read_data(path: str | os.PathLike[str], task: str | None = None) -> Data:
    """Read JSON lines: one or two texts under any names, in their order, and `label`, a class id or a score.

    Args:
        path: The file.
        task: Name of the GLUE task, which decides the metric.

    Raises:
        MoQError: There is no such file, or a line is not such a row; names the line.
    """
    check_choice("task", task, (None, *GLUE))
    with explained(f"cannot read {path}"):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows: list[tuple[tuple[str, ...], Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            label = row.pop("label", None)
            text = tuple(value for value in row.values() if isinstance(value, str))
            is_legal = len(text) in (1, 2) and (label is None or math.isfinite(label))
        except (ValueError, TypeError, AttributeError, OverflowError):
            is_legal = False
        if not is_legal:
            raise MoQError(
                f'{path}, line {number}: must be a JSON object with one or two texts and a number "label"'
            )
        rows.append((text, label))
    if len({(len(text), label is None) for text, label in rows}) != 1:
        raise MoQError(
            f"{path}: there must be rows, all with as many texts, and all with a label or none"
        )
    texts, labels = zip(*rows, strict=True)
    return Data(texts, None if None in labels else labels, task)


@dataclass(frozen=True)
class Checkpoint:
    """A packed checkpoint that is exported.

    Attributes:
        model: The model with rounded float weights, in eval mode.
        tokenizer: Its tokenizer; None for a model of pictures.
        processor: The file that says how its pictures are prepared, if there is one.
        verified: The result of `verify_quantized`.
        weights: The integers of each quantized layer, by its name.
    """

    model: Any
    tokenizer: Any
    processor: Path | None
    verified: Verification
    weights: Mapping[str, quantizer.Quantized]

    def input_dtype(self, name: str) -> torch.dtype:
        """The dtype to which the static scale of a layer's inputs was rounded."""
        dtypes = self.verified.state.get("input_dtypes", {})
        dtype: torch.dtype = getattr(torch, dtypes.get(name, "float32"))
        return dtype


def load_checkpoint(directory: Path) -> Checkpoint:
    """Verify and load a packed checkpoint.

    Raises:
        MoQError: It is damaged, its kind is not exported, or it has no tokenizer.
    """
    verified = verify_quantized(directory)
    check_taken(directory, ONNX)
    model = load_floats(directory, attn_implementation="eager", dtype=torch.float32)
    if model.main_input_name not in ("input_ids", "pixel_values"):
        raise MoQError(
            f"{directory}: {type(model).__name__} takes {model.main_input_name}; models of texts and of pictures are "
            "exported"
        )
    model.config.use_cache = False
    modules = dict(model.named_modules())
    lost = [name for name in verified.layers if name not in modules]
    if lost:
        raise MoQError(f"{directory}: its config has no place for {listed(lost)}")
    processor = directory / PROCESSOR
    return Checkpoint(
        model.float().eval(),
        None if takes_pictures(model) else _tokenizer(directory),
        processor if processor.is_file() else None,
        verified,
        stored_weights(directory),
    )


def takes_pictures(model: Any) -> bool:
    """True if a model's input is pictures."""
    return bool(model.main_input_name == "pixel_values")


def refuse_adapters(folder: Path) -> None:
    """Check that a checkpoint is a whole model.

    Raises:
        MoQError: It has adapters beside it.
    """
    if (folder / ADAPTER).exists():
        raise MoQError(
            f"{folder} has adapters in {ADAPTER}/, which an export of the base model would leave out: train LoRA "
            'with lora="merged", whose folder is one model'
        )


def load_floats(directory: Path, **options: Any) -> Any:
    """Load the model of a packed checkpoint with plain transformers, and unpack it to rounded float weights.

    Raises:
        MoQError: It has adapters beside it, its class is not one of transformers', or
            transformers cannot load it.
    """
    refuse_adapters(directory)
    cls = model_class(read_config(directory))
    with quiet(), explained(f"transformers cannot load {directory}"):
        model = cls.from_pretrained(directory, **options)
        if is_packed(model):
            dequantize_model(model)
    model.config.__dict__.pop("quantization_config", None)
    return model


def _tokenizer(directory: Path) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    # From a folder without a vocabulary transformers makes a tokenizer without words.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise MoQError(
            f"{directory} has no tokenizer, which the comparison on sentences needs: save it there with "
            "tokenizer.save_pretrained"
        )
    return tokenizer


@dataclass(frozen=True)
class Comparison:
    """The comparison of an exported model's answers with those of the checkpoint in PyTorch.

    Attributes:
        largest_difference: Of the outputs, over all pictures, or sentences and their
            tokens that are not padding.
        agreement: Share of equal predictions; None if the model predicts no class.
        metrics: GLUE metrics, if the data has labels.
        difference_in_float: The largest difference from the checkpoint's outputs with
            inputs in float; another one only where the model was evaluated with rounded
            inputs.
    """

    largest_difference: float
    agreement: float | None
    metrics: dict[str, float]
    difference_in_float: float

    def cells(self) -> list[str]:
        """The difference, the agreement and the metrics, for a table."""
        agreement = "-" if self.agreement is None else f"{self.agreement:.4f}"
        return [
            f"{self.largest_difference:.2e}",
            agreement,
            *(f"{value:.4f}" for value in self.metrics.values()),
        ]


def rounded_inputs(checkpoint: Checkpoint) -> dict[str, InputObserver]:
    """What rounds the inputs of a checkpoint's layers as it was evaluated, by layer; empty where they were floats."""
    verified = checkpoint.verified
    state = verified.state
    config = MoQConfig.from_dict(state["config"])
    step = state["step"]
    if step is not None and step < config.activations.start_step:
        return {}
    wide = Inventory.of(checkpoint.model).wide
    found = {}
    for name, layer in verified.layers.items():
        grid = config.input_grid_of(name, wide)
        if grid is None or layer.kind != "linear":
            continue
        module = checkpoint.model.get_submodule(name)
        scales = layer.grid.shape(*layer.shape)[1]
        grid = grid.beside(layer.shape[1], scales)
        observer = new_inputs(grid, module.weight)
        found[name] = replace(observer, dtype=checkpoint.input_dtype(name))
    load_ranges(found, state["input_ranges"])
    return found


def _round_input(
    observer: InputObserver, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    rounded = observer.quantize(args[0], training=False)
    return args if rounded is None else (rounded, *args[1:])


class Reference:
    """The checkpoint's own answers in PyTorch, to compare those of exported models with.

    They are those of the model as it was evaluated: where inputs were rounded, with
    these.

    Args:
        checkpoint: The checkpoint.
        data: What it answers; a model of pictures answers random ones instead.
        max_length: The most tokens of an example.

    Attributes:
        batches: The inputs.
        compared: The kind of inputs: "sentences" or "pictures".
        size: The number of inputs.
        rounds: Whether the answers are those with rounded inputs.
        metrics: GLUE metrics, if the data has labels.

    Raises:
        MoQError: The data does not fit the model.
    """

    def __init__(self, checkpoint: Checkpoint, data: Data, max_length: int) -> None:
        self._model = checkpoint.model
        self._data = data
        self.compared = "pictures" if takes_pictures(checkpoint.model) else "sentences"
        self.size = len(data.texts)
        if self.compared == "pictures":
            self.size = _PICTURES
            if data is not SENTENCES:
                raise MoQError(
                    "a model of pictures is compared on random ones: leave the texts out"
                )
            self.batches = [random_pictures(checkpoint.model, checkpoint.processor)]
        else:
            self.batches = _tokenized(checkpoint, data, max_length)
        self._answers = self._in_float = self._run()
        rounded = rounded_inputs(checkpoint)
        self.rounds = bool(rounded)
        if rounded:
            with contextlib.ExitStack() as hooks:
                for name, observer in rounded.items():
                    module = self._model.get_submodule(name)
                    hook = functools.partial(_round_input, observer)
                    hooks.callback(module.register_forward_pre_hook(hook).remove)
                self._answers = self._run()
        self.metrics = self._metrics(self._answers)

    def input_ranges(self, grids: Mapping[str, InputGrid]) -> dict[str, Any]:
        """The static ranges of the inputs of these layers, as `inputs.ranges_of` gives them, padding included.

        Those that are not called have none.
        """
        ranges: dict[str, Tensor] = {}

        def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel() == 0:
                return
            newest = range_of(args[0], grids[name])
            ranges[name] = torch.maximum(ranges.get(name, newest), newest)

        with contextlib.ExitStack() as hooks:
            for name in grids:
                module = self._model.get_submodule(name)
                hook = module.register_forward_pre_hook(functools.partial(note, name))
                hooks.callback(hook.remove)
            self._run()
        return {name: ends.tolist() for name, ends in ranges.items()}

    def prove(self, outputs: Sequence[Tensor]) -> Comparison:
        """Compare the answers of an exported model: its first output for each of `batches`."""
        rows = self._rows(outputs)
        answers = self._answers
        difference = float((rows - answers).abs().max())
        in_float = float((rows - self._in_float).abs().max())
        agreement = None
        if self._predicts and rows.shape[-1] > 1:
            is_equal = rows.argmax(-1) == answers.argmax(-1)
            agreement = float(is_equal.double().mean())
        return Comparison(difference, agreement, self._metrics(rows), in_float)

    def _run(self) -> Tensor:
        """The answers to all batches."""
        with (
            torch.inference_mode(),
            explained(f"the checkpoint cannot answer the {self.compared}"),
        ):
            outputs = [self._model(**batch) for batch in self.batches]
        self._predicts = "logits" in outputs[0]
        return self._rows([output[0] for output in outputs])

    def _metrics(self, answers: Tensor) -> dict[str, float]:
        # A model that answers each token has no metric.
        if self._data.labels is None or len(answers) != self.size:
            return {}
        return metrics_of(answers, self._data.labels, self._data.task)

    def _rows(self, outputs: Sequence[Tensor]) -> Tensor:
        """Join the outputs into answers `[rows, classes]`, without those for padding."""
        rows = []
        for output, batch in zip(outputs, self.batches, strict=True):
            if output.dim() == 3 and "attention_mask" in batch:
                output = output[batch["attention_mask"].bool()]
            rows.append(output.reshape(-1, output.shape[-1]))
        return torch.cat(rows)


def random_pictures(model: Any, processor: Path | None) -> dict[str, Tensor]:
    """Make a batch of random pictures, float32 `[8, channels, height, width]`, normally distributed.

    Args:
        model: The model, whose config may say how large a picture is.
        processor: The file that says how pictures are prepared, which may say so too;
            otherwise they have 224 by 224 pixels.
    """
    settings = {} if processor is None else read_json(processor)
    size = getattr(model.config, "image_size", None) or settings.get("crop_size")
    size = size or settings.get("size", _SIDE)
    if isinstance(size, dict):
        edge = size.get("shortest_edge", _SIDE)
        size = (size.get("height", edge), size.get("width", edge))
    elif isinstance(size, int):
        size = (size, size)
    shape = (_PICTURES, getattr(model.config, "num_channels", 3), *size)
    return {
        "pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0))
    }


def most_tokens(checkpoint: Checkpoint) -> int:
    """The most tokens of an example that the model and its tokenizer take."""
    positions = getattr(checkpoint.model.config, "max_position_embeddings", -1)
    for name, module in checkpoint.model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the one after padding.
            padding = -1 if module.padding_idx is None else module.padding_idx
            positions = module.num_embeddings - padding - 1
    limits: list[int] = [checkpoint.tokenizer.model_max_length, positions]
    # XLNet's -1 means that it has no limit.
    return min(limit for limit in limits if limit > 0)


def _tokenized(
    checkpoint: Checkpoint, data: Data, max_length: int
) -> list[dict[str, Tensor]]:
    """Batches of the model's inputs, int64 `[examples, tokens]`.

    Raises:
        MoQError: There are too few examples or tokens, or not as many labels as texts.
    """
    model = checkpoint.model
    tokenizer = checkpoint.tokenizer
    if tokenizer.pad_token is None:
        # Most decoders' tokenizers have none; any token will do, since it is masked.
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    texts = data.texts
    if data.labels is not None and len(data.labels) != len(texts):
        raise MoQError(
            f"{len(texts)} texts need as many labels, not {len(data.labels)}"
        )
    if len(texts) < 2:
        raise MoQError("the comparison needs at least two sentences")
    accepted = inspect.signature(type(model).forward).parameters
    names = [name for name in tokenizer.model_input_names if name in accepted]
    limit = min(max_length, most_tokens(checkpoint))
    batches = []
    for start in range(0, len(texts), _BATCH):
        columns = [
            list(column) for column in zip(*texts[start : start + _BATCH], strict=True)
        ]
        encoded = tokenizer(
            *columns,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=limit,
            return_tensors="pt",
        )
        batches.append({name: encoded[name] for name in names})
    if batches[0]["input_ids"].shape[1] < 2:
        raise MoQError("the comparison needs sentences of two tokens or more")
    return batches


def metrics_of(
    answers: Tensor, labels: Sequence[float], task: str | None
) -> dict[str, float]:
    """The metrics of a classifier's outputs.

    Args:
        answers: Logits `[examples, classes]`, float; one column is a score.
        labels: Class ids, or scores.
        task: Name of the GLUE task; None is accuracy, or correlations for scores.

    Raises:
        MoQError: The labels or the task do not fit the number of outputs; scipy or
            scikit-learn is missing.

    >>> metrics_of(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), [0, 0], "sst2")
    {'accuracy': 0.5}
    """
    logits = answers.numpy()
    classes = logits.shape[1]
    if (task is not None and (task == "stsb") != (classes == 1)) or (
        classes > 2 and task in ("cola", "mrpc", "qqp")
    ):
        raise MoQError(f"the task {task} does not fit a model with {classes} outputs")
    if classes > 1 and not set(labels) <= set(range(classes)):
        raise MoQError(
            f"labels must be class ids, 0 to {classes - 1}, for a model with {classes} outputs"
        )
    require("glue", "scipy", "sklearn")
    from scipy import stats
    from sklearn import metrics

    predicted = logits.argmax(1)
    if classes == 1:
        scores = logits[:, 0]
        figures = {
            "pearson": stats.pearsonr(labels, scores)[0],
            "spearmanr": stats.spearmanr(labels, scores)[0],
        }
    elif task == "cola":
        figures = {"matthews_correlation": metrics.matthews_corrcoef(labels, predicted)}
    else:
        figures = {"accuracy": metrics.accuracy_score(labels, predicted)}
        if task in ("mrpc", "qqp"):
            figures["f1"] = metrics.f1_score(labels, predicted)
    return {name: float(value) for name, value in figures.items()}
