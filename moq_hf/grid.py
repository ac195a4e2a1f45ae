"""Which weights share a scale."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowBlocks:
    """`count` scales per weight, each for a block of consecutive rows."""

    count: int = 1


@dataclass(frozen=True)
class PerChannel:
    """One scale per row of the weight."""


@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` consecutive weights of a row."""

    size: int


Grouping = RowBlocks | PerChannel | PerGroup
