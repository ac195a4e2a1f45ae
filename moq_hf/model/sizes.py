"""How much of the whole model is quantized, at how many bits, and how large that makes it."""

import contextlib
import copy
import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import MoQConfig
from ..errors import MoQError, either, explained
from ..formats import pack_quantized
from ..formats.layout import LayoutSpec
from ..formats.stored import EncodedWeight
from ..formats.table import (
    FORMS,
    LAYOUTS,
    TAKEN_APART,
    at_full_size,
    first_layout,
    has_gaps,
    lacking,
    needs_of,
)
from ..names import plain_name, pretrained, without_fsdp, without_peft
from ..processes import shape_of
from ..quant_experts import experts_parameters
from ..quantized_weight import QuantizedWeight
from ..quantizer import Quantized
from ..schedule import FLOAT_BITS
from ..seams.sentence_transformers import body_of
from ..seams.transformers import initialize_again, original_format, takes_apart
from ..weight_matrix import is_experts
from ..weight_spec import DENSE, MAX_PACKED_BITS, WeightSpec
from .inventory import Inventory, is_convolution

TABLE = "embedding table"
# safetensors' names of other dtypes have three letters.
_LETTERS = {torch.bfloat16: 4, torch.bool: 4, torch.int8: 2, torch.uint8: 2}


def _kinds(inventory: Inventory) -> dict[int, str]:
    """Name the kind of each weight that is not a linear layer's, by its identity."""
    found: dict[int, str] = {}
    for module in inventory.modules.values():
        weight = id(module._parameters.get("weight"))
        if isinstance(module, nn.Embedding):
            found[weight] = TABLE
        elif is_convolution(module):
            found[weight] = "convolution"
        for name in experts_parameters(module):
            found[id(module._parameters[name])] = "expert parameter"
    return found


def _tensors_of(spec: WeightSpec) -> dict[str, Tensor]:
    """The tensors in which a folder holds a weight, by name, on the meta device."""
    encoded = EncodedWeight({"weight": _on_meta(spec.full_shape, spec.dtype)})
    if spec.has_codes:
        codes = _on_meta(spec.shape, torch.int32)
        scale = _on_meta(spec.scales, torch.float32)
        zero = None if spec.symmetric else scale.int()
        write = FORMS[spec.stored].write
        encoded = write(Quantized(codes, scale, zero), spec)
    return encoded.named(spec)


@functools.cache
def _bytes_of(spec: WeightSpec) -> int:
    """Bytes of a weight in a folder, without the tensors that give the shapes of packed codes."""
    if spec.matrices is not None:
        # One matrix of all rows is as large as those of all experts.
        spec = replace(spec, matrices=("matrix",))
    tensors = _tensors_of(spec)
    return sum(t.nbytes for name, t in tensors.items() if not name.endswith("shape"))


class ModelSizes:
    """The sizes of a model in training. Each parameter counts once, however many names it has.

    Parameters are counted when it is made, so that asking for the current figures costs
    a sum over the layers. Shards count as the whole parameter.

    Args:
        inventory: The model's inventory.
        layers: Its quantized layers and embedding tables by name.

    Attributes:
        total: Parameters of the model.
        quantized: Those that are weights of `layers`, at whatever bits they are now.
        left: The sizes of embedding tables, convolutions and parameters of experts that
            are not quantized, by kind.
    """

    def __init__(
        self, inventory: Inventory, layers: Mapping[str, QuantizedWeight]
    ) -> None:
        kinds = _kinds(inventory)
        owners: dict[int, QuantizedWeight] = {}
        for layer in layers.values():
            owners.setdefault(id(layer.float_weight), layer)
        self._inventory = inventory
        self._weights: list[tuple[QuantizedWeight, WeightSpec]] = []
        # The sizes found so far, by the bits of all layers.
        self._known_sizes: dict[tuple[int, ...], tuple[int, int]] = {}
        self.left: dict[str, list[int]] = {}
        others = self._others_bits = 0
        self.quantized = self._float_bits = 0
        seen = set[int]()
        for name, parameter in inventory.parameters():
            left = inventory.merged and inventory.is_added(name)
            if left or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count = shape_of(parameter).numel()
            full = 8 * parameter.element_size()
            if id(parameter) in owners:
                layer = owners[id(parameter)]
                is_table = kinds.get(id(parameter)) == TABLE
                spec = replace(WeightSpec.of(layer), is_table=is_table)
                self._weights.append((layer, spec))
                self.quantized += count
                self._float_bits += count * full
            else:
                others += count
                self._others_bits += count * full
                if id(parameter) in kinds:
                    self.left.setdefault(kinds[id(parameter)], []).append(count)
        self.total = self.quantized + others
        model = pretrained(inventory.model)
        self._model_type = str(
            getattr(getattr(model, "config", None), "model_type", "")
        )

    @property
    def share(self) -> float:
        """The share of the parameters that is quantized, 0 to 1."""
        return self.quantized / self.total

    @property
    def coverage(self) -> str:
        """The share of the parameters that is quantized, in words."""
        return covered(self.quantized, self.total)

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model now; a parameter that is not quantized has those of its dtype."""
        return (self._others_bits + sum(map(_bits_of, self._now()))) / self.total

    @property
    def layer_bits(self) -> float:
        """The mean bits of the weights of quantized layers now, without embedding tables."""
        layers = [spec for spec in self._now() if spec.kind != "embedding"]
        return sum(map(_bits_of, layers)) / sum(spec.numbers for spec in layers)

    @property
    def float_mb(self) -> float:
        """Megabytes (10^6 bytes) of the parameters in their own dtypes."""
        return (self._others_bits + self._float_bits) / 8e6

    @property
    def mb(self) -> float:
        """Megabytes (10^6 bytes) of the parameters as they are saved: codes packed, and a scale for each group.

        A weight that cannot be packed keeps its float size. The others take their
        current bits, a byte in an embedding table, or all take as many bits as the
        largest, whichever is smaller; see `has_one_width`.
        """
        own, alike = self._sizes()
        if own != alike and self.is_unpacked:
            own = alike
        return self._others_bits / 8e6 + min(own, alike) / 1e6

    def _now(self) -> list[WeightSpec]:
        return [spec.at(layer.moq.bits) for layer, spec in self._weights]

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the weights in the layout of first choice, and in the one whose codes have one width."""
        now = self._now()
        bits = tuple(spec.bits for spec in now)
        if bits not in self._known_sizes:
            specs = {str(number): spec for number, spec in enumerate(now)}
            own, alike = (
                sum(map(_bytes_of, layout.placed(specs).values()))
                for layout in (self._first(now), LAYOUTS["unpacked"])
            )
            self._known_sizes[bits] = own, alike
        return self._known_sizes[bits]

    def _first(self, specs: Collection[WeightSpec]) -> LayoutSpec:
        return first_layout(self._model_type, specs) or LAYOUTS["packed"]

    def at_full_size(self, config: MoQConfig) -> str | None:
        """Name the layers that will be saved as floats at their targets, and why; None if there are none."""
        reasons: dict[str, list[str]] = {}
        model = pretrained(self._inventory.model)
        is_taken_apart = isinstance(model, PreTrainedModel) and all(
            takes_apart(model, packed)
            for packed in ((), _linear_layers(self._inventory))
        )
        for _, spec in self._weights:
            own = config.of(spec.name)
            # Under a budget a layer may end with any of the choices.
            is_fixed = own.budget is None and spec.kind != "embedding"
            at = spec.at(own.targets[0] if is_fixed else MAX_PACKED_BITS)
            why = pack_quantized.misfit(at)
            if self._first([at]).form_of(at).name != DENSE:
                why = None
            if why is None and is_taken_apart:
                why = TAKEN_APART
            if why is not None:
                reasons.setdefault(why, []).append(spec.name)
        if not reasons:
            return None
        text = at_full_size(reasons, len(self._weights))
        is_large = sum(map(len, reasons.values())) == len(self._weights)
        return text + "; the file will be as large as in float" * is_large

    def lacks(self, config: MoQConfig) -> str | None:
        """Name the installed libraries that are too old for the delivered files, and the ways out; None if none is."""
        fixed: dict[str, WeightSpec] = {}
        choices: list[WeightSpec] = []
        for _, spec in self._weights:
            targets: Sequence[int] = config.of(spec.name).targets
            if spec.kind == "embedding":
                targets = (spec.bits,)
            if len(targets) == 1:
                fixed[spec.name] = spec.at(targets[0])
            else:
                choices += map(spec.at, targets)
        layout = self._first(fixed.values())
        is_packed = layout is LAYOUTS["packed"]
        if is_packed and lacking(LAYOUTS["unpacked"].needs) and self.is_unpacked:
            layout = LAYOUTS["unpacked"]
        placed = list(layout.placed(fixed).values())
        # All experts are stored at the most bits that any has.
        least = max((x.width for x in placed if is_experts(x.kind)), default=0)
        for spec in choices:
            if is_experts(spec.kind):
                spec = replace(spec, pack_bits=max(spec.pack_bits, least))
            placed += layout.placed({spec.name: spec}).values()
        missing = lacking(needs_of(layout, placed))
        if not missing:
            return None
        ways = ["install that"]
        packed = [spec for spec in placed if spec.stored == "packed"]
        if layout is not LAYOUTS["packed"]:
            what = f"{type(pretrained(self._inventory.model)).__name__} is delivered {layout.delivered}"
            if self._inventory.adapters and not self._inventory.merged:
                ways.append('set "lora": "merged"')
        elif any(spec.has_codes and spec.format != "int" for spec in placed):
            what = "codes that are floats are delivered packed"
            ways.append(f'set {config.spell("format")} to "int"')
        else:
            gaps = sorted({x.width for x in packed if has_gaps(x.width)})
            what = f"codes of {either(gaps)} bits are delivered packed"
            container = 4 if gaps == [3] else 8
            ways.append("take 2, 4 or 8 bits")
            codes = sum(x.numbers for x in packed if x.width in gaps)
            ways.append(
                f"set pack_bits to {container}, which keeps the codes as they are, in {container} bits each: "
                f"{codes * container / 8e6:.3g} MB for those of {either(gaps)} bits"
            )
        return f"{what}, which needs {missing}: {', or '.join(ways)}"

    @functools.cached_property
    def is_unpacked(self) -> bool:
        """See `is_unpacked`."""
        return is_unpacked(self._inventory)

    @property
    def has_one_width(self) -> bool:
        """True if files are smaller with all codes at the most bits that any has than with tables in int8.

        Only a model that is unpacked while loading can have a table in fewer than 8
        bits, and then all codes have one width.
        """
        own, alike = self._sizes()
        return alike < own


def _bits_of(spec: WeightSpec) -> int:
    """All bits of a weight without its scales; a weight that is not quantized has the bits of its dtype."""
    if spec.bits == FLOAT_BITS:
        return 8 * spec.dtype.itemsize * spec.numbers
    return spec.bits * spec.numbers


class FileSize:
    """The size of the delivered `model.safetensors` for any bits of its layers, at most a few bytes too large.

    The layout is that of packed folders; see `formats`.

    Args:
        inventory: The model's inventory.
        layers: Its quantized layers by name.
        embeddings: Its quantized embedding tables by name.
        fixed: Bits of the layers that have no choice, by name.
    """

    def __init__(
        self,
        inventory: Inventory,
        layers: Mapping[str, QuantizedWeight],
        embeddings: Mapping[str, QuantizedWeight],
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self._inventory = inventory
        self._layers: dict[str, QuantizedWeight] = {**layers, **embeddings}
        self._tables = {*embeddings, *inventory.tied.values()}
        seen = {id(layer.float_weight) for layer in self._layers.values()}
        self._fixed: dict[str, Tensor] = {}
        for name, tensor in inventory.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and not inventory.is_added(name):
                seen.add(id(tensor))
                self._fixed[name] = _on_meta(shape_of(tensor), tensor.dtype)
        of_tables = dict.fromkeys(embeddings, inventory.table_bits or FLOAT_BITS)
        fixed = of_tables | dict(fixed or {})
        for name, bits in fixed.items():
            self._fixed |= self._tensors(name, bits)
        # The end of the data at the most bits, so that no offset has more digits.
        self._end = 0
        self._end = self.of_rest() + sum(
            self.of_layer(name, MAX_PACKED_BITS) for name in layers if name not in fixed
        )

    def why_alike(self) -> str | None:
        """Why the bits of single layers do not change the size of the file; None if they do."""
        model = without_peft(self._inventory.model)
        layers = [x for x in self._layers.values() if x.kind != "embedding"]
        kinds = {layer.kind for layer in layers}
        symmetric = all(layer.moq.grid.symmetric for layer in layers)
        has_table = len(layers) < len(self._layers)
        reasons = {
            "only models of transformers are packed": not isinstance(
                pretrained(model), PreTrainedModel
            ),
            "Conv1D layers are saved as rounded floats, at full size": "conv1d"
            in kinds,
            "a model of its kind stores all weights at the same bits": parts_are_called(
                model
            ),
            "packed experts are all stored at the same bits": any(
                map(is_experts, kinds)
            ),
            "asymmetric weights are unpacked while loading, and all stored at the same bits": not (
                symmetric or has_table
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def of_layer(self, name: str, bits: int) -> int:
        """Bytes of a layer's weight at `bits`, 1 to 8, with its entries in the file's header."""
        return self._size(self._tensors(name, bits))

    def of_rest(self) -> int:
        """Bytes of everything else: what stays in float, tables, the rest of the header."""
        # The field for the header's length, the metadata entry, and the padding.
        return (
            8 + len('{"__metadata__":{"format":"pt"}}') + 14 + self._size(self._fixed)
        )

    def _size(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of tensors and, once the end of the data is known, of their entries in the header."""
        total = 0
        model = pretrained(self._inventory.model)
        # Longer names in the files make a longer header.
        if isinstance(model, PreTrainedModel):
            tensors = original_format(model, tensors)
        for name, tensor in tensors.items():
            letters = _LETTERS.get(tensor.dtype, 3)
            entry = {
                name: {
                    "dtype": "?" * letters,
                    "shape": tensor.shape,
                    "data_offsets": [self._end, self._end],
                }
            }
            total += tensor.nbytes
            if self._end:
                # In the header, a comma stands for the two braces of this entry.
                total += len(json.dumps(entry, separators=(",", ":"))) - 1
        return total

    def _tensors(self, name: str, bits: int) -> dict[str, Tensor]:
        """Return the tensors that hold a layer's weight in the file, on the meta device."""
        tied = [other for other, owner in self._inventory.tied.items() if owner == name]
        spec = replace(
            WeightSpec.of(self._layers[name]).at(bits),
            name=name,
            is_table=name in self._tables,
            tied=tuple(tied),
            matrices=None,
        )
        form = LAYOUTS["packed"].form_of(spec)
        return _tensors_of(replace(spec, stored=form.name))


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def parts_are_called(model: nn.Module) -> bool:
    """True if users call parts of the model without the forward pass of the whole, whose first call would unpack it."""
    config = getattr(model, "config", None)
    # Sentence Transformers calls `forward` directly, which runs no hooks.
    return bool(
        body_of(model)
        or getattr(config, "is_encoder_decoder", False)
        or getattr(config, "sub_configs", None)
    )


def is_unpacked(inventory: Inventory) -> bool:
    """True if a model is delivered for transformers to unpack while loading, so that all its codes have one width.

    Beside the reasons of `is_unpacked_while_loading`, PEFT's LoRA is one: it reads the
    weights of layers as soon as it is given the model.

    Args:
        inventory: The inventory, with the layers that are quantized.
    """
    if not inventory.merged and any(
        name.endswith("lora_A") for name in inventory.adapters
    ):
        return True
    packed = _linear_layers(inventory)
    with contextlib.suppress(MoQError), torch.random.fork_rng(devices=[]):
        return is_unpacked_while_loading(without_peft(inventory.model), packed)
    return False


def has_lora_on(inventory: Inventory, model: nn.Module, layers: Iterable[str]) -> bool:
    """True if PEFT's LoRA adapts one of a model's layers unmerged, for which it reads their weights at once.

    Args:
        inventory: The inventory of the whole model.
        model: The model in it, without PEFT.
        layers: Names of layers in `model`.
    """
    path = inventory.name_of(model)
    adapted = {
        name.removeprefix(f"{path}.").removesuffix(".lora_A")
        for name in inventory.adapters
    }
    return not inventory.merged and not adapted.isdisjoint(layers)


def _linear_layers(inventory: Inventory) -> list[str]:
    """The linear layers that are quantized, by their names in the model without PEFT."""
    path = inventory.name_of(without_peft(inventory.model))
    return [
        (plain_name(name, ()) or "").removeprefix(f"{path}.")
        for name, module in inventory.layers.items()
        if isinstance(module, nn.Linear)
    ]


def is_unpacked_while_loading(model: Any, packed: Iterable[str]) -> bool:
    """True if a model cannot stay packed until its first forward pass.

    Users call parts of it without that pass, or its class initializes modules through
    the weights of others, which packed modules do not have.

    Args:
        model: The model, without PEFT.
        packed: The layers that would be packed.

    Raises:
        MoQError: transformers cannot make a model of the class, as `from_pretrained`
            would have to.
    """
    if parts_are_called(model):
        return True
    cls: Any = without_fsdp(type(model))
    with explained(
        f"from_pretrained could not load it, since {cls.__name__}(config) does not make such a model"
    ):
        with torch.device("meta"):
            shell = cls(copy.deepcopy(model.config))
        for name in packed:
            del shell.get_submodule(name).weight
    try:
        initialize_again(shell)
    except AttributeError:
        return True
    return False


def covered(quantized: int, total: int) -> str:
    """The share of a model that is quantized, in words.

    >>> covered(85_000_000, 110_000_000)
    "77.3 % of the model's 110.0 M parameters"
    """
    return f"{percent(quantized / total)} of the model's {in_words(total)} parameters"


def percent(share: float) -> str:
    """Format a share, 0 to 1, in percent with one decimal.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def in_words(count: int) -> str:
    """Format a number of parameters, in millions from 0.1 M on.

    >>> in_words(1_234), in_words(109_480_000)
    ('1,234', '109.5 M')
    """
    return f"{count / 1e6:,.1f} M" if count >= 100_000 else f"{count:,}"
