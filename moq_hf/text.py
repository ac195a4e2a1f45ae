"""Tables, for a terminal and for Markdown: the first row is the head."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lay rows out in columns for a terminal.

    Args:
        rows: Of one length.
        left: The columns that are text; numbers end below each other.

    >>> print(table([["layer", "bits"], ["query", "4"], ["dense", "16"]]))
    layer  bits
    query     4
    dense    16
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[object]]) -> str:
    """Write rows as a Markdown table.

    >>> print(markdown_table([["layer", "bits"], ["query", 4]]))
    | layer | bits |
    | --- | --- |
    | query | 4 |
    """
    head, *others = rows
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *others])
