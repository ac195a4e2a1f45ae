"""When weights are quantized anew: all layers after each optimizer step, and the checks that go with it."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .. import quantizer, triton_quant
from ..errors import MoQError
from ..kernels import cpu
from ..kernels.backend import Backend, choose
from ..processes import any_over_ranks, device_of, is_apart, local_part
from ..quant_linear import QuantLayer
from ..rows import lies_in_rows, parameter_of, to_rows
from ..schedule import FLOAT_BITS


def check_readers(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a model used a float weight past its quantized layer: call it where gradients are, in all processes.

    Whoever takes `layer.weight` in a forward pass gets the quantized one. A weight that was taken otherwise (from
    `named_parameters()`, from `_parameters`) has a gradient while its layer was never used.

    Raises:
        MoQError: Names the layers.
    """
    weights = [layer.float_weight for layer in layers.values()]
    used = {id(weight) for weight, layer in zip(weights, layers.values(), strict=True) if layer.moq.used}
    # Elsewhere in the batch, in another process, the layer may have been used.
    was_used = any_over_ranks([id(weight) in used for weight in weights], weights[0])
    has_gradient = [
        not fine and weight.grad is not None and bool((local_part(weight.grad) != 0).any())
        for weight, fine in zip(weights, was_used, strict=True)
    ]
    if any(layer.moq.sharded is not None for layer in layers.values()):
        has_gradient = any_over_ranks(has_gradient, weights[0])
    wrong = [name for name, found in zip(layers, has_gradient, strict=True) if found]
    if wrong:
        named = ", ".join(f'"{name}"' for name in wrong)
        raise MoQError(
            f"the weights of these layers are used without the layers, past their quantization: {', '.join(wrong)}; "
            f"leave them in full precision: add {named} to modules_to_not_convert"
        )


def set_bits(layers: Iterable[tuple[QuantLayer, int]]) -> None:
    """Give layers their bits; those whose ratios numba searches, in as many threads as torch uses."""
    in_threads = []
    for layer, bits in layers:
        weight = layer.float_weight
        # All processes gather shards in the same order.
        if not is_apart(weight) and choose("search", weight, torch.float32, layer.moq.kernel) is cpu:
            in_threads.append((layer, bits))
        else:
            layer.set_bits(bits)
    cpu.each(lambda item: item[0].set_bits(item[1]), in_threads)


def check_finite(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a weight held NaN or Inf when it was last quantized; one wait for the device, not one per layer.

    Raises:
        MoQError: Names the parameters.
    """
    if not layers:
        return
    weight = next(iter(layers.values())).float_weight
    flags_of = [layer.nonfinite() for layer in layers.values()]
    # On the CPU for the meta device, which keeps none.
    found = torch.stack([flag.to(flags_of[0].device if weight.is_meta else device_of(weight)) for flag in flags_of])
    apart = any(layer.moq.sharded is not None for layer in layers.values())
    if not apart and not bool(found.any()):
        return
    flags = found.tolist()
    if apart:
        # What one process holds stops all of them.
        flags = any_over_ranks(flags, weight)
    bad = {name: layer for (name, layer), flag in zip(layers.items(), flags, strict=True) if flag}
    if bad:
        _refuse_nonfinite(bad)


def _refuse_nonfinite(layers: Mapping[str, QuantLayer]) -> None:
    names = ", ".join(parameter_of(name, layer.kind) for name, layer in layers.items())
    raise MoQError(f"NaN or Inf in {names}: training has diverged or the checkpoint is damaged")


class Refresher:
    """Quantizes many layers after each optimizer step: all at once where the kernels run, else one by one.

    Args:
        layers: Quantized layers by name.
    """

    def __init__(self, layers: Mapping[str, QuantLayer]) -> None:
        self._layers = dict(layers)
        self._batches: list[tuple[triton_quant.Batch, list[str]]] = []
        self._single = self._layers
        self._made_for: list[tuple[Any, ...]] = []

    def refresh(self) -> None:
        """Quantize every layer's weight once, from what it is now."""
        if self._identities() != self._made_for:
            self._make_batches()
        for batch, names in self._batches:
            layers = [self._layers[name] for name in names]
            for layer in layers:
                layer.check_unwritten()
            batch.update([layer.moq.draw.step for layer in layers], [layer.moq.blend for layer in layers])
            try:
                batch.run()
            except triton_quant.Unusable:
                # From now on they are not available: what is left, and what was cut off, is for the other paths.
                self._make_batches()
                self.refresh()
                return
            for layer in layers:
                layer.mark_fresh()
                layer.keep(cast(Tensor, layer.moq.weight))
        fast = []
        for layer in self._single.values():
            if _path(layer) is cpu:
                fast.append(layer)
            else:
                layer.refresh()
        cpu.each(QuantLayer.refresh, fast)

    def check_finite(self, *, wait: bool = True, shards: bool = True) -> None:
        """Stop if a weight held NaN or Inf.

        Args:
            wait: For the device. Otherwise weights that a kernel quantized are judged as they were a step or more ago.
            shards: Sharded weights too, which all processes must ask for.

        Raises:
            MoQError: Names the parameters.
        """
        bad = [names[index] for batch, names in self._batches for index in batch.nonfinite(wait=wait)]
        if bad:
            _refuse_nonfinite({name: self._layers[name] for name in bad})
        check_finite({n: layer for n, layer in self._single.items() if shards or layer.moq.sharded is None})

    def _identities(self) -> list[tuple[Any, ...]]:
        """What the batches depend on: they hold pointers."""
        found: list[tuple[Any, ...]] = []
        for layer in self._layers.values():
            state, weight = layer.moq, layer.float_weight
            pointer = 0 if weight.is_meta or is_apart(weight) else weight.data_ptr()
            tensors = (pointer, id(state.weight), id(state.ratio))
            found.append((*tensors, weight.device, weight.dtype, state.bits, state.dtype))
        return found

    def _make_batches(self) -> None:
        self._single = {}
        jobs: dict[torch.device, dict[str, triton_quant.Job]] = {}
        for name, layer in self._layers.items():
            if layer.moq.bits != FLOAT_BITS and _path(layer) is triton_quant:
                jobs.setdefault(layer.float_weight.device, {})[name] = _job(layer)
            else:
                self._single[name] = layer
        self._batches = [(triton_quant.Batch(list(named.values())), list(named)) for named in jobs.values()]
        self._made_for = self._identities()


def _path(layer: QuantLayer) -> Backend:
    """Who quantizes a layer's weight after a step."""
    weight = layer.float_weight
    if is_apart(weight):
        # All processes gather in the same order.
        return quantizer
    # A batch cannot point to rows that do not lie one after the other.
    in_rows = weight.is_contiguous() and lies_in_rows(weight, layer.kind)
    task: Literal["weight", "model"] = "model" if in_rows else "weight"
    return choose(task, weight, layer.moq.dtype or weight.dtype, layer.moq.kernel)


def _job(layer: QuantLayer) -> triton_quant.Job:
    state, weight = layer.moq, layer.float_weight.detach()
    dtype, kept = state.dtype or weight.dtype, state.weight
    if kept is None or kept.device != weight.device or kept.dtype != dtype or kept.shape != weight.shape:
        with torch.inference_mode(False), torch.no_grad():
            layer.keep(torch.empty_like(weight, dtype=dtype))
    out = to_rows(cast(Tensor, state.weight), layer.kind)
    return triton_quant.Job(
        to_rows(weight, layer.kind), out, state.bits, state.grid, state.ratio, state.draw, state.blend
    )
