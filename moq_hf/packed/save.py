"""Writes one model into a folder: `save_quantized`, and `deliver`, which leaves a result whatever the model is."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ..errors import (
    MoQError,
    check_choice,
    one_line,
    read_json,
    shortened,
    write_json,
)
from ..formats.table import LAYOUTS, Layout, at_full_size, first_layout, lacking
from ..lora import is_merged
from ..model.convert import quant_layers, quantized_layers
from ..model.inventory import Inventory
from ..model.sizes import ModelSizes, has_lora_on, is_unpacked_while_loading
from ..names import pretrained, uncompiled, without_peft
from ..processes import is_gathered_per_pass
from ..quant_linear import QuantLayer
from ..seams.sentence_transformers import body_of, save_around, takes_pairs
from ..seams.transformers import (
    has_adapter,
    refuse_older,
    start_in_base,
    takes_apart,
    ties_in_files,
    untie,
    without_generation_config,
    without_start,
    write_packing_config,
)
from ..text import quoted
from ..trained_scales import scales_of
from ..training.controller import MoQController, handed_dtype
from ..training.samples import Examples
from ..weight_matrix import parameter_of
from ..weight_spec import WeightSpec
from .card import how_to_load, write_card, write_run_card
from .encode import Encoder, without_peft_names
from .files import (
    ADAPTER,
    CONFIG,
    INDEX,
    MERGED_ADAPTER,
    SINGLE,
    WEIGHTS,
    alone_at,
    digest_of_configs,
    move_files,
    remove,
    save_beside,
    staged,
)
from .load_check import Proof, ReferenceOutputs, has_failed, quiet, reference_to
from .reading import seal
from .state import (
    STATE_NAME,
    clean_metrics,
    deploy_command,
    hub_id,
    read_layers,
    state_of,
    without_paths,
    write_state,
)
from .verify import Verification, recorded

logger = logging.getLogger(__name__)
_CARD = "README.md"
# Every card that moq_hf writes contains this.
_MARK = b"Mixture-of-Quantization (moq_hf)"
# Left over from an older model, these would make transformers load it, or its adapters,
# in place of the new one.
_STALE_FILES = (
    "config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of `save_quantized` that say what goes into the folder with the model.

    Attributes:
        teaching: What `MoQMixin.teaching` says; None without one.
        run: The Trainer, for the card: what it was trained on, and how.
    """

    processing_class: Any = None
    controller: MoQController | None = None
    metrics: Mapping[str, Any] | None = None
    float_metrics: Mapping[str, Any] | None = None
    state_dict: Mapping[str, Tensor] | None = None
    teaching: Mapping[str, Any] | None = None
    run: Any = None
    max_shard_size: int | str | None = None


@dataclass(frozen=True)
class Delivered:
    """A folder that a run has written.

    Attributes:
        path: The folder.
        bytes: Size of its weight files together.
        proof: How its answers compared with the model's; None if they were not.
        summary: Its form, how it was proven, and its size, in sentences.
        how_to_load: The Python expression that loads it, or lines that make `model`.
        deploy: The command that serves it, or writes it for another runtime; None if there is none.
    """

    path: Path
    bytes: int
    proof: Proof | None
    summary: str
    how_to_load: str
    deploy: str | None = None

    def closing(self) -> str:
        """The summary, and a line each on how to load and how to deploy it."""
        deploy = "" if self.deploy is None else f"\nDeploy: {self.deploy}"
        return f"{self.summary}\nLoad it: {self.how_to_load}{deploy}"


def save_quantized(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    processing_class: Any = None,
    controller: MoQController | None = None,
    metrics: Mapping[str, Any] | None = None,
    float_metrics: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    inputs: Examples | None = None,
    layout: Layout | None = None,
    max_shard_size: int | str | None = None,
) -> Path:
    """Write `model` as a packed checkpoint that plain `from_pretrained` loads, with the same logits bit for bit.

    The model stays as it is. A new directory appears complete or not at all. An
    existing one keeps its other files; its old model, with all that was saved with it,
    is deleted before the first new file is moved in, and nothing loads before the last
    one is there. A `README.md` that moq_hf did not write stays. Processes that save to
    one directory at once wait for each other.

    A `PeftModel` has its base model packed; `save_pretrained` writes its adapters into
    the folder `adapter`, or into `lora` if they are merged into the model.

    With `inputs` the files are then loaded by plain `from_pretrained` and compared with
    the model. Where a layout does not agree, the next one takes its place, and floats
    come last, with a warning. What was written, whether it was verified and
    how to load it is printed.

    Args:
        model: A transformers model with quantized layers, or a `PeftModel` around one.
        directory: The folder to write; made if missing.
        processing_class: Tokenizer or processor to save with the model.
        controller: The run's controller, for its history; without one the state holds
            only the config and the bits.
        metrics: Figures to keep in `moq_state.json`.
        float_metrics: The same figures of a model that was trained in float.
        state_dict: The model's float tensors, if they are not in the model itself: a
            dict, or a mapping that makes each when it is asked for. At most one of the
            layers' weights is in memory at a time then.
        inputs: Examples as `quantize_model` takes them, to check the files with: a
            batch as the model's forward pass takes it, the first of several, or the
            first 32 texts; None does not load the files.
        layout: How the files hold the weights: "packed", "unpacked" (unpacked while
            loading) or "floats"; None is the first of them that transformers can load.
            "gemma" is transformers' own `quant_method`, which loading leaves packed;
            "mxfp4" is that of GPT-OSS, and comes first where its experts are in MXFP4.
        max_shard_size: Size of a file of weights, as for `save_pretrained`; None is
            the default there.

    Returns:
        The directory.

    Raises:
        MoQError: The model is not one of transformers or has no quantized layer, a
            quantized weight is shared, sharded or holds NaN or Inf, transformers cannot
            make a model of its class, `layout` is not one of these, or is "gemma" and
            has no place for a layer, the model cannot answer `inputs`, or the files
            cannot be written.

    >>> import tempfile
    >>> from moq_hf import quantize_model, verify_quantized
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    >>> model = quantize_model(model, bits=4, embeddings=None)  # doctest: +ELLIPSIS
    moq_hf: 7 linear layers go to 4 bits; quantized: ...
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = verify_quantized(save_quantized(model, folder), model)  # doctest: +ELLIPSIS
    moq_hf: saved in ... Not verified: nothing was compared. 0.0112 MB, float 0.0146.
    Load it: BertForSequenceClassification.from_pretrained(...)
    Prove it: save_quantized(..., inputs=batch) loads the files and compares their answers
    >>> found.layers["bert.pooler.dense"].stored, found.layers["bert.pooler.dense"].bits
    ('packed', 4)
    """
    options = SaveOptions(
        processing_class,
        controller,
        metrics,
        float_metrics,
        state_dict,
        max_shard_size=max_shard_size,
    )
    check_choice("layout", layout, (None, *LAYOUTS))
    reference = None if inputs is None else reference_to(model, inputs)
    saving = _Saving(model, directory, options)
    saved = saving.save(reference, layout)
    # A run has said so before its first step.
    if controller is None and not saved.state["rounds_inputs"]:
        _warn_of_float_inputs(saving)
    done = saving.delivered(saved)
    text = f"moq_hf: saved in {done.path}. {done.closing()}"
    if inputs is None:
        kind = "batch"
        if body_of(saving.whole_model) is not None:
            kind = "pairs" if takes_pairs(saving.whole_model) else "texts"
        text += f"\nProve it: save_quantized(..., inputs={kind}) loads the files and compares their answers"
    tqdm.write(text)
    return done.path


def deliver(
    model: nn.Module,
    directory: str | os.PathLike[str],
    options: SaveOptions,
    reference: ReferenceOutputs | None,
    layout: Layout | None = None,
) -> Delivered:
    """Write the result of a run: packed if that can be loaded, else rounded floats, with a warning that says why.

    Args:
        model: A model with quantized layers.
        directory: The folder to write.
        options: What goes with the model.
        reference: The model's outputs, to check the files with; None does not load
            them.
        layout: The layout to write, or an error is raised; None takes the first one
            that can be loaded.

    Returns:
        What was written.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    saving = _Saving(model, directory, options)
    try:
        saved = saving.save(reference, layout, may_be_floats=True)
    # Training is done: whatever a model's own code raises here must not lose its
    # result.
    except Exception as error:
        if layout is not None:
            raise
        reason = one_line(error, named=not isinstance(error, MoQError))
        saved = saving.save_by_hand(reason)
    return saving.delivered(saved)


class _Saving:
    """One model on its way into a folder."""

    def __init__(
        self, model: nn.Module, directory: str | os.PathLike[str], options: SaveOptions
    ) -> None:
        self.target = Path(directory)
        self.options = options
        self.whole_model = uncompiled(model)
        self.is_adapted = without_peft(self.whole_model) is not self.whole_model
        self.is_merged = is_merged(self.whole_model)
        self.whole = Inventory.of(self.whole_model, self.is_merged)
        self._save_part(pretrained(self.whole_model))

    def _save_part(self, model: Any) -> None:
        """Save this part of the model, the one whose layers are encoded."""
        self.model = model
        self.inventory = Inventory.of(model, self.is_merged)
        # Embedding tables come last in the files.
        self.quantized = quant_layers(model) | quantized_layers(model)
        self.layers = without_peft_names(self.quantized, self.inventory.adapters)
        # `load_state_dict` ties nothing.
        self.tied: Mapping[str, str] = {}
        self.unties = False
        # Why `save_pretrained` does not write the files.
        self.by_hand: str | None = None
        # Optional files that could not be written: name to the reason.
        self.not_saved: dict[str, str] = {}

    def save(
        self,
        reference: ReferenceOutputs | None,
        layout: Layout | None = None,
        may_be_floats: bool = False,
    ) -> Verification:
        """Write the layout that is asked for; else the first one that agrees with the reference, if there is one.

        Args:
            reference: The model's outputs; None does not load the files.
            layout: The layout that is asked for.
            may_be_floats: Write floats where the installed libraries cannot load codes.

        Raises:
            MoQError: The model cannot be packed, or the files cannot be written.
        """
        self._check()
        self.tied, self.unties = self._ties()
        layouts, reason = self._layouts(layout, may_be_floats)
        return self._save_first_of(layouts, reason, reference)

    def save_by_hand(self, reason: str) -> Verification:
        """Write any model as rounded floats, as a last resort for one that cannot be packed.

        The tensors are in `model.safetensors` under their names in the state dict, for
        `load_state_dict`. A model of transformers has its `config.json` beside them;
        where its class allows it, `from_pretrained` loads the folder.

        Raises:
            MoQError: The files cannot be written, or a weight holds NaN or Inf.
        """
        self._save_part(without_peft(self.whole_model))
        self.by_hand = reason
        return self._save_first_of(["floats"], reason, None)

    def _save_first_of(
        self,
        layouts: Sequence[Layout],
        reason: str | None,
        reference: ReferenceOutputs | None,
    ) -> Verification:
        """Write the first layout that agrees with the reference; without one, the first of all."""
        proof: Proof | None = None
        with alone_at(self.target):
            for layout in layouts:
                encoder = self._encoder(layout)
                saved = self._write(encoder)
                if reference is None:
                    break
                # The files are in place already: loading them takes memory, and a
                # process that is killed for it has delivered.
                proof = self._prove(reference, encoder)
                if proof.agrees is False:
                    # The first failure is that of the best layout.
                    reason = reason or f"{layout}: {proof.reason}"
                saved = self._record(saved, proof, reason)
                if proof.agrees is not False:
                    break
            if self.not_saved:
                parts = [f"{name} ({why})" for name, why in self.not_saved.items()]
                logger.warning(
                    "moq_hf: %s: not saved beside the weights: %s",
                    self.target,
                    ", ".join(parts),
                )
            _warn(self.target, encoder, proof, reason, self._told())
            self._write_card(saved)
        return saved

    def _told(self) -> str:
        """The warning about layers at full size that the run gave at its start."""
        controller = self.options.controller
        if controller is None:
            return ""
        return controller.sizes.at_full_size(controller.config) or ""

    def delivered(self, saved: Verification) -> Delivered:
        """Describe what was saved, for the screen."""
        folder = self.target
        if saved.loads_by_hand:
            load = f"model.load_state_dict(load_file({quoted(folder / SINGLE)}))"
        else:
            _, load = how_to_load(saved, folder, str(folder), self.whole_model)
            # A single line is shown as an expression.
            if "\n" not in load:
                load = load.removeprefix("model = ")
        deploy = deploy_command(folder)
        return Delivered(
            folder, saved.file_bytes, saved.proof, saved.summary(), load, deploy
        )

    def _prove(self, reference: ReferenceOutputs, encoder: Encoder) -> Proof:
        if self.not_saved and body_of(self.whole_model) is not None:
            # No layout could be loaded to compare.
            why = "Sentence Transformers loads no folder without a tokenizer"
            return Proof(None, reference.examples, None, None, why)
        return reference.prove(self.target, encoder.rounds_inputs)

    def _write(self, encoder: Encoder) -> Verification:
        """Write the files of one layout and put them in place."""
        place = staged(
            self.target.resolve(), what="the packed model to ", publish=_publish
        )
        self.not_saved = {}
        with place as staging, quiet():
            staging.mkdir()
            tensors, rest = self._encode(encoder)
            if self.by_hand is None:
                write = functools.partial(self._write_packed, encoder, tensors)
                save_around(self.whole_model, self.model, staging, write, self._beside)
            else:
                self._write_by_hand(staging, tensors)
            start = start_in_base(self.whole_model) if self.is_adapted else None
            if start and self.is_merged:
                self.not_saved[MERGED_ADAPTER] = (
                    f"{start} changed the float base at its start, and the adapter is right on that base alone; to go "
                    "on training, resume from a checkpoint of the run"
                )
            elif self.is_adapted:
                name = MERGED_ADAPTER if self.is_merged else ADAPTER
                _write_adapter(
                    staging / name, self.whole_model, self.options.state_dict
                )
            state = self._state(staging, encoder, rest)
            seal(staging, state, encoder.stored)
            return recorded(staging)

    def _write_packed(
        self, encoder: Encoder, tensors: dict[str, Tensor], folder: Path
    ) -> None:
        """Write the tensors, and `config.json` with the quantization config."""
        size = self.options.max_shard_size
        with without_generation_config(self.model):
            # The method of the class: that of a quantized model warns that it saves
            # floats.
            type(self.model).save_pretrained(
                self.model,
                folder,
                state_dict=encoder.rename(self.model, tensors),
                **({} if size is None else {"max_shard_size": size}),
                # The tensors are already named as in the files.
                save_original_format=False,
            )
        path = folder / CONFIG
        if self.unties:
            untie(path)
        config = encoder.config()
        if config is not None:
            if not LAYOUTS[encoder.layout].has_own_method:
                write_packing_config(folder, config)
            document = read_json(path)
            document.setdefault("quantization_config", config)
            document["dtype"] = encoder.dtype
            if LAYOUTS[encoder.layout].unpacks:
                document["quantization_config"]["dequantize"] = True
            write_json(path, document)
            if encoder.misleads_older:
                refuse_older(path, encoder.needs["transformers"])
        self._write_beside(folder)

    def _write_by_hand(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        # No two tensors may share memory in a file.
        copies = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        }
        save_file(copies, folder / SINGLE, metadata={"format": "pt"})
        for name in tensors.keys() - copies.keys():
            self.not_saved[name] = "no tensor"
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "save_pretrained"):

            def save(place: Path) -> None:
                config.save_pretrained(place)
                if self._ties()[1]:
                    untie(place / CONFIG)

            self._beside(folder, type(config).__name__, save)
        self._write_beside(folder)

    def _write_beside(self, folder: Path) -> None:
        """Write how the model generates, and the tokenizer or processor."""
        can_generate = getattr(self.model, "can_generate", None)
        if callable(can_generate) and can_generate():
            generation: Any = self.model.generation_config
            save = functools.partial(_save_generation_config, generation)
            self._beside(folder, type(generation).__name__, save)
        part = self.options.processing_class
        if part is not None:
            name = type(part).__name__
            self._beside(folder, name, lambda place: part.save_pretrained(place))

    def _beside(self, folder: Path, name: str, save: Callable[[Path], Any]) -> None:
        """Write files that the weights do not need, or note why that failed."""
        fault = save_beside(folder, save)
        if fault is not None:
            self.not_saved[name] = fault

    def _encoder(self, layout: Layout) -> Encoder:
        """Make the encoder of a layout; of layers that share a weight, it has the one under which that is stored."""
        tied: dict[str, list[str]] = {}
        for parameter, source in self.tied.items():
            layer = source.rpartition(".")[0]
            other = parameter.rpartition(".")[0]
            if {layer, other} <= self.layers.keys():
                tied.setdefault(layer, []).append(other)
        others = set().union(*tied.values())
        layers = {n: layer for n, layer in self.layers.items() if n not in others}
        return Encoder(self.inventory, layers, layout, tied)

    def _ties(self) -> tuple[dict[str, str], bool]:
        """Return the parameters that `from_pretrained` ties again, and whether the config must be untied."""
        parameters = dict(self.inventory.parameters())
        named = without_peft_names(parameters, self.inventory.adapters)
        return ties_in_files(self.model, named)

    def _check(self) -> None:
        """Check that transformers can save the model, and that this process has its weights.

        Raises:
            MoQError: It cannot, or they are not.
        """
        if not isinstance(self.model, PreTrainedModel):
            raise MoQError(
                f"only models of transformers can be saved packed, got {type(self.model).__name__}"
            )
        if has_adapter(self.model):
            raise MoQError(
                "a model with add_adapter saves its adapters alone: use peft.get_peft_model to have it packed"
            )
        if not self.quantized:
            raise MoQError(
                "the model has no quantized layer: call quantize_model first, or train it with MoQ"
            )
        parts = (self.whole, self.inventory)
        layers, inside = (part.instances(QuantLayer) for part in parts)
        if len(layers) > len(inside):
            raise MoQError(
                "quantized layers are outside of the model of transformers: leave them in full precision "
                "(heads: false)"
            )
        if self.target.exists() and not self.target.is_dir():
            raise MoQError(f"{self.target} is a file, not a directory")
        weights = {
            parameter_of(name, layer.kind): id(layer.float_weight)
            for name, layer in self.quantized.items()
        }
        owners = {number: name for name, number in weights.items()}
        sharing = [
            f"{owners[id(parameter)]} is also {name}"
            for name, parameter in self.inventory.parameters()
            if id(parameter) in owners and name not in weights
        ]
        if sharing:
            raise MoQError(
                f"{'; '.join(sharing)}: a shared weight cannot be packed; leave its layers in full precision"
            )
        if self.options.state_dict is not None:
            return
        # FSDP2 shards its tensors, and ZeRO leaves empty ones.
        sharded = [
            n
            for n, layer in self.quantized.items()
            if is_gathered_per_pass(layer.float_weight)
            or not layer.float_weight.numel()
        ]
        if sharded:
            raise MoQError(
                f"the weights of {', '.join(sharded)} are spread over processes: save with MoQTrainer.save_model"
            )
        if any(layer.float_weight.is_meta for layer in self.quantized.values()):
            raise MoQError(
                "the weights are on the meta device, which keeps none: give state_dict"
            )

    def _layouts(
        self, wanted: Layout | None, may_be_floats: bool
    ) -> tuple[Sequence[Layout], str | None]:
        """Return the layouts that the installed libraries can load, the best one first; floats suit any model.

        A wanted layout is the only one. A model without codes has floats alone, and so
        has one whose codes need newer libraries; the reason is returned too.

        Raises:
            MoQError: The libraries cannot load the wanted layout, or none with codes
                and `may_be_floats` is false.
        """
        layouts = self._loaded_by_newest(wanted)
        older = {layout: lacking(self._encoder(layout).needs) for layout in layouts}
        found = [layout for layout in layouts if not older[layout]]
        best = layouts[0]
        if not older[best] or found[:-1]:
            return found, None
        reason = f"the layout {best} of this model needs {older[best]}"
        if wanted is not None or not may_be_floats:
            ways = "install that, or take layout floats, which is of full size"
            if "transformers" not in older[best]:
                ways += "; pack_bits 4 or 8 stores codes of other bits in a form that older versions read"
            raise MoQError(f"{reason}: {ways}")
        return ["floats"], reason

    def _loaded_by_newest(self, wanted: Layout | None) -> Sequence[Layout]:
        """Return the layouts that the newest version of transformers can load, the best one first.

        Raises:
            MoQError: It cannot load the wanted layout.
        """
        specs = [WeightSpec.of(layer) for layer in self.layers.values()]
        first = first_layout(self.model.config.model_type, specs)
        if wanted is None and first is not None:
            return [first.name, "floats"]
        encoder = self._encoder(wanted or "packed")
        if not encoder.has_codes:
            return ["floats"]
        unpacks = is_unpacked_while_loading(
            without_peft(self.whole_model), encoder.packed
        )
        unpacks |= encoder.needs_bfloat16 and encoder.dtype != "bfloat16"
        tried: Sequence[Layout] = ["packed", "unpacked", "floats"]
        # Servers take asymmetric grids as they are unpacked while loading; tables of
        # more bits would be dense there.
        served = encoder.is_asymmetric and not encoder.tables
        # Packed, a model in half precision with wider scales would load in float32, for
        # its user to cast; unpacked while loading it has its own dtype. A float64 model
        # would be rounded.
        is_cast = encoder.dtype not in encoder.dtypes and not encoder.rounds_inputs
        is_cast &= len(encoder.model_dtypes) == 1
        is_cast &= len(encoder.widths) == 1 or "float64" in encoder.dtypes
        has_one_width = ModelSizes(self.whole, self.quantized).has_one_width
        has_lora = has_lora_on(self.whole, self.model, encoder.packed)
        if served or is_cast or has_one_width or has_lora:
            tried = ["unpacked", "packed", "floats"]
        fails = {
            "packed": unpacks or takes_apart(self.model, encoder.packed),
            "unpacked": takes_apart(self.model, ()),
        }
        if wanted is None:
            return [layout for layout in tried if not fails.get(layout)]
        if fails.get(wanted):
            raise MoQError(
                f"transformers cannot answer with this model in the layout {wanted}: leave layout out"
            )
        return [wanted]

    def _encode(self, encoder: Encoder) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of the files by name, and the bytes of those that are not quantized weights.

        Float weights are read and encoded one by one.

        Raises:
            MoQError: A weight is not a parameter any more, or holds NaN or Inf.
        """
        given = self.options.state_dict
        source = given or self.model.state_dict()
        live = (self.whole_model if given else self.model).state_dict(keep_vars=True)
        path = self.whole.name_of(self.model)
        # The names in the source by those that the tensors had before PEFT came.
        names = without_peft_names(
            {name.removeprefix(f"{path}."): name for name in source},
            self.inventory.adapters,
        )
        weights = {
            n: parameter_of(n, layer.kind) for n, layer in encoder.layers.items()
        }
        computed = [name for name, weight in weights.items() if weight not in names]
        if computed:
            raise MoQError(
                f"the weights of {', '.join(computed)} are recomputed in each forward pass, by torch.nn.utils.prune "
                "for instance: make them parameters again (prune.remove), then save"
            )
        others = set().union(*encoder.tied.values())
        replaced = {*weights.values(), *(f"{other}.weight" for other in others)}
        replaced |= {
            scales_of(weight)
            for n, weight in weights.items()
            if encoder.layers[n].moq.trained is not None
        }
        tied = {*self.tied, *self.tied.values()}
        kept: dict[int | str, Any] = {}
        tensors: dict[str, Tensor] = {}
        owners = {
            id(layer.float_weight): weights[name]
            for name, layer in encoder.layers.items()
        }
        # A module in two places has two names for its weight.
        second_names: dict[str, str] = {}
        # Bytes of each tensor, which may have several names.
        rest: dict[int | str, int] = {}
        for name, source_name in names.items():
            if name in replaced:
                continue
            key = id(live[source_name]) if source_name in live else name
            if key in owners:
                second_names[name] = owners[key]
                continue
            # Names that loading ties keep sharing a tensor; any other has a copy.
            place = key if name in tied else name
            if place not in kept:
                tensor = source[source_name]
                kept[place] = tensor.clone() if key in rest else tensor
                rest[key] = getattr(tensor, "nbytes", 0)
            tensors[name] = kept[place]
        saved_names = {id(tensor): name for name, tensor in live.items()}

        def saved(parameter: Tensor) -> Tensor:
            return source[saved_names[id(parameter)]].detach()

        for name in weights:
            tensors |= encoder.store(name, saved)
        for name, weight in second_names.items():
            tensors[name] = tensors[weight]
            rest[name] = source[names[name]].nbytes
        return tensors, sum(rest.values())

    def _state(self, folder: Path, encoder: Encoder, rest: int) -> dict[str, Any]:
        """Return the content of `moq_state.json`, without the digests of the tensors."""
        sizes = ModelSizes(self.whole, self.quantized)
        saved = sum(layer.bytes_before for layer in encoder.stored.values())
        return state_of(self.layers, encoder.stored, self.options.controller) | {
            "metrics": clean_metrics(self.options.metrics or {}),
            "float_metrics": clean_metrics(self.options.float_metrics or {}),
            "teaching": self.options.teaching,
            "names": encoder.names,
            "layout": encoder.layout,
            "needs": encoder.needs,
            # For layouts whose config does not hold them.
            "groups": encoder.groups
            if LAYOUTS[encoder.layout].has_own_method
            else None,
            "reason": self.by_hand and without_paths(self.by_hand),
            # Filled in when the files have been compared.
            "proof": None,
            "by_hand": self.by_hand is not None,
            "rounds_inputs": encoder.rounds_inputs,
            "handed_dtype": handed_dtype(self.layers),
            "parameters": {
                "total": sizes.total,
                "quantized": sizes.quantized,
                "mean_bits": sizes.mean_bits,
            },
            "float_bytes": saved + rest,
            # Filled in by `seal`, which reads the files back.
            "tensors": {},
            "config_json": digest_of_configs(folder),
            # The next model that is saved here deletes these.
            "files": sorted(path.name for path in folder.iterdir()),
        }

    def _record(
        self, saved: Verification, proof: Proof, reason: str | None
    ) -> Verification:
        """Write into the state how the files compared."""
        proof = replace(proof, reason=proof.reason and without_paths(proof.reason))
        found = {"proof": asdict(proof), "reason": reason and without_paths(reason)}
        state = saved.state | found
        try:
            write_state(self.target, state)
        except OSError as error:
            logger.warning(
                "moq_hf: %s still says that nothing was compared, since it cannot be written: %s",
                self.target / STATE_NAME,
                error,
            )
        return replace(saved, state=state, proof=proof)

    def _write_card(self, saved: Verification) -> None:
        path = self.target / _CARD
        if path.exists():
            logger.info("%s was not written by moq_hf, so it stays", path)
            return
        try:
            run = self.options.run
            # The stock card reads the config of the Trainer's model.
            if run is not None and hasattr(run.model, "config"):
                # license="" keeps TrainingSummary from querying the Hub.
                write_run_card(self.target, run, license="", found=saved)
            else:
                config = getattr(self.model, "config", None)
                base = hub_id(getattr(config, "name_or_path", None))
                data = ModelCardData(base_model=base)
                write_card(self.target, data, found=saved, model=self.whole_model)
        except Exception as error:
            # Half a card would be taken for the user's own.
            path.unlink(missing_ok=True)
            logger.warning(
                "moq_hf: %s has no model card: %s",
                self.target,
                one_line(error, named=True),
            )


def _save_generation_config(config: GenerationConfig, folder: Path) -> None:
    try:
        config.save_pretrained(folder)
    except ValueError:
        # Saving refuses settings without effect, such as a temperature without sampling;
        # loading does not.
        config.to_json_file(folder / GENERATION_CONFIG_NAME)
        type(config).from_pretrained(str(folder))


def _write_adapter(
    folder: Path, model: Any, state_dict: Mapping[str, Tensor] | None
) -> None:
    """Write PEFT's own files, without the card and without paths of this machine."""
    # The folder has the quantized tables already.
    with_tables = "auto" if is_merged(model) else False
    type(model).save_pretrained(
        model, folder, state_dict=state_dict, save_embedding_layers=with_tables
    )
    (folder / "README.md").unlink(missing_ok=True)
    # Every adapter but the first has a separate folder.
    for path in folder.rglob("adapter_config.json"):
        document = without_start(read_json(path))
        base = hub_id(document.get("base_model_name_or_path"))
        # An adapter whose initialization changed the base fits the delivered base alone.
        document["base_model_name_or_path"] = None if start_in_base(model) else base
        write_json(path, document)


def _publish(staging: Path, target: Path) -> None:
    """Move the written files into place, so that a half-written model never loads."""
    # Nothing loads without one of these two, whereas a class of transformers loads
    # without a config. So the old ones are deleted first, and the new one comes last.
    entries = (SINGLE, INDEX)
    for name in entries:
        (target / name).unlink(missing_ok=True)
    stale = {ADAPTER, *_STALE_FILES}
    # A folder that moq_hf did not write, or that was changed, has no list.
    with contextlib.suppress(MoQError):
        stale.update(read_layers(target)[0]["files"])
    for path in list(target.iterdir()):
        if path.name in stale or WEIGHTS.fullmatch(path.name):
            remove(path)
    card = target / _CARD
    if card.exists() and _MARK in card.read_bytes():
        card.unlink()
    move_files(staging, target, last=entries)


def _warn_of_float_inputs(saving: _Saving) -> None:
    """Warn if the model rounds inputs and its folder does not."""
    rounded = {
        name: layer.moq.inputs
        for name, layer in saving.layers.items()
        if layer.moq.inputs is not None
    }
    if not rounded:
        return
    why = "no packed folder of this form can say how; moq-hf inspect tells whether an exported int8 file can"
    static = [own for own in rounded.values() if own.grid.scale == "static"]
    unknown = [own for own in static if own.range is None]
    # Of a single layer the files can leave the inputs alone.
    if unknown and len(unknown) == len(static):
        why = "their static ranges are not known yet: train, or give quantize_model inputs"
        if any(own.observed.any() for own in unknown):
            why = "their static ranges are taken by model.eval() after the last step: call it before you save"
    logger.warning(
        "moq_hf: %s computes with float inputs, while the model in memory rounds those of %s: %s",
        saving.target,
        shortened(rounded),
        why,
    )


def _warn(
    target: Path,
    encoder: Encoder,
    proof: Proof | None,
    reason: str | None,
    told: str,
) -> None:
    """Warn of weights that are not packed, unless `told` has done so, and of files that compute something else."""
    reasons: dict[str, list[str]] = {}
    for name, layer in encoder.stored.items():
        if not layer.has_codes:
            reasons.setdefault(encoder.why_in_float(name), []).append(name)
    # One reason is enough: a folder of floats has its own.
    text = at_full_size(reasons, len(encoder.stored)) if reasons else ""
    if text not in told and (reason is None or encoder.layout != "floats"):
        logger.warning("moq_hf: %s", text)
    if proof is None and encoder.dtypes - {encoder.dtype, "float32"}:
        logger.warning(
            "moq_hf: %s loads in %s, and the weights are %s in memory: cast the loaded model after its first call, or "
            "give save_quantized inputs, so that the card has the lines that were proven",
            target,
            encoder.dtype,
            " and ".join(sorted(encoder.dtypes)),
        )
    if encoder.rounds_inputs and encoder.without_range:
        logger.warning(
            "moq_hf: %s leaves the inputs of %s as they are: no range is known of them, since they were not called yet "
            "or got nothing but zeros and what a percentile leaves out",
            target,
            shortened(encoder.without_range),
        )
    if has_failed(proof):
        logger.warning(
            "moq_hf: %s: what is written does not compute what was evaluated: %s",
            target,
            proof.reason,
        )
    elif reason is not None and encoder.layout == "floats":
        logger.warning(
            "moq_hf: %s holds rounded floats, not packed: %s", target, reason
        )
    elif reason is not None:
        way = "unpacked" if LAYOUTS[encoder.layout].unpacks else "left packed"
        # What follows is an error's text, which would read as if the run had failed.
        tried = reason.partition(" (")[0]
        logger.warning(
            "moq_hf: %s is delivered with weights that are %s while loading, since the layout that was tried first "
            "does not work for this model (%s; in full in %s)",
            target,
            way,
            tried,
            STATE_NAME,
        )
