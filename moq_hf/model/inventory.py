"""`Inventory`: the modules of a model, found in one walk over it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..config import MoQConfig
from ..errors import MoQError
from ..grid import Grid, PerChannel, RowBlocks
from ..lattice import FoundGrid
from ..names import adapters, is_below, named_modules, unwrapped, without_peft
from ..processes import is_sharded, shape_of
from ..quant_experts import matrix_of
from ..quant_linear import CLASSES, QuantModule, kind_of, quantized_in
from ..seams.transformers import (
    CHECKPOINTED,
    is_scaled_table,
    packed_loader,
)
from ..text import dtype_name
from ..weight_matrix import Kind, matrix_shape

# The layers whose bits the schedule sets.
Layer = nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d
# The list in DeepSpeed's default config; if a model has it, no other is measured.
BERT_LAYERS = "bert.encoder.layer"
LINEARS = (nn.Linear, Conv1D)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# The grid of embedding tables, whatever the config says about linear layers; tables of
# few bits may have the layers' groups and range.
_ROWS = Grid(PerChannel(), search="absmax")


@dataclass(frozen=True)
class Inventory:
    """The modules of a model by name, and how each is quantized. Parameters are looked up on each call.

    A block is an entry of a list of layers: of the outermost `ModuleList` that contains a
    layer, or of the list that `eigenvalue.layer_name` names. A layer outside of any
    list is a block by itself.

    Attributes:
        model: The model without what wraps it; see `unwrapped`.
        modules: Name to module, each module once, in model order.
        adapters: Names of the modules that PEFT has added, or has replaced with others.
        merged: Whether PEFT's adapters are merged into the layers.
        layers: The linear layers and convolutions that a config quantizes by name;
            `take_inventory` fills it, and the next seven.
        experts: The parameters of experts that it quantizes, by their names, each with
            its module.
        tables: The embedding tables that could be quantized.
        embeddings: Those that it quantizes.
        table_bits: The bits of these tables; None if it leaves tables alone.
        tables_stay: Why the tables stay in float although the config says "auto".
        tied: Module to the one of `layers` or `embeddings` whose weight it shares, and
            with it the quantized copy.
        found: The grids that the weights of layers and experts lie on, if `"grid": "found"`
            asks for them; see `found.take_found`.
        left_out: Linear layers that stay in float, and tables and convolutions that
            were meant to be quantized, by name: the reason, or None if it is the config
            or the layer's place.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 2)})
    >>> inventory = Inventory.of(model)
    >>> inventory.blocks(inventory.linears)
    {'layers.0': ['layers.0'], 'layers.1': ['layers.1'], 'head': ['head']}
    """

    model: nn.Module
    modules: Mapping[str, nn.Module] = field(repr=False)
    adapters: Sequence[str] = ()
    merged: bool = False
    layers: Mapping[str, Layer] = field(default_factory=dict)
    experts: Mapping[str, nn.Module] = field(default_factory=dict)
    tables: Mapping[str, nn.Embedding] = field(default_factory=dict)
    embeddings: Mapping[str, nn.Embedding] = field(default_factory=dict)
    table_bits: int | None = None
    tables_stay: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str | None] = field(default_factory=dict)
    found: Mapping[str, FoundGrid] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: Any, merged: bool = False) -> "Inventory":
        """Take the inventory of a model, or of a Trainer's wrapper around it; see `unwrapped`.

        Args:
            model: The model.
            merged: Whether PEFT's adapters are, or will be, merged into its layers.
        """
        model = unwrapped(model)
        # Activation checkpointing wraps modules under their names; these are the inner ones.
        modules = dict(named_modules(model))
        added = tuple(adapters(model, merged))
        return cls(model, modules, added, merged)

    @cached_property
    def linears(self) -> dict[str, nn.Linear | Conv1D]:
        """Every linear layer by name, except those of PEFT's adapters."""
        return self.instances(*LINEARS)

    @cached_property
    def wide(self) -> set[str]:
        """The linear layers that `activations.wide_bits` is for.

        The widest of each block, if it has fewer outputs than inputs: the second product
        of a feed-forward part, whatever it is called. An output projection of attention
        may narrow too, but is not the widest. Blocks are told apart by the first number
        in a name.

        >>> parts = {"q": nn.Linear(4, 6), "o": nn.Linear(6, 4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
        >>> Inventory.of(nn.Sequential(nn.ModuleDict(parts))).wide
        {'0.down'}
        """
        blocks: dict[str, dict[str, tuple[int, int]]] = {}
        for name, layer in self.linears.items():
            numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
            if isinstance(layer, nn.Linear):
                sizes = layer.in_features, layer.out_features
            else:
                rows, columns = matrix_shape(shape_of(layer.weight), "conv1d")
                sizes = columns, rows
            blocks.setdefault(numbered[0] if numbered else "", {})[name] = sizes
        found = set()
        for layers in blocks.values():
            widths = [inputs for inputs, _ in layers.values()]
            for name, (inputs, outputs) in layers.items():
                # Keys and values of fewer heads narrow from the width that all have.
                if inputs == max(widths) > max(outputs, min(widths)):
                    found.add(name)
        return found

    @property
    def scheduled(self) -> dict[str, nn.Module]:
        """The layers, then the parameters of experts, each with its module: the schedule sets their bits."""
        return {**self.layers, **self.experts}

    def weights(self) -> Iterator[tuple[str, nn.Module, str, Kind]]:
        """Each weight that is quantized, except tied ones: its name, its module, its attribute there, and its kind."""
        for name, module in {**self.layers, **self.embeddings}.items():
            yield name, module, "weight", kind_of(module)
        for name, experts in self.experts.items():
            yield name, experts, name.rpartition(".")[2], kind_of(experts)

    def instances(self, *classes: type[nn.Module]) -> dict[str, Any]:
        """Modules of some classes by name, except those of PEFT's adapters."""
        modules = self.modules.items()
        return {
            name: module
            for name, module in modules
            if isinstance(module, classes) and not self.is_added(name)
        }

    @cached_property
    def lists(self) -> dict[str, nn.ModuleList]:
        """The outermost lists of modules, by name."""
        lists: dict[str, nn.ModuleList] = {}
        for name, module in self.modules.items():
            if (
                name
                and isinstance(module, nn.ModuleList)
                and not is_below(name, *lists)
            ):
                lists[name] = module
        return lists

    def name_of(self, part: nn.Module) -> str:
        """The first name of one of the modules."""
        return next(name for name, module in self.modules.items() if module is part)

    def is_added(self, name: str) -> bool:
        """True if a name is that of one of PEFT's adapters, or of something in it."""
        while name and name not in self._added:
            name = name.rpartition(".")[0]
        return bool(name)

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(self.adapters)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under all its names, in model order, like `named_parameters(remove_duplicate=False)`.

        Scales that are trained are none: they are part of the weight beside them.
        """
        scales = {id(scale) for scale in self.trained_scales()}
        named = self.model.named_parameters(remove_duplicate=False)
        for name, parameter in named:
            if id(parameter) not in scales:
                yield name.replace(f"{CHECKPOINTED}.", ""), parameter

    def trained_scales(self) -> list[Tensor]:
        """The scales of quantized weights that are parameters, see `trained_scales`."""
        return [
            weight.moq.trained.parameter
            for name, module in self.modules.items()
            for weight in quantized_in(name, module).values()
            if weight.moq.trained is not None
        ]

    def block_of(self, layer: str, measured: Iterable[str] = ()) -> str:
        """The block of a layer.

        Args:
            layer: Its name.
            measured: Blocks of the list that `eigenvalue.layer_name` names; they come
                before others.
        """
        for block in measured:
            if is_below(layer, block):
                return block
        for outer in self.lists:
            if layer.startswith(f"{outer}."):
                entry = layer.removeprefix(f"{outer}.").partition(".")[0]
                return f"{outer}.{entry}"
        return layer

    def blocks(
        self, layers: Iterable[str], measured: Iterable[str] = ()
    ) -> dict[str, list[str]]:
        """The layers by their blocks, both in model order; `measured` as `block_of` takes it."""
        blocks: dict[str, list[str]] = {}
        for layer in layers:
            blocks.setdefault(self.block_of(layer, measured), []).append(layer)
        return blocks

    def layer_blocks(
        self, layer_name: str | None = None, layer_num: int | None = None
    ) -> dict[str, list[nn.Parameter]]:
        """The blocks that can be measured: entries of lists of layers, with their floating-point parameters.

        Args:
            layer_name: Path of a `ModuleList`. None takes `bert.encoder.layer` where
                there is one, otherwise every outermost `ModuleList` all of whose
                entries are of one class and have parameters (both stacks of a T5), and
                failing that those of several classes.
            layer_num: Entries of each list, from the first; None is all.

        Returns:
            Module name of the entry to its parameters, in model order.

        Raises:
            MoQError: There is no such list, or `layer_num` is more than a list has; the
                text names the lists that there are.
        """
        full = {
            name: entries
            for name, entries in self.lists.items()
            if entries and all(map(_has_weights, entries))
        }
        uniform = {
            name: entries
            for name, entries in full.items()
            if len({type(entry) for entry in entries}) == 1
        }
        lists = uniform or full
        if layer_name is not None:
            every = dict(named_modules(self.model, every=True))
            entries = every.get(layer_name)
            if not isinstance(entries, nn.ModuleList) or not _has_weights(entries):
                sizes = [f"{name} ({len(lists[name])})" for name in lists]
                raise MoQError(
                    f"eigenvalue.layer_name: {layer_name!r} is not a list of layers (a ModuleList); the model has: "
                    f"{', '.join(sizes) or 'none'}"
                )
            lists = {layer_name: entries}
        elif BERT_LAYERS in lists:
            lists = {BERT_LAYERS: lists[BERT_LAYERS]}
        if not lists:
            raise MoQError(
                "the model has no list of layers (a ModuleList of modules with parameters) to measure"
            )
        short = [
            f"{name} has {len(entries)}"
            for name, entries in lists.items()
            if len(entries) < (layer_num or 0)
        ]
        if short:
            raise MoQError(
                f"eigenvalue.layer_num: {layer_num} is more than there are: {', '.join(short)}"
            )
        return {
            f"{name}.{index}": [p for p in entry.parameters() if p.is_floating_point()]
            for name, entries in lists.items()
            for index, entry in enumerate(list(entries)[:layer_num])
        }


def is_convolution(module: nn.Module) -> bool:
    """True if a module is a convolution of PyTorch, including the kinds that stay in float."""
    return isinstance(module, CONVOLUTIONS)


def is_packed(model: nn.Module) -> bool:
    """True if `from_pretrained` made this model from a packed checkpoint: its layers may have no weights yet."""
    return packed_loader(model) is not None


def why_not_quantizable(module: nn.Module) -> str | None:
    """Why a linear layer, a convolution or an embedding table cannot be quantized and stays in float; None if it can.

    >>> why_not_quantizable(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    'has a computed weight'
    """
    kind = type(module)
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "has a max_norm"
        if module.sparse:
            return "has sparse gradients"
    if not issubclass(kind, tuple(CLASSES)):
        return f"has the class {kind.__name__}"
    # Accelerate wraps the forward of the instance, not of the class.
    is_plain = kind.forward in [plain.forward for plain in CLASSES]
    if not (is_plain or issubclass(kind, QuantModule) or is_scaled_table(kind)):
        return "has its own forward"
    # Parametrizations and the old weight_norm compute the weight at each access, so
    # there is no parameter to train or to save.
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return "has a computed weight"
    fault = unfit(weight)
    if fault is not None:
        return f"has {fault}"
    return None if shape_of(weight).numel() else "has an empty weight"


def unfit(weight: Tensor) -> str | None:
    """Why a weight cannot be trained on a grid, whatever module it belongs to; None if it can.

    >>> unfit(torch.ones(2, 2).to_sparse()), unfit(torch.ones(2, 2, dtype=torch.uint8))
    ('a weight in the layout sparse_coo', 'a weight of uint8')
    """
    if weight.dtype not in _FLOATS:
        return f"a weight of {dtype_name(weight.dtype)}"
    if weight.is_nested or weight.layout != torch.strided:
        layout = "nested" if weight.is_nested else dtype_name(weight.layout)
        return f"a weight in the layout {layout}"
    # torchao's tensors have a float dtype and hold something else.
    is_own = type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if is_own and not is_sharded(weight):
        library = type(weight).__module__.partition(".")[0]
        return f"a weight of {library}'s class {type(weight).__name__}"
    return None


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def output_heads(model: nn.Module, names: list[str]) -> list[str]:
    """The linear layers among `names` that are output heads of the model: by default they stay in full precision.

    In a transformers model with a base model, these are the layers outside of the base
    model. Otherwise they are the output embeddings. Without those, in a module made of
    transformers models (T5's two stacks, a body in a custom module), they are the heads
    of these models and the layers outside of them. In any other module it is the last
    linear layer.
    """
    named = list(named_modules(model, every=True))
    inner = without_peft(model)
    if inner is not model:
        path = next(name for name, module in named if module is inner)
        return _heads_below(path, inner, names)
    prefix = getattr(model, "base_model_prefix", None)
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return [name for name in names if not is_below(name, prefix)]
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    if output is not None:
        heads = [name for name, module in named if module is output]
        return [name for name in names if is_below(name, *heads)]
    parts: dict[str, nn.Module] = {}
    for path, module in named:
        if path and hasattr(module, "base_model_prefix") and not is_below(path, *parts):
            parts[path] = module
    if parts:
        inside = {name for name in names if is_below(name, *parts)}
        heads = [
            head
            for path, part in parts.items()
            for head in _heads_below(path, part, names)
        ]
        return [name for name in names if name in heads or name not in inside]
    is_base_model = prefix is not None
    return [] if is_base_model or len(names) == 1 else names[-1:]


def _heads_below(path: str, part: nn.Module, names: list[str]) -> list[str]:
    below = [name.removeprefix(f"{path}.") for name in names if is_below(name, path)]
    return [f"{path}.{head}" for head in output_heads(part, below)]


def grid_of(
    layer: nn.Module,
    config: MoQConfig,
    parameter: str = "weight",
    table_bits: int | None = None,
) -> Grid:
    """The grid of a chosen layer's weight, or of a parameter of experts.

    An embedding table has one scale per row, from its largest weight; with
    `group_size`, a table of fewer than 8 bits has the groups and the range of linear
    layers. A convolution then has one scale per channel, since groups seldom divide its
    kernels: a depthwise one of 3 x 3 has rows of 9 weights. Codes of either are never
    floats. `groups` counts the groups of each expert.

    >>> config = MoQConfig(bits=4, group_size=32)
    >>> grid_of(nn.Conv2d(3, 4, 3), config).grouping, grid_of(nn.Linear(32, 4), config).grouping
    (PerChannel(), PerGroup(size=32))
    """
    weight: Any = layer._parameters[parameter]
    grid = config.grid_of(dtype_name(weight.dtype))
    if isinstance(layer, nn.Embedding):
        size = grid.grouping.row_size
        if size is None or layer.embedding_dim % size or table_bits in (None, 8):
            return replace(_ROWS, scale_dtype=grid.scale_dtype)
        return replace(
            _ROWS,
            grouping=grid.grouping,
            full=grid.full,
            scale_dtype=grid.scale_dtype,
        )
    if is_convolution(layer):
        grouping = grid.grouping if grid.grouping.row_size is None else PerChannel()
        return replace(grid, grouping=grouping, format="int")
    if parameter != "weight" and isinstance(grid.grouping, RowBlocks):
        experts, *_ = matrix_of(layer, parameter)
        return replace(grid, grouping=RowBlocks(grid.grouping.count * experts))
    return grid
