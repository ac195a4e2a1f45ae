"""`save_quantized`'s work: one model on its way into a folder."""

import copy
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import MoQError, one_line
from ..model.inventory import Inventory
from ..model.refresh import check_finite
from ..model.sizes import ModelSizes
from ..names import uncompiled, without_fsdp, without_peft
from ..processes import is_apart
from ..quant_experts import quantized_in
from ..quant_linear import QuantEmbedding, QuantLayer
from ..rows import is_experts, parameter_of
from ..training.controller import MoQController
from ..transformers_seams import has_adapter, initialize_again, tied_parameters
from .encoder import Encoder, plain
from .files import ADAPTER, CONFIG, bytes_in, digest_of, tensors_in
from .layout import Layout
from .load_check import Proof, ReferenceOutputs, quiet
from .state import MAX_PACKED_BITS, StoredLayer, clean_metrics, sha256, state_of, without_paths, write_state
from .tensors import Renamed, Waiting
from .verification import Verification
from .verify import verify_quantized
from .write import publish, write_adapter, write_by_hand, write_packed_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOptions:
    """What goes with a model into its folder.

    Attributes:
        processing_class: Tokenizer or processor to save along.
        controller: The run's, for its history; without one the state holds the config and the bits alone.
        metrics: Figures to keep in `moq_state.json`.
        float_metrics: Those of a model that was trained in float.
        state_dict: The model's float tensors, where they are not in the model itself: a dict, or a mapping that makes
            each when it is asked for. Then no more than one of them is held at a time.
        max_shard_size: The largest size of a weight file, as `save_pretrained` takes it.
    """

    processing_class: Any = None
    controller: MoQController | None = None
    metrics: Mapping[str, Any] | None = None
    float_metrics: Mapping[str, Any] | None = None
    state_dict: Mapping[str, Tensor] | None = None
    max_shard_size: int | str = "50GB"


def write_packed(
    model: nn.Module,
    directory: str | os.PathLike[str],
    options: SaveOptions,
    *,
    inputs: Mapping[str, Any] | ReferenceOutputs | None = None,
    layout: Layout | None = None,
) -> Verification:
    """What `save_quantized` does, but for the model card; raises the same errors. Gives what was written."""
    answers = inputs if isinstance(inputs, ReferenceOutputs) or inputs is None else ReferenceOutputs(model, inputs)
    saving = _Saving(model, directory, options)
    saving.check()
    layouts = [layout] if layout is not None else saving.layouts()
    if answers is None:
        del layouts[1:]
    return saving.save(layouts, answers)


def write_floats(
    model: nn.Module, directory: str | os.PathLike[str], options: SaveOptions, reason: str
) -> Verification:
    """Write any model as floats on their grid: what is left to do for one that cannot be packed.

    The tensors lie in `model.safetensors` under their names in the state dict, for `load_state_dict`. A model of
    transformers has its `config.json` beside them; where its class allows it, `from_pretrained` loads the folder.

    Args:
        model: With quantized layers.
        directory: Where to.
        options: What goes with the model.
        reason: Why it is not packed, for `moq_state.json`.

    Returns:
        What was written.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    return _Saving(model, directory, options).save(["floats"], None, reason=reason, by_hand=True)


class _Saving:
    """One model on its way into a folder."""

    def __init__(self, model: nn.Module, directory: str | os.PathLike[str], options: SaveOptions) -> None:
        self.target = Path(directory).resolve()
        self.options = options
        self.whole_model = uncompiled(model)
        self.model: Any = without_peft(self.whole_model)
        self.whole = Inventory.of(self.whole_model)
        self.inventory = self.whole if self.model is self.whole_model else Inventory.of(self.model)
        found: dict[str, QuantLayer] = {}
        for name, module in self.inventory.modules.items():
            found |= quantized_in(name, module)
        # Embedding tables stand last in the files.
        self.quantized = dict(sorted(found.items(), key=lambda item: isinstance(item[1], QuantEmbedding)))
        self.layers = plain(self.quantized, self.inventory.adapters)
        self.tied = _tied(self.model, self.layers)

    def check(self) -> None:
        bytes_in(self.options.max_shard_size)
        _check_model(self.inventory, self.quantized, self.target, self.options.state_dict is None)

    def layouts(self) -> list[Layout]:
        """Those that transformers can load, the best one first; the last one is right for every model."""
        encoder = Encoder(self.inventory, self._stored(self.tied), "packed", self.tied)
        if all(layer.kind == "conv" for layer in self.layers.values()):
            return ["floats"]
        if encoder.has_conv1d or _parts_are_called(self.model) or _init_reaches_into(self.model, encoder.packed):
            return ["unpacked", "floats"]
        # Servers take asymmetric grids as they are unpacked while loading; tables of more bits would be dense there.
        served = encoder.is_asymmetric and not encoder.tables
        if served or ModelSizes(self.whole, self.quantized).has_one_width:
            return ["unpacked", "packed", "floats"]
        return ["packed", "unpacked", "floats"]

    def save(
        self,
        layouts: list[Layout],
        answers: ReferenceOutputs | None,
        *,
        reason: str | None = None,
        by_hand: bool = False,
    ) -> Verification:
        """Write the first layout that agrees with the answers, if there are any, and else the last one.

        Raises:
            MoQError: The files cannot be written.
        """
        target = self.target
        # Beside what does not exist yet, so that it appears whole; inside what does, perhaps a file system of its own.
        staging = target / ".saving" if target.exists() else target.parent / f".{target.name}.saving"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for layout in layouts:
                # Left by a save that was killed, or by the layout before.
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                encoder = self._write(staging, layout, by_hand)
                proof = None if answers is None else answers.prove(staging)
                if proof is None or proof.agrees is not False:
                    break
                # What is wrong with every layout is said once.
                if reason is None:
                    reason = f"{layout}: {proof.reason}"
                elif str(proof.reason) not in reason:
                    reason = f"{reason}; {layout}: {proof.reason}"
            found = self._write_state(staging, encoder, proof, reason, by_hand)
            publish(staging, target)
        except (OSError, SafetensorError) as error:
            raise MoQError(f"cannot write the packed model to {target}: {one_line(error)}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        _warn(target, encoder, proof, reason)
        return found

    def _stored(self, tied: Mapping[str, Sequence[str]]) -> dict[str, QuantLayer]:
        """The layers whose weights go into the files: without those that are tied to another one."""
        again = {other for others in tied.values() for other in others}
        return {name: layer for name, layer in self.layers.items() if name not in again}

    def _tensors(self) -> Mapping[str, Tensor]:
        """The model's float tensors by the names that they had before PEFT came."""
        path = next(name for name, module in self.whole.modules.items() if module is self.model)
        given = self.options.state_dict or self.model.state_dict()
        return Renamed(given, plain({name.removeprefix(f"{path}."): name for name in given}, self.inventory.adapters))

    def _write(self, folder: Path, layout: Layout, by_hand: bool) -> Encoder:
        beside = self.options
        # Nothing ties again what `load_state_dict` loads.
        tied = {} if by_hand else self.tied
        encoder = Encoder(self.inventory, self._stored(tied), layout, tied)
        with Waiting(folder) as waiting, quiet():
            tensors = self._encode(encoder, waiting)
            if by_hand:
                write_by_hand(folder, self.whole_model, self.model, tensors, beside.processing_class)
                return encoder
            tensors = encoder.rename(self.model, tensors)
            write_packed_files(folder, self.model, tensors, encoder, beside.processing_class, beside.max_shard_size)
            if self.whole_model is not self.model:
                write_adapter(folder / ADAPTER, self.whole_model, beside.state_dict)
        return encoder

    def _encode(self, encoder: Encoder, waiting: Waiting) -> dict[str, Tensor]:
        """What goes into the files, by the names of tensors; of float weights no more than one is held at a time."""
        source, replaced = self._tensors(), encoder.stands_in()
        # What a dict holds is in memory anyway.
        keep = (lambda tensor: tensor) if isinstance(self.options.state_dict, dict | None) else waiting.keep
        # Names that share a tensor go on sharing it.
        values = plain(self.model.state_dict(keep_vars=True), self.inventory.adapters)
        kept: dict[int | str, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for name in source:
            if name not in replaced:
                key = id(values[name]) if name in values else name
                kept[key] = tensors[name] = kept[key] if key in kept else keep(source[name])
        for name, layer in encoder.layers.items():
            parts = encoder.store(name, source[parameter_of(name, layer.kind)])
            tensors |= {part: keep(tensor) for part, tensor in parts.items()}
        return tensors

    def _write_state(
        self, folder: Path, encoder: Encoder, proof: Proof | None, reason: str | None, by_hand: bool
    ) -> Verification:
        state = state_of(self.layers, encoder.stored, self.options.controller)
        state["metrics"] = clean_metrics(self.options.metrics or {})
        state["float_metrics"] = clean_metrics(self.options.float_metrics or {})
        if proof is not None and proof.reason is not None:
            proof = replace(proof, reason=without_paths(proof.reason))
        state["names"] = encoder.names
        state |= {"layout": encoder.layout, "reason": None if reason is None else without_paths(reason)}
        state["proof"] = None if proof is None else proof.to_dict()
        # Nobody's `save_pretrained` wrote it.
        state["by_hand"] = by_hand
        sizes = ModelSizes(self.whole, self.quantized)
        state["parameters"] = {"total": sizes.total, "quantized": sizes.quantized}
        state["tensors"] = {name: digest_of(tensor) for name, tensor in tensors_in(folder)}
        config = folder / CONFIG
        state["config_json"] = sha256(config.read_bytes()) if config.exists() else None
        write_state(folder, state)
        return verify_quantized(folder)


def _tied(model: nn.Module, layers: Mapping[str, QuantLayer]) -> dict[str, list[str]]:
    """Layer to the layers that share its weight and that `from_pretrained` ties to it."""
    found: dict[str, list[str]] = {}
    for other, source in tied_parameters(model).items():
        layer, own = source.rpartition(".")[0], other.rpartition(".")[0]
        if layer in layers and own in layers and layers[layer].float_weight is layers[own].float_weight:
            found.setdefault(layer, []).append(own)
    return found


def _parts_are_called(model: Any) -> bool:
    """Whether users call parts of the model by themselves, past the first forward pass that would unpack all of it."""
    config = model.config
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None))


def _init_reaches_into(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether the model's class initializes modules through the weights of others, which packed ones do not have.

    Raises:
        MoQError: transformers cannot make a model of the class, as `from_pretrained` would have to.
    """
    cls, names = without_fsdp(type(model)), list(packed)
    try:
        with torch.device("meta"):
            shell = cast(Any, cls)(copy.deepcopy(cast(Any, model).config))
        for name in names:
            del shell.get_submodule(name).weight
    except Exception as error:
        raise MoQError(
            f"from_pretrained could not load it, since {cls.__name__}(config) does not make such a model: "
            f"{one_line(error)}"
        ) from error
    try:
        initialize_again(shell)
    except AttributeError:
        return True
    return False


def _check_model(inventory: Inventory, layers: Mapping[str, QuantLayer], target: Path, has_weights: bool) -> None:
    from transformers import PreTrainedModel

    model = inventory.model
    if not isinstance(model, PreTrainedModel):
        raise MoQError(f"only models of transformers can be saved packed, got {type(model).__name__}")
    if has_adapter(model):
        raise MoQError("a model with add_adapter saves its adapters alone: use peft.get_peft_model to have it packed")
    if not layers:
        raise MoQError("the model has no quantized layer: call quantize_model first, or train it with MoQ")
    if target.exists() and not target.is_dir():
        raise MoQError(f"{target} is a file, not a directory")
    sharing = inventory.shared(layers)
    if sharing:
        raise MoQError(f"{'; '.join(sharing)}: a shared weight cannot be packed; leave its layers in full precision")
    first: dict[int, tuple[str, QuantLayer]] = {}
    for name, layer in layers.items():
        other, same = first.setdefault(id(layer.float_weight), (name, layer))
        if _how(layer) != _how(same):
            raise MoQError(f"{name}.weight is also {other}.weight, and quantized in another way: call quantize_model")
    # FSDP2's tensors, and what ZeRO leaves of a weight.
    sharded = [n for n, layer in layers.items() if is_apart(layer.float_weight) or not layer.weight.numel()]
    if sharded and has_weights:
        raise MoQError(
            f"the weights of {', '.join(sharded)} are spread over processes: save with MoQTrainer.save_model"
        )
    is_here = not any(layer.float_weight.is_meta for layer in layers.values())
    if not is_here and has_weights:
        raise MoQError("the weights are on the meta device, which keeps none: give state_dict")
    if is_here and not sharded:
        for layer in layers.values():
            layer.quantized_weight()
        check_finite(layers)


def _how(layer: QuantLayer) -> tuple[Any, ...]:
    """All but the ratios, which follow from it and the weight."""
    state = layer.moq
    turned = layer.kind in ("conv1d", "experts_t")
    return turned, state.bits, state.grid, state.draw, state.blend


def _warn(target: Path, encoder: Encoder, proof: Proof | None, reason: str | None) -> None:
    """Say what of the model is not packed, and whether it does not compute what was evaluated."""
    convolutions = [name for name, layer in encoder.stored.items() if layer.kind == "conv"]
    if convolutions:
        logger.warning(
            "moq_hf: convolutions are saved as floats on the grid, at full size: the packed format has no place for "
            "them: %s",
            ", ".join(convolutions),
        )
    if encoder.layout != "floats":
        _warn_of_dense({name: layer for name, layer in encoder.stored.items() if layer.kind != "conv"})
    if proof is not None and proof.agrees is False:
        logger.warning("moq_hf: %s: what is written does not compute what was evaluated: %s", target, proof.reason)
    elif reason is not None:
        how = (
            "floats on the grid, not packed"
            if encoder.layout == "floats"
            else "weights that are unpacked while loading"
        )
        logger.warning("moq_hf: %s holds %s: %s", target, how, reason)


def _warn_of_dense(stored: Mapping[str, StoredLayer]) -> None:
    dense = {name: layer for name, layer in stored.items() if layer.stored in ("dense", "float")}
    experts = {n for n, c in dense.items() if is_experts(c.kind) and c.stored == "dense" and c.bits <= MAX_PACKED_BITS}
    reasons = {
        f"only 1 to {MAX_PACKED_BITS} bits can be packed": dense.keys() - experts,
        "these are experts that have no place in the format: transposed ones, and asymmetric grids": experts,
    }
    for reason, names in reasons.items():
        if names:
            named = ", ".join(
                f"{name} ({'float' if layer.stored == 'float' else f'{layer.bits} bits'})"
                for name, layer in dense.items()
                if name in names
            )
            logger.warning("moq_hf: these layers are saved as floats, at full size, since %s: %s", reason, named)
