"""Loads a saved folder with plain `from_pretrained` and compares its outputs with those of the model in memory."""

import contextlib
import fnmatch
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, cast

import psutil
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ..errors import MoQError, one_line
from ..lora import is_merged
from ..model.convert import quantized_layers
from ..model.inventory import is_packed
from ..names import named_modules, plain_name, uncompiled, without_fsdp, without_peft
from ..processes import has_gathered_weights
from ..quant_linear import QuantLayer
from ..seams.sentence_transformers import body_of
from ..seams.transformers import attention_to_load, has_loss_of_its_own
from ..text import counted, dtype_name
from ..trained_scales import scales_of
from ..training.measuring import ONE_AT_A_TIME, evaluating
from ..training.samples import TEXTS, Examples, batches_for, kind_of_examples
from ..weight_matrix import parameter_of
from .differences import differences
from .files import active_adapter

# Where all weights are equal, outputs may differ by the rounding of another kernel,
# relative to the largest output.
ROUNDING = 1e-5
# The number of tokens in a prompt, and of tokens generated after it.
_PROMPT = 8
_GENERATED = 4
# The name of generated tokens among the outputs.
_TOKENS = "tokens"
# At most so many of the modules that differ are named.
_NAMED = 5
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Proof:
    """The comparison of a folder that `from_pretrained` loaded with the model in memory, by their outputs.

    Attributes:
        agrees: Whether it computes what the model does; None if that is not known.
        examples: How many examples were compared.
        largest_difference: The largest difference of all outputs; None if none could be
            compared.
        tokens: How many tokens each of the two generated for the comparison; None if
            the model in memory does not generate.
        reason: Why it does not agree, or why that is not known; None if it does.
        inputs: The inputs of layers with which both computed, if training rounds them:
            "rounded", as the files say, or "float", since the files cannot say so; None
            if training does not round them.
        dtype: The dtype to which the loaded model was cast, since it loads in another
            dtype than the model in memory has; None if no cast was needed.
        kept: Globs for the names of tensors that were not cast, since the model in
            memory has them in another dtype; empty if `.to(dtype)` casts all.
        autocast: The dtype of the autocast under which both answered; None without.
        attention: The `attn_implementation` that `from_pretrained` was given, since it
            would choose another one than the model in memory has; else None.

    >>> print(Proof(True, 4, 0.0, 8, None))
    Verified: loaded with plain transformers, the saved model gives identical outputs (4 examples, 8 generated tokens)
    >>> print(Proof(False, 4, 0.5, None, "outputs differ by 0.5, first in classifier"))
    The saved model is NOT what was evaluated: outputs differ by 0.5, first in classifier
    """

    agrees: bool | None
    examples: int
    largest_difference: float | None
    tokens: int | None
    reason: str | None
    inputs: Literal["rounded", "float"] | None = None
    dtype: str | None = None
    kept: tuple[str, ...] = ()
    autocast: str | None = None
    attention: str | dict[str, str | None] | None = None

    def __str__(self) -> str:
        if self.agrees is None:
            return f"Not verified: {self.reason}"
        if not self.agrees:
            return f"The saved model is NOT what was evaluated: {self.reason}"
        outputs = "identical outputs"
        compared = [counted(self.examples, "example")]
        if self.tokens:
            compared.append(counted(self.tokens, "generated token"))
        if self.inputs is not None:
            compared.append(f"{self.inputs} activations")
        if self.largest_difference:
            outputs = "the same outputs but for rounding"
            compared.append(f"largest difference {self.largest_difference:.3g}")
        if self.autocast is not None:
            compared.append(f"autocast to {self.autocast}")
        in_part = "in part " if self.kept else ""
        cast = "" if self.dtype is None else f" and cast {in_part}to {self.dtype}"
        return (
            f"Verified: loaded with plain transformers{cast}, the saved model gives {outputs} "
            f"({', '.join(compared)})"
        )


def has_failed(proof: Proof | None) -> TypeGuard[Proof]:
    """True if a folder was compared and does not compute what the model did."""
    return proof is not None and proof.agrees is False


class _Verdict(NamedTuple):
    agrees: bool | None
    reason: str | None
    largest_difference: float | None = None


class ReferenceOutputs:
    """The outputs of a model in memory, to be compared with those of folders that hold it.

    Each model is called in evaluation mode, without gradients, with the same seed; the
    caller's mode and random state stay as they are. With FSDP every process must make
    one of these; a single process may then compare.

    Args:
        model: In any mode, which it keeps.
        inputs: A batch as the model's forward pass takes it, with labels or without.
        autocast: The dtype of the autocast under which it is evaluated; None: without
            autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = uncompiled(model)
        self._device = next(self.model.parameters()).device
        self._autocast = autocast
        sizes = (len(tensor) for tensor in tensors_of(inputs) if tensor.dim())
        self.examples = next(sizes, 0)
        # With rounded inputs of layers (True), if training rounds them, and without:
        # not every folder can say how they are rounded.
        self._answers: dict[bool, dict[str, Tensor]] = {}
        # Why there are no outputs, and the error that the batch raised.
        self.reason: str | None = None
        self.error: Exception | None = None
        rounding = {
            m: m.moq.inputs
            for m in self.model.modules()
            if isinstance(m, QuantLayer) and m.moq.inputs is not None
        }
        self._rounds = bool(rounding)
        try:
            self._inputs: dict[str, Any] = _moved(inputs, self._device)
            if has_loss_of_its_own(self.model):
                self._inputs.pop("labels", None)
            if self._rounds:
                self._answers[True] = self._reference_answers()
            for layer in rounding:
                layer.moq.inputs = None
            self._answers[False] = self._reference_answers()
            outputs = [
                output
                for name, output in self._answers[False].items()
                if name != _TOKENS and output.numel()
            ]
            if outputs and all(output.isnan().all() for output in outputs):
                self.reason = "all outputs of the model in memory are NaN"
        except Exception as error:
            text = one_line(error, named=True)[:300]
            self.error = None if isinstance(error, _NO_MEMORY) else error
            self.reason = f"the model in memory cannot evaluate a batch ({text})"
        finally:
            for layer, rounded in rounding.items():
                layer.moq.inputs = rounded

    def _reference_answers(self) -> dict[str, Tensor]:
        answers = self._outputs_of(self.model)
        # If the model in memory cannot generate, the loaded one need not.
        with contextlib.suppress(Exception):
            answers |= self._tokens_of(self.model)
        return answers

    def prove(self, folder: str | Path, rounded: bool = False) -> Proof:
        """Load a folder with plain `from_pretrained` and compare it; raises nothing.

        Args:
            folder: The folder.
            rounded: Whether the folder says how inputs are rounded.
        """
        from compressed_tensors.offload import as_single_threaded

        # A model in memory that was itself loaded from such a folder always rounds, and
        # has one set of answers.
        answers = self._answers.get(rounded and self._rounds, {})
        tokens = answers.get(_TOKENS)
        inputs: Literal["rounded", "float"] | None = None
        if self._rounds:
            inputs = "rounded" if rounded else "float"
        self._cast_to: str | None = None
        self._kept: tuple[str, ...] = ()
        self._attention: str | dict[str, str | None] | None = None
        agrees = None
        reason: str | None = "a second copy of the model does not fit beside it"
        difference = None
        # compressed-tensors shards loading over ranks; only this one loads.
        with contextlib.suppress(*_NO_MEMORY), as_single_threaded():
            agrees, reason, difference = self._compare(Path(folder), answers)
        return Proof(
            agrees=agrees,
            examples=self.examples,
            # JSON has no infinite numbers.
            largest_difference=None if difference == float("inf") else difference,
            tokens=None if tokens is None else tokens.numel(),
            reason=reason,
            inputs=inputs,
            dtype=self._cast_to,
            kept=self._kept,
            autocast=None if self._autocast is None else dtype_name(self._autocast),
            attention=self._attention,
        )

    def _compare(self, folder: Path, answers: Mapping[str, Tensor]) -> _Verdict:
        if self.reason is not None:
            return _Verdict(None, self.reason)
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        size += sum(2 * answer.nbytes for answer in answers.values())
        if not _fits(size, self._device):
            return _Verdict(
                None,
                f"a second copy of the model ({size / 1e6:,.0f} MB) does not fit beside it",
            )
        failure = "from_pretrained cannot load it"
        try:
            loaded = self._load(folder)
            failure = "the loaded model fails"
            if _TOKENS in answers:
                # Before any other call, since generation must work while nothing is
                # unpacked yet.
                self._tokens_of(loaded)
            unlike = self._cast(loaded)
            if unlike is not None:
                return _Verdict(False, unlike)
            found = self._outputs_of(loaded)
            if _TOKENS in answers:
                found |= self._tokens_of(loaded)
        except _NO_MEMORY:
            raise
        except Exception as error:
            return _Verdict(False, f"{failure} ({one_line(error, named=True)[:300]})")
        return self._compare_answers(loaded, found, answers)

    def _compare_answers(
        self,
        loaded: nn.Module,
        found: Mapping[str, Tensor],
        answers: Mapping[str, Tensor],
    ) -> _Verdict:
        if not found and not answers:
            return _Verdict(None, "the model returns no tensor to compare")
        apart: dict[str, float] = {}
        for name, what, largest in differences(found.items(), answers):
            if what != "value" and name != _TOKENS:
                return _Verdict(False, "the loaded model has other outputs")
            apart[name] = largest
        if not apart:
            return _Verdict(True, None, 0.0)
        same_tokens = apart.pop(_TOKENS, None) is None
        difference = max(apart.values(), default=0.0)
        reason = (
            f"outputs differ by {difference:.3g}"
            if apart
            else "other tokens are generated"
        )
        is_small = same_tokens and all(
            largest <= ROUNDING * largest_value(answers[name])
            for name, largest in apart.items()
        )
        if has_gathered_weights(self.model):
            # To compare the weights, the other processes would have to gather them.
            if is_small:
                return _Verdict(None, f"{reason}, which may be rounding")
            return _Verdict(False, reason, difference)
        names = modules_with_other_weights(self.model, loaded)
        if is_small and not names:
            return _Verdict(True, None, difference)
        where = "though all weights are equal"
        if names:
            where = f"first in {', '.join(names[:_NAMED])}"
        return _Verdict(False, f"{reason}, {where}", difference)

    def _outputs_of(self, model: nn.Module) -> dict[str, Tensor]:
        outputs = {}
        with self._evaluating(model):
            for number, tensor in enumerate(tensors_of(model(**self._inputs))):
                output = tensor.detach().cpu()
                if output.is_floating_point():
                    output = output.float()
                outputs[str(number)] = output
        return outputs

    def _tokens_of(self, model: Any) -> dict[str, Tensor]:
        """Generate after two short prompts: tokens `[examples, 4]`, or nothing if the model does not generate."""
        main = model.main_input_name
        # With sharded weights, processes whose texts end after different numbers of
        # tokens would wait for each other.
        if not model.can_generate() or has_gathered_weights(model):
            return {}
        prompts = {main: self._inputs[main][:2]}
        if "attention_mask" in self._inputs:
            prompts["attention_mask"] = self._inputs["attention_mask"][:2]
        if main == "input_ids":
            prompts = {name: tensor[:, :_PROMPT] for name, tensor in prompts.items()}
        settings = {
            "min_new_tokens": _GENERATED,
            "max_new_tokens": _GENERATED,
            "do_sample": False,
        }
        with self._evaluating(model):
            generated: Tensor = model.generate(
                **prompts, **settings, return_dict_in_generate=False
            )
        return {_TOKENS: generated[:, -_GENERATED:].cpu()}

    @contextlib.contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        casting = torch.autocast(
            self._device.type, self._autocast, self._autocast is not None
        )
        with quiet(), evaluating(model), casting:
            torch.manual_seed(0)
            yield

    def _load(self, folder: Path) -> nn.Module:
        base = without_peft(self.model)
        with quiet(), torch.random.fork_rng(), torch.device("cpu"):
            loaded = _from_pretrained(base, folder)
            # Kernels of attention round differently.
            attention = _attention_in(base)
            if attention != _attention_in(loaded):
                self._attention = attention
                loaded = _from_pretrained(base, folder, attn_implementation=attention)
            if base is not self.model and not is_merged(base):
                from peft import PeftModel

                loaded = PeftModel.from_pretrained(
                    loaded, folder, subfolder=active_adapter(self.model)
                )
        return loaded.to(self._device).eval()

    def _cast(self, loaded: nn.Module) -> str | None:
        """Give the loaded model the dtypes of the model in memory, in the way that `how_to_load` tells a user.

        Returns:
            Why it cannot be done that way; None if it is done, or not needed.
        """
        if is_packed(loaded) and any(
            p.dtype != torch.float32 for p in self.model.parameters()
        ):
            with quiet(), torch.no_grad(), torch.random.fork_rng():
                # The first call unpacks the weights.
                loaded(**self._inputs)
        in_memory = all_tensors(self.model)
        found = {
            name: tensor
            for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]
            # Floats of 8 bits are codes, which the first call unpacks.
            if tensor.is_floating_point() and tensor.itemsize > 1
        }
        prefix = "" if without_peft(loaded) is loaded else "base_model.model."
        # Scales of inputs are not in the model in memory, and are cast with the rest.
        wanted: dict[str, torch.dtype] = {}
        for name in found:
            plain = plain_name(name.removeprefix(prefix), ())
            if plain in in_memory:
                wanted[name] = in_memory[plain].dtype
        cast = [name for name, dtype in wanted.items() if found[name].dtype != dtype]
        if not cast:
            return None
        dtype = wanted[cast[0]]
        kept = [name for name in wanted if wanted[name] != dtype]
        for name in cast:
            if wanted[name] != dtype:
                return (
                    f"in memory {cast[0]} is {dtype_name(dtype)}, {name} {dtype_name(wanted[name])}, and both "
                    f"load in {dtype_name(found[name].dtype)}"
                )
        self._cast_to = dtype_name(dtype)
        if not kept:
            loaded.to(dtype)
            return None
        self._kept = patterns_of(kept, cast)
        for name, tensor in found.items():
            if not _is_kept(name, self._kept):
                tensor.data = tensor.data.to(dtype)
        return None


def _is_kept(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def patterns_of(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Globs for names, with `*` for the numbers of blocks unless that would match one of the other names.

    >>> patterns_of(["layers.0.norm", "layers.1.norm"], ["layers.0.q"])
    ('layers.*.norm',)
    """
    names = list(names)
    globs = tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    return tuple(names) if any(_is_kept(name, globs) for name in others) else globs


def _attention_in(model: nn.Module) -> str | dict[str, str | None] | None:
    return attention_to_load(getattr(body_of(model) or model, "config", None))


def _from_pretrained(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """Load a folder by the class of a model of transformers or Sentence Transformers."""
    cls: Any = without_fsdp(type(model))
    if body_of(model) is None:
        return cast(nn.Module, cls.from_pretrained(folder, **settings))
    return cast(nn.Module, cls(str(folder), model_kwargs=settings, device="cpu"))


def reference_to(model: nn.Module, inputs: Examples) -> ReferenceOutputs:
    """The answers of a model to the first batch of the examples that a user gave.

    Raises:
        MoQError: They are no examples, or the model cannot answer them.
    """
    batches = batches_for(model, inputs, TEXTS)
    if not batches:
        raise MoQError("inputs hold no example")
    reference = ReferenceOutputs(model, batches[0])
    error = reference.error
    if isinstance(error, MoQError):
        raise error
    if error is not None:
        raise MoQError(
            f"inputs: the model cannot answer them ({one_line(error, named=True)[:300]}); give "
            f"{kind_of_examples(model)}"
        )
    return reference


def kept_batch(
    inputs: Mapping[str, Any], model: nn.Module | None = None
) -> dict[str, Any]:
    """A copy of a batch on the CPU, for use when training has ended.

    A Trainer may replace the model's forward pass, as TRL does, with one that has other
    arguments and outputs. The saved model has the forward pass of its class, so only
    the arguments of that one are kept, for both models.

    Args:
        inputs: As the model's forward pass takes it.
        model: The model that takes the batch; None keeps all of it.
    """
    base = None if model is None else without_peft(model)
    if base is not None and "forward" in vars(base):
        known = inspect.signature(type(base).forward).parameters
        inputs = {name: value for name, value in inputs.items() if name in known}
    return _moved(inputs, "cpu")


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in an output, in order.

    >>> tensors_of({"logits": torch.tensor([0.5]), "hidden": (torch.tensor([1]), None)})
    [tensor([0.5000]), tensor([1])]
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        output = vars(output).values()
    elif not isinstance(output, (tuple, list)):
        return []
    return [tensor for part in output for tensor in tensors_of(part)]


def largest_value(output: Tensor) -> float:
    """The largest magnitude in an output, except for the huge numbers that mask scores.

    >>> largest_value(torch.tensor([1.0, -2.0, torch.finfo(torch.float32).min]))
    2.0
    """
    if not output.is_floating_point() or not output.numel():
        return 0.0
    numbers = output.abs()
    return float(numbers.where(numbers < 1e30, torch.zeros(())).max())


def modules_with_other_weights(model: nn.Module, loaded: nn.Module) -> list[str]:
    """The modules of the loaded model with a parameter or buffer that differs from the model's."""
    found = differences(used_tensors(model).items(), all_tensors(loaded))
    names = [name for name, what, _ in found if what in ("shape", "value")]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def used_tensors(model: nn.Module, added: Iterable[str] = ()) -> dict[str, Tensor]:
    """A model's tensors as its forward pass uses them, under all their names, as they were before PEFT.

    Args:
        model: The model.
        added: Modules that PEFT added, whose tensors are left out.
    """
    tensors = all_tensors(model, added)
    for name, layer in quantized_layers(without_peft(model)).items():
        plain = plain_name(name, added)
        if plain is None:
            continue
        weight = parameter_of(plain, layer.kind)
        tensors[weight] = layer.quantized_weight(tensors[weight].dtype)
        if layer.moq.trained is not None:
            del tensors[scales_of(weight)]
        inputs = layer.moq.inputs
        stored = (None, None) if inputs is None else inputs.stored
        for part, tensor in zip(("scale", "zero_point"), stored, strict=True):
            if tensor is not None:
                tensors[f"{plain}.input_{part}"] = tensor
    return tensors


def all_tensors(model: nn.Module, added: Iterable[str] = ()) -> dict[str, Tensor]:
    """A model's parameters and buffers, named as by `used_tensors`."""
    tensors = {}
    for module_name, module in named_modules(without_peft(model), every=True):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            plain = plain_name(f"{module_name}.{name}", added)
            if plain is not None and tensor is not None:
                tensors[plain] = tensor
    return tensors


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off the libraries' progress bars and advice: moq_hf says in one line what it wrote."""
    with ONE_AT_A_TIME:
        level = transformers_logging.get_verbosity()
        initialize = tqdm.__init__
        transformers_logging.set_verbosity(max(level, logging.ERROR))
        # compressed-tensors has no switch for its bars.
        tqdm.__init__ = lambda bar, *args, **kwargs: initialize(
            bar, *args, **{**kwargs, "disable": True}
        )
        try:
            yield
        finally:
            tqdm.__init__ = initialize
            transformers_logging.set_verbosity(level)


def _moved(inputs: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True)

    found: dict[str, Any] = recursively_apply(move, dict(inputs))
    return found


def _fits(size: int, device: torch.device) -> bool:
    free: int = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    return 1.5 * size < free
