"""Turns a DeepSpeed config into one of moq_hf that brings a run of a given length to its target."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from .config import MoQConfig
from .dialect import DEEPSPEED_DEFAULTS, DEEPSPEED_KEYS, SECTION
from .errors import MoQError
from .forecast import plan
from .schedule import fade_steps
from .training.resume import changes, describe

logger = logging.getLogger(__name__)


def migrate(document: Mapping[str, Any], max_steps: int) -> dict[str, Any]:
    """Make a moq_hf config that does what a DeepSpeed config says, as far as that fits into a run.

    Defaults in which DeepSpeed and moq_hf differ are written out. If the run is too short
    for the periods, they become "auto"; if that is not enough, the offset becomes 0, the
    deadline the end of the run, and finally `start_bits` fewer. A warning names the
    changes. Other sections are left out, with a warning that names them.

    Args:
        document: A DeepSpeed config, or its section `quantize_training`.
        max_steps: Optimizer steps of the run.

    Raises:
        MoQConfigError: The document is wrong.
        MoQError: No change of the schedule fits into the run.

    >>> block = {"quantize_bits": {"start_bits": 12, "target_bits": 8}, "quantize_schedule": {"quantize_period": 400}}
    >>> written = migrate({"quantize_training": block}, 345)
    >>> written["bits"], written["period"], written["offset"]
    (8, 'auto', 0)
    """
    known = {SECTION} | DEEPSPEED_KEYS
    if isinstance(document, Mapping) and known.isdisjoint(document):
        document = {SECTION: document}
    config = MoQConfig.from_dict(document)
    if not config.enabled:
        raise MoQError(
            "enabled is false: such a run trains in float, for any number of steps"
        )
    fitting = next(
        (c for c in _candidates(config, max_steps) if _fits(c, max_steps)), None
    )
    if fitting is None:
        raise MoQError(
            f"a run of {max_steps} optimizer steps is too short for {config.target_in_words}, whatever the schedule is"
        )
    changed = changes(config, fitting)
    if changed:
        logger.warning(
            "moq_hf: changed so that a run of %d optimizer steps reaches %s: %s",
            max_steps,
            config.target_in_words,
            describe(changed, config.spell),
        )
    return fitting.changed(*DEEPSPEED_DEFAULTS)


def _candidates(config: MoQConfig, max_steps: int) -> Iterator[MoQConfig]:
    """Yield the config as it is, then with more and more changes."""
    room = max_steps - 1 - fade_steps(config)
    most = max(config.targets[-1], config.targets[0] + room)
    further: tuple[dict[str, Any], ...] = (
        {"period": "auto", "deadline": None},
        {"offset": 0},
        {"deadline": 1.0},
        {"start_bits": min(config.start_bits, most)},
    )
    yield config
    for change in further:
        config = dataclasses.replace(config, **change)
        yield config


def _fits(config: MoQConfig, max_steps: int) -> bool:
    try:
        return plan(config, max_steps).reached
    except MoQError:
        return False
