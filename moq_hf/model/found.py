"""`take_found`: puts layers on the grids that their weights already lie on, for `"grid": "found"`."""

import glob
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..config import MoQConfig
from ..config_fields import OverrideConfig, matches
from ..errors import MOST_FAULTS, MoQError, shortened
from ..grid import MOST_FULL_BITS
from ..lattice import FoundGrid, find_grid
from ..processes import whole
from ..quant_linear import quantized_in
from ..text import progress
from ..weight_matrix import to_rows
from .inventory import Inventory
from .selection import take_inventory

# Keys that follow from the weights.
_DECIDED = ("bits", "group_size", "q_type", "range", "scale_dtype", "format")


def take_found(model: Any, config: MoQConfig) -> tuple[Inventory, MoQConfig]:
    """As `take_inventory`, with the grids that the weights lie on, and a config that names them.

    Layers that have found grids keep them, whatever training has made of their weights.

    Args:
        model: A module, or a Trainer's wrapper of it.
        config: The config to follow.

    Raises:
        MoQError: What `take_inventory` raises; a layer whose weights do not lie on a grid
            wholly, or on one that cannot be trained or delivered; layers whose grids do not
            go together; or a key of the config that says otherwise.
    """
    if config.grid is None or not config.enabled:
        return take_inventory(model, config), config
    bare = MoQConfig(
        bits=8,
        modules_to_not_convert=config.modules_to_not_convert,
        heads=config.heads,
        convolutions=config.convolutions,
        embeddings=None,
    )
    found = _grids_of(take_inventory(model, bare))
    _check_whole(found)
    if not all(grid.symmetric for grid in found.values()):
        # One config has one kind, and a row may be symmetric by chance.
        found = {name: grid.with_zero_points() for name, grid in found.items()}
    named = _named(config, found)
    return replace(take_inventory(model, named), found=found), named


def _grids_of(inventory: Inventory) -> dict[str, FoundGrid]:
    """The grid of each layer, on the device of its weight."""
    found: dict[str, FoundGrid] = {}
    columns: dict[str, int] = {}
    for name, module, attribute, kind in progress([*inventory.weights()], "grids"):
        states = quantized_in(name, module)
        weight = module._parameters[attribute]
        assert weight is not None
        own = next(
            (each.moq.found for each in states.values() if each.attribute == attribute),
            None,
        )
        if own is None:
            rows = to_rows(whole(weight).detach(), kind).cpu()
            own = find_grid(rows)
            if kind != "conv":
                columns[name] = rows.shape[1]
        found[name] = own.on(weight.device)
    sizes = {grid.row_size for grid in found.values()}
    for name, size in columns.items():
        # A row as long as the groups of other layers is such a group.
        if found[name].row_size is None and size in sizes:
            found[name] = replace(found[name], row_size=size)
    return found


def _check_whole(found: Mapping[str, FoundGrid]) -> None:
    """Refuse weights that are not wholly on a grid that a folder can hold.

    Raises:
        MoQError: Some are not; names their layers.
    """
    off = {name: grid for name, grid in found.items() if grid.scales is None}
    if not off:
        return
    reasons: dict[str, list[str]] = {}
    for name, grid in off.items():
        share = (
            f"{100 * grid.share:.2f} % on " if grid.bits and not grid.is_whole else ""
        )
        reasons.setdefault(f"{share}{grid.in_words}", []).append(name)
    told = "; ".join(
        f"{shortened(names, MOST_FAULTS)} ({words})" for words, names in reasons.items()
    )
    why = ""
    if any(grid.has_minimum for grid in off.values()):
        why = "; a minimum, as of Q4_1, is no whole multiple of its scale, and folders have no place for it"
    raise MoQError(
        f'grid: "found" needs weights that lie wholly on a grid of moq_hf, which these do not: {told}{why}; name '
        "these layers in modules_to_not_convert, or give bits instead of grid"
    )


def _named(config: MoQConfig, found: Mapping[str, FoundGrid]) -> MoQConfig:
    """The config with the grids of the layers.

    Raises:
        MoQError: One config cannot name them all, or this one names others.
    """
    grids = list(found.values())
    formats: dict[str, list[str]] = {}
    for name, grid in found.items():
        formats.setdefault(grid.format, []).append(name)
    if len(formats) > 1:
        told = "; ".join(
            f"{shortened(names, MOST_FAULTS)} ({found[names[0]].in_words})"
            for names in formats.values()
        )
        raise MoQError(
            'grid: "found": the layers lie on grids of several formats, and one config has one: name those of '
            f"the others in modules_to_not_convert: {told}"
        )
    narrow = min(grid.row_size or 0 for grid in grids)
    bits, _ = Counter(grid.bits for grid in grids).most_common(1)[0]
    sizes = Counter(grid.row_size for grid in grids if grid.bits == bits)
    # Overrides can name groups, and not whole rows.
    size = sizes.most_common(1)[0][0] if narrow else None
    dtypes = {grid.scale_dtype for grid in grids}
    integers = [grid for grid in grids if grid.symmetric and grid.format == "int"]
    is_auto = all(grid.full == (grid.bits <= MOST_FULL_BITS) for grid in integers)
    is_full = any(grid.full for grid in grids)
    values: dict[str, Any] = {
        "bits": bits,
        "group_size": size,
        "q_type": "symmetric" if grids[0].symmetric else "asymmetric",
        "range": "auto" if is_auto else "full" if is_full else "narrow",
        "scale_dtype": dtypes.pop() if len(dtypes) == 1 else "float32",
        "format": grids[0].format,
    }
    overrides = {
        pattern: replace(own, bits=None, start_bits=None, group_size=None)
        for pattern, own in config.overrides.items()
        if own.activations is not None
    }
    for name, grid in found.items():
        if (grid.bits, grid.row_size) != (bits, size):
            pattern = _pattern_of(name, found)
            overrides[pattern] = replace(
                overrides.pop(pattern, OverrideConfig()),
                bits=grid.bits,
                start_bits=grid.bits,
                group_size=grid.row_size if grid.row_size != size else None,
            )
    named = replace(
        config,
        **values,
        start_bits=bits,
        scale="absmax",
        embeddings=None if config.embeddings == "auto" else config.embeddings,
        overrides=overrides,
    )
    _check_said(config, named)
    return named


def _pattern_of(name: str, names: Collection[str]) -> str:
    """The name of a layer, or a glob that means no other layer if the name is part of another's.

    >>> _pattern_of("0", ["0", "1"]), _pattern_of("0", ["0", "1.0"])
    ('0', '[0]')
    """
    if sum(matches(other, name) for other in names) == 1:
        return name
    return f"[{name[0]}]{glob.escape(name[1:])}"


def _check_said(config: MoQConfig, named: MoQConfig) -> None:
    """Refuse keys that contradict the grids of the weights.

    Raises:
        MoQError: There are some.
    """
    default = MoQConfig(grid="found")
    faults = []
    for key in _DECIDED:
        said, is_so = getattr(config, key), getattr(named, key)
        if said not in (getattr(default, key), is_so):
            faults.append(f"{config.spell(key)}: {said} (the weights have {is_so})")
    for pattern, own in config.overrides.items():
        said = own.bits, own.group_size
        there = named.overrides.get(pattern, OverrideConfig())
        if said not in ((None, None), (there.bits, there.group_size)):
            faults.append(f"overrides.{pattern}")
    if faults:
        raise MoQError(
            f'grid: "found" takes the grids of the weights, and the config says others: {"; ".join(faults)}; leave '
            "these keys out"
        )
