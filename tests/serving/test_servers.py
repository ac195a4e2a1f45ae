"""The data of the servers, and the table that the guide has of them."""

import re

from repo import ROOT

from moq_hf.serving.servers import SERVERS, TRANSFORMERS, Server

HEAD = "| server | version | bits | with zero points | groups | per channel | columns | rows |"


def row(server: Server) -> str:
    any_of = ["-" if size == 1 else f"multiples of {size}" for size in (server.multiple, server.columns, server.rows)]
    groups = ", ".join(map(str, server.groups)) or any_of[0]
    bits = [", ".join(map(str, sorted(legal))) for legal in (server.symmetric, server.asymmetric)]
    bits = [re.sub(r"^(\d+), .* (\d+)$", r"\1 to \2", text) if text.count(",") > 3 else text for text in bits]
    by_rows = "yes" if server.by_rows else "no"
    return f"| {' | '.join([server.title, server.version, *bits, groups, by_rows, *any_of[1:]])} |"


def table() -> str:
    return "\n".join([HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |", *map(row, SERVERS)])


def test_the_guide_has_the_servers() -> None:
    page = (ROOT / "docs" / "guide" / "serving.md").read_text(encoding="utf-8")
    assert page.partition("<!-- servers -->\n")[2].partition("\n<!-- end of servers -->")[0] == table()


def test_each_rule_says_where_it_was_read() -> None:
    assert len({server.key for server in SERVERS}) == len(SERVERS)
    assert all(server.version and server.source for server in SERVERS)
    # A legal group fits the multiple as well.
    assert all(size % server.multiple == 0 for server in SERVERS for size in server.groups)


def test_transformers_takes_everything() -> None:
    assert TRANSFORMERS.symmetric == frozenset(range(1, 17)) and not TRANSFORMERS.architectures
