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
from ..processes import is_gathered_per_pass
from ..quant_linear import QuantLayer
from ..seams.sentence_transformers import body_of
from ..seams.transformers import attention_to_load, has_loss_of_its_own
from ..text import counted, dtype_name
from ..training.measuring import ONE_AT_A_TIME, evaluating
from ..training.samples import check_batch
from ..weight_matrix import parameter_of
from .files import active_adapter

# Where all weights are equal, outputs may differ by the rounding of another kernel,
# relative to the largest output.
ROUNDING = 1e-5
# Tokens of a prompt, and of what is generated after it.
_PROMPT = 8
_GENERATED = 4
# How many of the modules that differ are named.
_NAMED = 5
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Proof:
    """How the outputs of a folder that `from_pretrained` loaded compare with those of the model in memory.

    Attributes:
        agrees: Whether it computes what the model does; None if that could not be found
            out.
        examples: How many examples were compared.
        largest_difference: The largest of all outputs; None if none could be compared.
        tokens: How many tokens each of the two generated for the comparison; None where
            the model in memory does not generate.
        reason: Why it does not agree, or why that is not known; None if it does.
        inputs: What both computed with where training rounds the inputs of layers:
            "rounded", as the files say, or "float", since they cannot say so; None
            where training does not.
        dtype: That to which the loaded model was cast, since it loads in another one
            than the model in memory has; None where it needed no cast.
        kept: Globs for the names of what was not cast, since the model in memory has it
            in another dtype; none where `.to(dtype)` casts all.
        autocast: The dtype of the autocast under which both answered; None without one.
        attention: What `from_pretrained` was given as `attn_implementation`, since the
            model in memory has another one than it would choose; else None.

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
    """Whether a folder was compared and does not compute what the model did."""
    return proof is not None and proof.agrees is False


class _Outputs(NamedTuple):
    """What a model answers, and the tokens that it generates, if it does."""

    tensors: list[Tensor]
    tokens: Tensor | None


class ReferenceOutputs:
    """The outputs of a model in memory, to be compared with those of folders that hold it.

    Each model is called in evaluation mode, without gradients, with the same seed; mode
    and random state of the caller stay as they are. With FSDP every process must make
    one of these; a single process may then compare.

    Args:
        model: In any state; left as it is.
        inputs: A batch as the model's forward pass takes it, with labels or without.
        autocast: The dtype that it is evaluated with under autocast; None: without
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
        # With the inputs of layers rounded, where training does so, and without: not
        # every folder can say how they are.
        self._outputs: dict[bool, _Outputs] = {}
        # Why there are no outputs, and what of the batch the model did not take.
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
                self._outputs[True] = self._answers_of(self.model)
            for layer in rounding:
                layer.moq.inputs = None
            self._outputs[False] = self._answers_of(self.model)
            tensors = [part for part in self._outputs[False].tensors if part.numel()]
            if tensors and all(tensor.isnan().all() for tensor in tensors):
                self.reason = "all outputs of the model in memory are NaN"
        except Exception as error:
            text = one_line(error, named=True)[:300]
            self.error = None if isinstance(error, _NO_MEMORY) else error
            self.reason = f"the model in memory cannot evaluate a batch ({text})"
        finally:
            for layer, rounded in rounding.items():
                layer.moq.inputs = rounded

    def _answers_of(self, model: nn.Module) -> _Outputs:
        tensors = self._outputs_of(model)
        tokens = None
        # Where the model in memory cannot generate, the loaded one need not.
        with contextlib.suppress(Exception):
            tokens = self._tokens_of(model)
        return _Outputs(tensors, tokens)

    def prove(self, folder: str | Path, rounded: bool = False) -> Proof:
        """Load a folder with plain `from_pretrained` and compare it; raises nothing.

        Args:
            folder: The folder.
            rounded: Whether it says how inputs are rounded.
        """
        from compressed_tensors.offload import as_single_threaded

        # A model that was loaded from such a folder rounds by itself.
        found = self._outputs.get(rounded and self._rounds, _Outputs([], None))
        self.outputs, self.tokens = found
        inputs: Literal["rounded", "float"] | None = None
        if self._rounds:
            inputs = "rounded" if rounded else "float"
        self._cast_to: str | None = None
        self._kept: tuple[str, ...] = ()
        self._attention: str | dict[str, str | None] | None = None
        agrees = None
        reason: str | None = "a second copy of the model does not fit beside it"
        difference = None
        # Of several processes compressed-tensors would give each a part to load, and wait for all of them.
        with contextlib.suppress(*_NO_MEMORY), as_single_threaded():
            agrees, reason, difference = self._compare(Path(folder))
        tokens = None if self.tokens is None else self.tokens.numel()
        if difference == float("inf"):
            # JSON has no infinite numbers.
            difference = None
        return Proof(
            agrees,
            self.examples,
            difference,
            tokens,
            reason,
            inputs,
            self._cast_to,
            self._kept,
            None if self._autocast is None else dtype_name(self._autocast),
            self._attention,
        )

    def _compare(self, folder: Path) -> tuple[bool | None, str | None, float | None]:
        """Load the folder and return whether it agrees, why not, and the largest difference of the outputs."""
        if self.reason is not None:
            return None, self.reason, None
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        size += sum(2 * output.nbytes for output in self.outputs)
        if not _fits(size, self._device):
            return (
                None,
                f"a second copy of the model ({size / 1e6:,.0f} MB) does not fit beside it",
                None,
            )
        failure = "from_pretrained cannot load it"
        try:
            loaded = self._load(folder)
            failure = "the loaded model fails"
            if self.tokens is not None:
                # Generation comes before any call of the model, since it must not need
                # what the first call unpacks.
                self._tokens_of(loaded)
            unlike = self._cast(loaded)
            if unlike is not None:
                return False, unlike, None
            outputs = self._outputs_of(loaded)
            tokens = None if self.tokens is None else self._tokens_of(loaded)
        except _NO_MEMORY:
            raise
        except Exception as error:
            return False, f"{failure} ({one_line(error, named=True)[:300]})", None
        if [output.shape for output in outputs] != [
            output.shape for output in self.outputs
        ]:
            return False, "the loaded model has other outputs", None
        if not outputs and tokens is None:
            return None, "the model gives no tensor to compare", None
        return self._compare_outputs(loaded, outputs, tokens)

    def _compare_outputs(
        self, loaded: nn.Module, outputs: list[Tensor], tokens: Tensor | None
    ) -> tuple[bool | None, str | None, float | None]:
        difference = max(map(distance, self.outputs, outputs), default=0.0)
        same_tokens = self.tokens is None or (
            tokens is not None and torch.equal(tokens, self.tokens)
        )
        if same_tokens and difference == 0.0:
            return True, None, difference
        reason = (
            f"outputs differ by {difference:.3g}"
            if difference
            else "other tokens are generated"
        )
        is_small = same_tokens and all(
            distance(a, b) <= ROUNDING * largest_value(a)
            for a, b in zip(self.outputs, outputs, strict=True)
        )
        if any(map(is_gathered_per_pass, self.model.parameters())):
            # To compare the weights, the other processes would have to gather them.
            if is_small:
                return None, f"{reason}, which may be rounding", None
            return False, reason, difference
        names = modules_with_other_weights(self.model, loaded)
        if is_small and not names:
            return True, None, difference
        where = "though all weights are equal"
        if names:
            where = f"first in {', '.join(names[:_NAMED])}"
        return False, f"{reason}, {where}", difference

    def _outputs_of(self, model: nn.Module) -> list[Tensor]:
        outputs = []
        with self._evaluating(model):
            for tensor in tensors_of(model(**self._inputs)):
                output = tensor.detach().cpu()
                outputs.append(output.float() if output.is_floating_point() else output)
        return outputs

    def _tokens_of(self, model: Any) -> Tensor | None:
        """What the model generates after two short prompts, `[examples, 4]`; None where it does not generate."""
        main = model.main_input_name
        # Processes whose texts end after different numbers of tokens would wait for
        # each other.
        if not model.can_generate() or any(
            map(is_gathered_per_pass, model.parameters())
        ):
            return None
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
        return generated[:, -_GENERATED:].cpu()

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
        """Give the loaded model the dtypes of the model in memory, as `how_to_load` tells a user to.

        Returns:
            Why no such lines do it; None where they do, or nothing is to be cast.
        """
        if is_packed(loaded) and any(
            p.dtype != torch.float32 for p in self.model.parameters()
        ):
            with quiet(), torch.no_grad(), torch.random.fork_rng():
                # The first call unpacks the weights.
                loaded(**self._inputs)
        in_memory = all_tensors(self.model)
        # What the model in memory does not have, the scale of inputs, goes with the rest.
        wanted = {
            name: in_memory[plain].dtype
            for name, plain in _floats_in(loaded).items()
            if plain in in_memory
        }
        found = dict([*loaded.named_parameters(), *loaded.named_buffers()])
        cast = [name for name, dtype in wanted.items() if found[name].dtype != dtype]
        if not cast:
            return None
        dtype = wanted[cast[0]]
        kept = [name for name in wanted if wanted[name] != dtype]
        others = sorted(set(cast).intersection(kept))
        if others:
            return (
                f"in memory {cast[0]} is {dtype_name(dtype)}, {others[0]} {dtype_name(wanted[others[0]])}, and both "
                f"load in {dtype_name(found[cast[0]].dtype)}"
            )
        self._cast_to = dtype_name(dtype)
        if not kept:
            loaded.to(dtype)
            return None
        self._kept = patterns_of(kept, cast)
        for name, tensor in found.items():
            if tensor.is_floating_point() and not _is_kept(name, self._kept):
                tensor.data = tensor.data.to(dtype)
        return None


def _floats_in(model: nn.Module) -> dict[str, str]:
    """The floating-point parameters and buffers of a model: the name of each, and its name without PEFT."""
    names = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            inner = name
            if without_peft(model) is not model:
                inner = name.removeprefix("base_model.model.")
            names[name] = str(plain_name(inner, ()))
    return names


def _is_kept(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def patterns_of(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Globs for names, with `*` for the numbers of blocks where no other name is meant by them.

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


def reference_to(model: nn.Module, inputs: Mapping[str, Any]) -> ReferenceOutputs:
    """The answers of a model to a batch that a user gave.

    Raises:
        MoQError: It is no batch, or the model cannot answer it.
    """
    check_batch(inputs)
    reference = ReferenceOutputs(model, inputs)
    error = reference.error
    if isinstance(error, MoQError):
        raise error
    if error is not None:
        raise MoQError(
            f"inputs: the model cannot answer them ({one_line(error, named=True)[:300]}); give a batch as its forward "
            'pass takes it, with tensors, as in tokenizer(text, return_tensors="pt")'
        )
    return reference


def kept_batch(
    inputs: Mapping[str, Any], model: nn.Module | None = None
) -> dict[str, Any]:
    """A copy of a batch on the CPU, to be used when training has ended.

    A Trainer may replace the model's forward pass, as TRL does, by one with other
    arguments and outputs. The saved model has the forward pass of its class, so only
    what that takes is kept, for both models.

    Args:
        inputs: As the model's forward pass takes it.
        model: Whose batch it is; None keeps all of it.
    """
    base = None if model is None else without_peft(model)
    if base is not None and "forward" in vars(base):
        known = inspect.signature(type(base).forward).parameters
        inputs = {name: value for name, value in inputs.items() if name in known}
    return _moved(inputs, "cpu")


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output, in their order.

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


def distance(first: Tensor, second: Tensor) -> float:
    """The largest difference of two outputs; infinite numbers and NaN in both are equal.

    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
    0.5
    """
    if torch.equal(first, second) or not first.numel():
        return 0.0
    # Masked scores are infinite in both; NaN in both is the same output.
    same = (first == second) | (first.isnan() & second.isnan())
    difference = (first.double() - second.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=float("inf")).max())


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
    expected = all_tensors(model)
    layers = {
        str(plain_name(parameter_of(name, layer.kind), ())): layer
        for name, layer in quantized_layers(without_peft(model)).items()
    }
    names: dict[str, None] = {}
    for name, tensor in all_tensors(loaded).items():
        other = expected.get(name)
        if other is not None and name in layers:
            other = layers[name].quantized_weight(other.dtype)
        if other is not None and not torch.equal(tensor, other.to(tensor.dtype)):
            names[name.rpartition(".")[0]] = None
    return list(names)


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers, under all their names, which are those without PEFT."""
    return {
        str(plain_name(f"{module_name}.{name}", ())): tensor
        for module_name, module in named_modules(without_peft(model))
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
    }


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
