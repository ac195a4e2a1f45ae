"""The Jinja templates of the model card and the report, and the filters that show names and numbers in them.

In an HTML template values are escaped. A Markdown template says how to show a name from
outside: as text (`plain`) or as a code span (`code`).
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from .text import markdown_table, megabytes

TEMPLATES = Path(__file__).with_name("templates")
# Characters that Markdown takes for markup in the middle of a line.
_MARKUP = re.compile(r"[\\`*<|\[&~$]|(?<![^\W_])_|_(?![^\W_])")


def rendered(template: str, **facts: Any) -> str:
    """Fill in one of the package's templates.

    Args:
        template: The name of its file in the folder `templates`.
        **facts: The variables of the template.
    """
    return _ENVIRONMENT.get_template(template).render(facts).strip()


def single_line(text: object) -> str:
    r"""Join the lines of a text.

    >>> single_line("to 4 bits,\n   in all")
    'to 4 bits, in all'
    """
    return " ".join(str(text).split())


def plain(value: object) -> str:
    """Escape a value so that Markdown shows it as it is, in one line.

    >>> print(plain("layer_1 of a|b, <i>"))
    layer_1 of a&#124;b, &#60;i>
    """
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", single_line(value))


def code(name: str) -> str:
    """Put a name into a code span of Markdown, or escape it if it would end the span.

    >>> print(code("lm_head"), code("a`b"))
    `lm_head` a&#96;b
    """
    return plain(name) if re.search(r"[`\n\r]", name) else f"`{name}`"


def _table(rows: Sequence[Sequence[object]]) -> str:
    return markdown_table([[plain(cell) for cell in row] for row in rows])


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "code": code,
    "json": functools.partial(json.dumps, indent=2),
    "megabytes": megabytes,
    "single_line": single_line,
    "plain": plain,
    "table": _table,
}
