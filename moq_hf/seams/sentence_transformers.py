"""The private names that moq_hf uses of Sentence Transformers, without importing it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.repocard_data import model_index_to_eval_results
from torch import nn
from transformers import PreTrainedModel

from ..errors import read_json
from .transformers import callers

# A file of each of its models, which names the class.
CONFIG = "config_sentence_transformers.json"
LIBRARY = "sentence_transformers"
# The least version that loads what plain transformers 5 saves.
LEAST = "6.0"
# The Hub's name for the task of a class.
PIPELINES: dict[str | None, str] = {
    "SentenceTransformer": "sentence-similarity",
    "CrossEncoder": "text-ranking",
    "SparseEncoder": "feature-extraction",
}
# The argument of the forward pass, which holds what `preprocess` makes.
_FEATURES = "input"


def body_of(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model in a model of Sentence Transformers; None for any other model.

    Relies on: `auto_model` of the first module of a `SentenceTransformer`, a
    `CrossEncoder` or a `SparseEncoder`, which is saved in the root of the folder.
    Breaks: The models are delivered as rounded floats.
    """
    if type(model).__module__.partition(".")[0] != LIBRARY:
        return None
    body = getattr(next(model.children(), None), "auto_model", None)
    return body if isinstance(body, PreTrainedModel) else None


def is_text(model: nn.Module, example: object) -> bool:
    """True if a model of Sentence Transformers takes this as an example: a text, or a `CrossEncoder` a pair of them.

    Relies on: The class name `CrossEncoder`.
    Breaks: A reranker takes single texts as examples.
    """
    if not takes_pairs(model):
        return isinstance(example, str)
    is_pair = isinstance(example, list | tuple) and len(example) == 2
    return is_pair and all(isinstance(text, str) for text in cast(Any, example))


def takes_pairs(model: nn.Module) -> bool:
    """True for a `CrossEncoder`; see `is_text`."""
    return any(base.__name__ == "CrossEncoder" for base in type(model).__mro__)


def batch_of_texts(model: Any, texts: list[Any]) -> dict[str, Any]:
    """A batch as the forward pass of a model of Sentence Transformers takes it, of texts as `encode` takes them.

    Relies on: `preprocess`, and `prompts` with the `default_prompt_name`, which `encode`
    puts before each text.
    Breaks: Texts that a user gives as inputs are one error, which says that the model
    cannot answer them.
    """
    prompt = model.prompts.get(model.default_prompt_name)
    return batch_of_features(model.preprocess(texts, prompt=prompt))


def batch_of_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as the forward pass takes it, of what `preprocess` made; of such a batch, the batch itself.

    Relies on: The argument `input` of `BaseModel.forward`, which holds the features.
    Breaks: The model cannot answer the inputs that a user gives, and an error says so.
    """
    return dict(features) if _FEATURES in features else {_FEATURES: dict(features)}


class _First(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.model = body

    @property
    def auto_model(self) -> nn.Module:
        return self.model


def around(body: nn.Module) -> nn.Module:
    """A module with the names and shapes of a Sentence Transformers model around a transformers model.

    Relies on: `model` of the first module, and all that `body_of` relies on.
    Breaks: `moq-hf plan --model` would predict the size of the bare transformers model.
    """
    cls = type("Encoder", (nn.Sequential,), {"__module__": LIBRARY})
    found: nn.Module = cls(_First(body))
    return found


def is_kept_at(place: str) -> bool:
    """True if a folder, or a repository of the Hub, holds a model of Sentence Transformers.

    Relies on: The file `CONFIG`.
    Breaks: See `around`.
    """
    if Path(place).is_dir():
        return (Path(place) / CONFIG).is_file()
    # There may be no such file, or no network.
    with contextlib.suppress(OSError, ValueError, HfHubHTTPError):
        return bool(hf_hub_download(place, CONFIG))
    return False


def save_around(
    model: Any,
    body: nn.Module,
    folder: Path,
    write: Callable[[Path], None],
    beside: Callable[[Path, str, Callable[[Path], Any]], None],
) -> None:
    """Write a transformers model with `write`, and the other files of the Sentence Transformers model around it.

    Args:
        model: A model of any library.
        body: The transformers model inside it.
        folder: The folder to write to.
        write: Writes the body.
        beside: Writes the tokenizer or processor, which may fail; takes the folder, the
            name of the tokenizer's class, and its method `save_pretrained`.

    Relies on: `BaseModel.save`, in which the first module calls `save_pretrained` of
    its model, and then of its `processor`, with the folder.
    Breaks: The folder has float weights, and the proof says so; or a tokenizer that
    cannot be saved leaves no packed folder.
    """
    if body_of(model) is not body:
        write(folder)
        return
    processor = getattr(next(model.children()), "processor", None)

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(_replaced(body, lambda path, **_: write(Path(path))))
        if processor is not None:
            name = type(processor).__name__
            save = processor.save_pretrained
            replaced.enter_context(
                _replaced(processor, lambda path, **_: beside(Path(path), name, save))
            )
        model.save(str(folder), create_model_card=False)


def saves_body() -> bool:
    """True while a model of Sentence Transformers saves its transformers model.

    Relies on: `save` of the module that has the model, which calls its `save_pretrained`.
    Breaks: `SentenceTransformer.save` would pack a model that was loaded with a
    `MoQConfig` in a layout that Sentence Transformers cannot load.
    """
    return any(
        name == "save" and type(owner).__module__.partition(".")[0] == LIBRARY
        for name, owner in callers()
    )


@contextlib.contextmanager
def _replaced(part: Any, save_pretrained: Callable[..., None]) -> Iterator[None]:
    before = {
        name: own for name, own in vars(part).items() if name == "save_pretrained"
    }
    vars(part)["save_pretrained"] = save_pretrained
    try:
        yield
    finally:
        vars(part).pop("save_pretrained", None)
        vars(part).update(before)


def loads_as(folder: Path) -> str | None:
    """The class of Sentence Transformers that loads a folder; None for a folder of another library.

    Relies on: `model_type` in the file `CONFIG`, which holds the name of the class.
    Breaks: The card says to load the transformers model alone.
    """
    path = folder / CONFIG
    return read_json(path).get("model_type") if path.exists() else None


def evaluations_of(model: Any, metrics: Mapping[str, float]) -> list[EvalResult]:
    """The results of evaluators for a model, with their tasks; empty for models of other libraries.

    Relies on: `model_card_data`, whose `format_eval_metrics` makes the model index.
    Breaks: The card's metadata has no results.

    Args:
        model: A model of any library.
        metrics: Metrics of the described model. Results with other values are older,
            such as those of the float model.
    """
    if not hasattr(model, "model_card_data"):
        return []
    (index,) = model.model_card_data.format_eval_metrics()["model-index"]
    _, results = model_index_to_eval_results([{"name": "", **index}])
    return [result for result in results if result.metric_value in metrics.values()]
