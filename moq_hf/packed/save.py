"""`save_quantized`'s work: one model on its way into a folder."""

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import MoQError
from ..model.convert import quant_embeddings, quant_layers
from ..model.inventory import Inventory, is_linear
from ..model.refresh import check_finite
from ..model.sizes import ModelSizes
from ..names import adapters, named_modules, uncompiled, without_fsdp, without_peft
from ..processes import is_sharded
from ..quant_linear import QuantLayer
from ..training.controller import MoQController
from .files import CONFIG, INDEX, SINGLE, WEIGHTS, digest_of, tensors_in, text_of
from .layout import Encoder, Layout, plain
from .proof import ADAPTER, Answers, Proof, quiet
from .state import MAX_PACKED_BITS, StoredLayer, clean_metrics, hub_id, sha256, state_of, without_paths, write_state
from .verify import Verification, verify_quantized

logger = logging.getLogger(__name__)
# What would make transformers load an older model, or put its adapters, into a new one.
_OF_ANOTHER = ("config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def write_packed(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Any] | Answers | None = None,
    layout: Layout | None = None,
    **saved: Any,
) -> "Verification":
    """What `save_quantized` does, but for the model card; same arguments and errors. Gives what was written."""
    answers = inputs if isinstance(inputs, Answers) or inputs is None else Answers(model, inputs)
    saving = _Saving(model, directory, **saved)
    saving.check()
    layouts = [layout] if layout is not None else saving.layouts()
    if answers is None:
        del layouts[1:]
    return saving.save(layouts, answers)


def write_floats(model: nn.Module, directory: str | os.PathLike[str], reason: str, **saved: Any) -> "Verification":
    """Write any model as floats on their grid: what is left to do for one that cannot be packed.

    The tensors lie in `model.safetensors` under their names in the state dict, for `load_state_dict`. A model of
    transformers has its `config.json` beside them; where its class allows it, `from_pretrained` loads the folder.

    Args:
        model: With quantized layers.
        directory: Where to.
        reason: Why it is not packed, for `moq_state.json`.
        **saved: What goes with the model: the keyword arguments that `save_quantized` has for it.

    Returns:
        What was written.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    return _Saving(model, directory, **saved).save(["floats"], None, reason=reason, by_hand=True)


class _Saving:
    """One model on its way into a folder."""

    def __init__(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        *,
        processing_class: Any = None,
        controller: MoQController | None = None,
        metrics: Mapping[str, Any] | None = None,
        float_metrics: Mapping[str, Any] | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
    ) -> None:
        self.target = Path(directory).resolve()
        self.whole_model = uncompiled(model)
        self.model: Any = without_peft(self.whole_model)
        self.added = adapters(self.model)
        self.quantized: dict[str, QuantLayer] = {**quant_layers(self.model), **quant_embeddings(self.model)}
        self.layers = plain(self.quantized, self.added)
        self.processing_class, self.controller = processing_class, controller
        self.metrics = {"metrics": clean_metrics(metrics or {}), "float_metrics": clean_metrics(float_metrics or {})}
        self.state_dict, self.max_shard_size = state_dict, max_shard_size

    def check(self) -> None:
        _check_model(self.model, self.quantized, self.target, self.state_dict is None)

    def layouts(self) -> list[Layout]:
        """Those that transformers can load, the best one first; the last one is right for every model."""
        plan = Encoder(self.model, self.layers, "packed")
        packed = [name for name, layer in self.layers.items() if plan.is_packed(layer)]
        if plan.has_conv1d or _parts_are_called(self.model) or _init_reaches_into(self.model, packed):
            return ["unpacked", "floats"]
        return ["packed", "unpacked", "floats"]

    def save(
        self, layouts: list[Layout], answers: Answers | None, *, reason: str | None = None, by_hand: bool = False
    ) -> "Verification":
        """Write the first layout that agrees with the answers, if there are any, and else the last one."""
        target = self.target
        # Beside what does not exist yet, so that it appears whole; inside what does, perhaps a file system of its own.
        staging = target / ".saving" if target.exists() else target.parent / f".{target.name}.saving"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for layout in layouts:
                # Left by a save that was killed, or by the layout before.
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                plan = self._write(staging, layout, by_hand)
                proof = None if answers is None else answers.prove(staging)
                if proof is None or proof.agrees is not False:
                    break
                # What is wrong with every layout is said once.
                if reason is None:
                    reason = f"{layout}: {proof.reason}"
                elif str(proof.reason) not in reason:
                    reason = f"{reason}; {layout}: {proof.reason}"
            found = self._write_state(staging, layout, plan, proof, reason, by_hand)
            _publish(staging, target)
        except (OSError, SafetensorError) as error:
            raise MoQError(f"cannot write the packed model to {target}: {text_of(error)}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if layout != "floats":
            _warn_of_dense(plan.stored)
        if proof is not None and proof.agrees is False:
            logger.warning("moq_hf: %s: what is written does not compute what was evaluated: %s", target, proof.reason)
        elif reason is not None:
            logger.warning(
                "moq_hf: %s holds %s: %s",
                target,
                "floats on the grid, not packed" if layout == "floats" else "weights that are unpacked while loading",
                reason,
            )
        return found

    def _tensors(self) -> dict[str, Tensor]:
        path = next(name for name, module in self.whole_model.named_modules() if module is self.model)
        given = {name.removeprefix(f"{path}."): tensor for name, tensor in (self.state_dict or {}).items()}
        return plain(given or self.model.state_dict(), self.added)

    def _write(self, folder: Path, layout: Layout, by_hand: bool) -> "Encoder":
        tensors = self._tensors()
        plan = Encoder(self.model, self.layers, layout)
        for name, layer in self.layers.items():
            plan.stored[name] = plan.store(name, layer, tensors)
        with quiet():
            if by_hand:
                _write_by_hand(folder, self.whole_model, self.model, tensors, self.processing_class)
            else:
                _write(folder, self.model, tensors, plan, self.processing_class, self.max_shard_size)
                if self.whole_model is not self.model:
                    _write_adapter(folder / ADAPTER, self.whole_model, self.state_dict)
        return plan

    def _write_state(
        self, folder: Path, layout: Layout, plan: "Encoder", proof: Proof | None, reason: str | None, by_hand: bool
    ) -> "Verification":
        state = state_of(self.layers, plan.stored, self.controller) | self.metrics
        if proof is not None and proof.reason is not None:
            proof = replace(proof, reason=without_paths(proof.reason))
        state |= {"layout": layout, "reason": None if reason is None else without_paths(reason)}
        state["proof"] = None if proof is None else proof.to_dict()
        # Nobody's `save_pretrained` wrote it.
        state["by_hand"] = by_hand
        sizes = ModelSizes(Inventory.of(self.whole_model), self.quantized)
        state["parameters"] = {"total": sizes.total, "quantized": sizes.quantized}
        state["tensors"] = {name: digest_of(tensor) for name, tensor in tensors_in(folder)}
        config = folder / CONFIG
        state["config_json"] = sha256(config.read_bytes()) if config.exists() else None
        write_state(folder, state)
        return verify_quantized(folder)


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
            f"{text_of(error)}"
        ) from error
    for module in shell.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    try:
        shell.initialize_weights()
    except AttributeError:
        return True
    return False


def _check_model(model: nn.Module, layers: Mapping[str, QuantLayer], target: Path, has_weights: bool) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise MoQError(f"only models of transformers can be saved packed, got {type(model).__name__}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise MoQError("a model with add_adapter saves its adapters alone: use peft.get_peft_model to have it packed")
    if not layers:
        raise MoQError("the model has no quantized layer: call quantize_model first, or train it with MoQ")
    if target.exists() and not target.is_dir():
        raise MoQError(f"{target} is a file, not a directory")
    sharing = Inventory.of(model).shared(layers)
    if sharing:
        raise MoQError(f"{'; '.join(sharing)}: a shared weight cannot be packed; leave its layers in full precision")
    # FSDP2's tensors, and what ZeRO leaves of a weight.
    sharded = [n for n, layer in layers.items() if is_sharded(layer.weight) or not layer.weight.numel()]
    if sharded and has_weights:
        raise MoQError(
            f"the weights of {', '.join(sharded)} are spread over processes: save with MoQTrainer.save_model"
        )
    if not sharded:
        for layer in layers.values():
            layer.quantized_weight()
        check_finite(layers)


def _write(
    folder: Path, model: Any, tensors: dict[str, Tensor], plan: Encoder, processing_class: Any, shard: int | str
) -> None:
    # The names of the modules in the file: renaming rules for old checkpoints do not know packed tensors.
    model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=shard, save_original_format=False)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    modules = plain(dict(named_modules(model)), adapters(model))
    linears = [name for name, module in modules.items() if is_linear(module)]
    packed = {key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")}
    config = plan.config([name for name in linears if name not in packed])
    if config is None:
        return
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig

    ModelCompressor(QuantizationConfig.model_validate(config)).update_config(str(folder))
    path = folder / CONFIG
    document = json.loads(path.read_text(encoding="utf-8"))
    # Scales are made in the model's dtype: a narrower one would round them.
    document["dtype"] = "float32"
    if plan.at_load:
        document["quantization_config"]["dequantize"] = True
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plan.dtypes - {"torch.float32"}:
        logger.warning(
            "moq_hf: the weights are %s; the packed model is a float32 one, so its results differ by the rounding of "
            "that dtype",
            ", ".join(sorted(plan.dtypes)),
        )


def _write_by_hand(
    folder: Path, whole_model: nn.Module, model: Any, tensors: Mapping[str, Tensor], processing_class: Any
) -> None:
    """The state dict in a file, whatever the model is: each tensor by itself, as no two may share memory there."""
    apart = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items() if isinstance(t, Tensor)}
    save_file(apart, folder / SINGLE, metadata={"format": "pt"})
    left = [f"{name} (no tensor)" for name in tensors.keys() - apart.keys()]
    if whole_model is not model:
        _write_adapter(folder / ADAPTER, whole_model, None)
    for part in (getattr(model, "config", None), processing_class):
        try:
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # The weights are what must not be lost.
        except Exception as error:
            left.append(f"{type(part).__name__} ({text_of(error)})")
            if part is not processing_class:
                (folder / CONFIG).unlink(missing_ok=True)
    if left:
        logger.warning("moq_hf: not saved beside the weights: %s", ", ".join(left))


def _write_adapter(folder: Path, model: Any, state_dict: Mapping[str, Tensor] | None) -> None:
    """PEFT's own files, but for a path on this machine and the card that has it."""
    model.save_pretrained(folder, state_dict=state_dict)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        document["base_model_name_or_path"] = hub_id(document.get("base_model_name_or_path"))
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # Nothing loads without one of these, while a class of transformers makes do without a config. So they go first, and
    # that of the new model comes last.
    entries = (SINGLE, INDEX)
    for name in entries:
        (target / name).unlink(missing_ok=True)
    for path in list(target.iterdir()):
        if path.is_file() and (WEIGHTS.fullmatch(path.name) or path.name in _OF_ANOTHER):
            path.unlink()
    shutil.rmtree(target / ADAPTER, ignore_errors=True)
    for path in sorted(staging.rglob("*"), key=lambda path: path.name in entries):
        if path.is_file():
            place = target / path.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def _warn_of_dense(stored: Mapping[str, StoredLayer]) -> None:
    dense = {name: layer for name, layer in stored.items() if layer.stored in ("dense", "float")}
    if dense:
        named = ", ".join(
            f"{name} ({'float' if layer.stored == 'float' else f'{layer.bits} bits'})" for name, layer in dense.items()
        )
        logger.warning(
            "moq_hf: these layers are saved as floats, at full size, since only 1 to %d bits can be packed: %s",
            MAX_PACKED_BITS,
            named,
        )
