"""How long a quantized weight lives: no longer than the forward pass in which it was made.

A layer defines its quantized weight, see `LayerState`. This module decides who makes it and when it is dropped:

- When a pass of the outermost module begins, a GPU makes the model's quantized weights together, with one launch for
  each form of weight. A CPU makes each just before its product, while its caches hold it.
- Within the pass a layer takes the weight that is there, unless it was made from another parameter, for another bit
  width or in another dtype; then the layer computes its own. So changes to weights within a pass count from the next
  pass on.
- When the pass ends, normally or by an exception, all are dropped. Recomputation by checkpointing, modules that are
  called alone, and other threads find none and compute their own. After an interrupt from the keyboard they stay until
  the thread's next pass, or until a weight's version changes.
- Between passes weights stay only while they are held by someone who knows that nothing changes: a Trainer's
  evaluation, `generate`, or `with hold_quantized(model)`. Even then a weight whose version or address has changed is
  made again.
"""

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from . import triton_launch, triton_quant
from .schedule import FLOAT_BITS
from .seams.transformers import (
    frames,
    has_hooks,
    in_evaluation_loop,
    is_exporting,
    is_transformed,
    uses_deepspeed,
)
from .straight_through import straight_through, straight_through_block

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Every call of a module runs this code, whatever the module's class is.
MODULE_CALL = nn.Module._call_impl.__code__


def makes_state(function: _Function) -> _Function:
    """Decorate a function whose tensors outlive a pass: tensors made in inference mode could not be trained with."""
    without_graph = torch.no_grad()(function)
    return torch.inference_mode(False)(without_graph)


# A `LayerState` and a `QuantizedWeight`, whose modules import this one.
State = Any
Layer = Any


class _Copy(NamedTuple):
    """A quantized weight, and what it was made from."""

    weight: Tensor
    version: int
    bits: int
    quantized: Tensor
    # What else it was made from, see `LayerState.sources`, and values that must keep
    # their addresses meanwhile; None if it only has to last for the pass.
    sources: tuple[Any, ...] | None
    keeps_alive: tuple[Any, ...] | None


# A model that reads a weight in two dtypes has two copies.
_Weights = dict[tuple[State, torch.dtype], _Copy]


class _Pass(NamedTuple):
    module: nn.Module
    weights: _Weights
    # States whose weights were made when the pass began, and those whose weights hooks read.
    filled: list[State]
    lent: list[State]


class _Wanted(NamedTuple):
    """A weight that is to be made when a pass begins."""

    state: State
    weight: Tensor
    dtype: torch.dtype
    # The number of the block with which it gets its gradient; None if it gets it alone.
    block: int | None = None


class PassWeights:
    """The quantized weights of a prepared model in the passes that are under way, at most one in each thread.

    The states of all its layers share it. Copies and pickles of it are empty.

    Attributes:
        traced_by: The module whose pass torch.compile traces.
    """

    def __init__(self) -> None:
        self._passes: dict[int, _Pass] = {}
        self._holders = 0
        self._is_evaluating = False
        # How often layers have left the model.
        self.changes = 0
        self._held: _Weights = {}
        self._launchers: defaultdict[torch.device, triton_quant.Launcher] = defaultdict(
            triton_quant.Launcher
        )
        self._traced: list[State] = []
        self.traced_by: nn.Module | None = None
        # Scales of launches, and where in them each layer's are, by the first layer.
        self._scales: dict[State, tuple[Tensor, dict[State, slice]]] = {}

    def __reduce__(self) -> tuple[type["PassWeights"], tuple[()]]:
        return PassWeights, ()

    def begin(self, module: nn.Module, blocks: Sequence[Sequence[Layer]]) -> None:
        """Begin the pass of a module, unless one around it is under way; make the weights for which there is a kernel.

        Args:
            module: The module that is called.
            blocks: Its quantized layers; those of a block get their gradients together.
        """
        if is_exporting() or is_transformed():
            return
        if torch.compiler.is_compiling():
            self._trace(module, blocks)
            return
        thread = get_ident()
        current = self._passes.get(thread)
        if (
            current is not None
            and current.module is not module
            # A pass may have been interrupted from the keyboard, without its hook.
            and is_running(current.module)
        ):
            return
        if self._is_evaluating and not in_evaluation_loop():
            # The loop has ended with an exception.
            self.set_evaluating(False)
        if self.traced_by is not None and not is_running(self.traced_by):
            # The pass that torch.compile traced has ended with an exception.
            self._end_trace()
        if torch.is_grad_enabled() and self._held:
            # An optimizer's step may follow, and goes unnoticed.
            self._held = {}
        current = _Pass(module, self._held if self._is_held() else {}, [], [])
        self._passes[thread] = current
        if blocks and triton_launch.available(blocks[0][0].float_weight.device):
            self._fill(current, blocks)

    def end(self, module: nn.Module, has_failed: bool) -> None:
        """End the pass of a module, unless it was part of another one, and drop its quantized weights.

        Args:
            module: The module that was called.
            has_failed: Whether it raised an exception.
        """
        if self.traced_by is module:
            self._end_trace()
        if torch.compiler.is_compiling():
            return
        thread = get_ident()
        current = self._passes.get(thread)
        if current is None or current.module is not module:
            return
        del self._passes[thread]
        for state in current.lent:
            state.lent = None
        for state in current.filled:
            if has_failed:
                state.awaits_call = False
            elif torch.is_grad_enabled():
                state.was_left_out |= state.awaits_call

    def take(self, state: State, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The quantized weight of a layer if the pass under way has it, or it is held; else None.

        Args:
            state: The layer's state.
            weight: Its float weight as the pass has it.
            dtype: The dtype that is wanted.
        """
        current = self._passes.get(get_ident())
        if current is not None:
            weights = current.weights
        elif self._holders and not torch.is_grad_enabled():
            weights = self._held
        else:
            return None
        kept = weights.get((state, dtype))
        if kept is None or kept.weight is not weight or kept.bits != state.bits:
            return None
        if (
            kept.version != version_of(weight)
            and current is not None
            and not is_running(current.module)
        ):
            # The pass is over: it was interrupted.
            del self._passes[get_ident()]
            return None
        quantized = kept.quantized
        needs_gradient = weight.requires_grad and torch.is_grad_enabled()
        if (
            quantized.device != weight.device
            or (needs_gradient and not quantized.requires_grad)
            or (kept.sources is not None and kept.sources != state.sources(weight)[0])
        ):
            return None
        state.was_taken = True
        return quantized

    def keep(
        self, state: State, weight: Tensor, dtype: torch.dtype, quantized: Tensor
    ) -> None:
        """Keep a quantized weight until the pass under way ends."""
        current = self._passes.get(get_ident())
        weights = self._held if current is None else current.weights
        is_held = weights is self._held
        if is_held and (not self._is_held() or quantized.requires_grad):
            return
        sources = alive = None
        # What adapters add to a parameter may change within a pass.
        if is_held or state.lora:
            sources, alive = state.sources(weight)
        version = version_of(weight)
        weights[state, dtype] = _Copy(
            weight, version, state.bits, quantized, sources, alive
        )

    def drop(self, state: State) -> None:
        """Forget the quantized weight of a layer, because something that it was made from has changed."""
        passes = [current.weights for current in tuple(self._passes.values())]
        for weights in (self._held, *passes):
            for key in [key for key in tuple(weights) if key[0] is state]:
                weights.pop(key, None)
        self._end_trace()

    def lend(self, state: State) -> None:
        """Note that a hook has read the quantized weight of a layer, to forget that when the pass ends."""
        current = self._passes.get(get_ident())
        if current is not None:
            current.lent.append(state)

    def scales_of_launches(self) -> list[tuple[Tensor, dict[State, slice]]]:
        """Hand over the float32 scales of the weights that were last made together, with the place of each layer's.

        They are not finite where a weight held NaN or Inf.
        """
        scales, self._scales = self._scales, {}
        return list(scales.values())

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Let quantized weights outlive passes without gradients."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._forget()

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Begin or end holding weights as `hold` does, around the evaluation loop of a Trainer."""
        self._is_evaluating = is_evaluating
        self._forget()

    def _is_held(self) -> bool:
        holds = self._holders > 0 or self._is_evaluating
        return holds and not torch.is_grad_enabled()

    def _forget(self) -> None:
        if not (self._holders or self._is_evaluating):
            # A new dict, because a pass under way may use the old one.
            self._held = {}

    def _fill(self, current: _Pass, blocks: Sequence[Sequence[Layer]]) -> None:
        """Make those weights of a pass that a kernel can make, with one launch for each form of weight."""
        wanted = self._wanted(current, blocks)
        made = self._make_together(wanted)
        by_block: defaultdict[Any, list[_Wanted]] = defaultdict(list)
        for each in wanted:
            if each.state not in made:
                continue
            each.state.awaits_call = True
            each.state.was_taken = False
            current.filled.append(each.state)
            if each.block is None:
                result = straight_through(each.weight, made[each.state])
                self.keep(each.state, each.weight, each.dtype, result)
            else:
                # A Function computes on one device.
                by_block[each.block, each.weight.device].append(each)
        for block in by_block.values():
            results = straight_through_block(
                [each.weight for each in block], [made[each.state] for each in block]
            )
            for each, result in zip(block, results, strict=True):
                self.keep(each.state, each.weight, each.dtype, result)

    def _wanted(
        self, current: _Pass, blocks: Sequence[Sequence[Layer]]
    ) -> list[_Wanted]:
        """Find the weights to make ahead."""
        wanted: list[_Wanted] = []
        with_gradients = torch.is_grad_enabled()
        hooks_are_strict = uses_deepspeed()
        for number, layers in enumerate(blocks):
            for layer in layers:
                state = layer.moq
                weight = layer.float_weight
                # If it still awaits a call, the last pass made it for nothing.
                if state.awaits_call or not state.may_be_made_ahead(weight):
                    continue
                dtype = state.next_dtype(weight)
                if current.weights and self.take(state, weight, dtype) is not None:
                    # It is held.
                    continue
                block = None
                # If a layer of the block is not called, hooks of its weight are called with None.
                is_sure = state.was_taken and not state.was_left_out
                if with_gradients and weight.requires_grad and is_sure:
                    is_strict = hooks_are_strict or has_hooks(weight)
                    block = None if is_strict else number
                wanted.append(_Wanted(state, weight, dtype, block))
        return wanted

    @makes_state
    def _make_together(self, wanted: Sequence[_Wanted]) -> dict[State, Tensor]:
        """Make those weights that a kernel can make, each in its own memory and without a graph."""
        by_device: defaultdict[torch.device, list[_Wanted]] = defaultdict(list)
        for each in wanted:
            by_device[each.weight.device].append(each)
        made: dict[State, Tensor] = {}
        for device, those in by_device.items():
            if not triton_launch.available(device):
                continue
            jobs = [each.state.job(each.weight, each.dtype) for each in those]
            results = self._launchers[device](jobs)
            scales: dict[State, slice] = {}
            for each, values, place in zip(
                those, results.values, results.places, strict=True
            ):
                if values is not None:
                    made[each.state] = each.state.shaped(values, each.weight)
                    scales[each.state] = place
            if scales:
                self._scales[next(iter(scales))] = results.scales, scales
        return made

    def make_for_graph(
        self,
        states: Sequence[State],
        weights: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The weights by which a compiled graph multiplies, each in its own memory; see `quantized_in_graph`."""
        pairs = list(zip(states, weights, strict=True))
        wanted = [_Wanted(s, w, dtype) for s, w in pairs if s.may_be_made_ahead(w)]
        made = self._make_together(wanted)
        results = []
        for state, weight in pairs:
            state.used = True
            quantized = made.get(state)
            if quantized is None and state.bits == FLOAT_BITS:
                quantized = weight.to(
                    dtype, copy=True, memory_format=torch.contiguous_format
                )
            elif quantized is None:
                quantized = state.fake_quantize(weight, dtype)
            results.append(quantized)
        return results

    def _trace(self, module: nn.Module, blocks: Sequence[Sequence[Layer]]) -> None:
        """Make torch.compile begin its graph with one operator that makes all weights of the pass."""
        if self.traced_by is not None and self.traced_by is not module:
            return
        self._end_trace()
        self.traced_by = module
        by_dtype: dict[torch.dtype, list[tuple[State, Tensor]]] = {}
        for block in blocks:
            for layer in block:
                state = layer.moq
                weight = layer.float_weight
                if state.may_be_traced_ahead(weight):
                    dtype = state.next_dtype(weight)
                    by_dtype.setdefault(dtype, []).append((state, weight.detach()))
        for dtype, those in by_dtype.items():
            numbers = torch.tensor([state.number for state, _ in those], device="cpu")
            weights = [weight for _, weight in those]
            made = quantized_in_graph(weights, numbers, dtype)
            for (state, _), quantized in zip(those, made, strict=True):
                state.ahead = quantized
                self._traced.append(state)

    def _end_trace(self) -> None:
        for state in self._traced:
            state.ahead = None
        self._traced = []
        self.traced_by = None


def is_running(module: nn.Module) -> bool:
    """True if this thread is inside a call of the module.

    It looks at the stack, since a flag would not survive an interrupt from the keyboard.
    """
    return any(
        frame.f_code is MODULE_CALL and called_module(frame) is module
        for frame in frames()
    )


def called_module(frame: FrameType) -> Any:
    """The module that a frame of `MODULE_CALL` calls."""
    return frame.f_locals[MODULE_CALL.co_varnames[0]]


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes that PyTorch has seen; always 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


_numbers = itertools.count()
_of_number: "weakref.WeakValueDictionary[int, State]" = weakref.WeakValueDictionary()


def numbered(state: State) -> int:
    """Number a layer's state, so that compiled graphs can refer to it."""
    number = next(_numbers)
    _of_number[number] = state
    return number


# A CUDA graph would repeat it at the bits at which it was captured, so inductor must leave
# it out of the graphs of mode "reduce-overhead".
@torch.library.custom_op(
    "moq_hf::quantized", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def quantized_in_graph(
    weights: list[Tensor], numbers: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Quantize weights in a compiled graph as eager code does, at the bits that their layers have at that time.

    Args:
        weights: Whole float weights, or rows of a table, of one model, without a graph.
        numbers: The layers' numbers, int64, or ~number for rows: a tensor, because graphs
            do not depend on its values, so that layers of one class share a graph.
        dtype: Dtype of the results.
    """
    states = []
    for number in numbers.tolist():
        is_whole = number >= 0
        state = _of_number[number if is_whole else ~number]
        if is_whole:
            state.read_dtype = dtype
        states.append(state)
    passes: PassWeights = states[0].passes
    return passes.make_for_graph(states, weights, dtype)


@quantized_in_graph.register_fake
def _(weights: list[Tensor], numbers: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.empty(weight.shape, dtype=dtype, device=weight.device)
        for weight in weights
    ]
