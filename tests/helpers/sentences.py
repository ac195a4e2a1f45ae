"""How long the sentences of README.md and docs/guide are, and which words of the docs are not the house's.

`python tests/helpers/sentences.py`, at the root of the repository, prints words per sentence for each page. It measures
prose alone: no code, tables, headings, pictures and comments. Each item of a list is at least one sentence, inline code
is one word, and a link is its text.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from repo import ROOT

# All sentences together, and those of one page, are at most that long on average.
OVERALL, PAGE = 15.0, 18.0
# British spellings, by the beginnings of words, and what the house does not write; with what it writes instead.
ISE = "normal general initial optimi minimi maximi synchroni recogni summar organi real serial special visual util"
HOUSE = {
    rf"(?:{'|'.join(ISE.split())})i?s(?:e|es|ed|ing|ation)": "-ize",
    r"(?:\w*neighb|flav|col|behavi|fav|hon|lab)our\w*": "-or",
    r"gr(?:ey)\w*": "gray",
    r"(?:cent|met|fib)res?": "-er",
    r"(?:mode|labe|cance|trave)ll(?:ed|ing)": "one l",
    r"(?:mis)?spelt|learnt|whilst|judgement|artefacts?": "the American word",
    r"analys(?:e|es|ed|ing)|catalogued?|programmes?": "the American word",
    r"(?:is|are|was|were) no (?:folder|file|directory|candidates?|linear layers?|step|JSON|\w+ model)": "is not a",
    r"(?:is|are|was|were|be) told(?! (?:from|apart))": "is reported, raised or explained",
    r"tells?(?! (?:from|apart))": "shows, reports, raises or explains",
    r"scales? per row": "per channel",
}


def pages(root: Path = ROOT) -> list[Path]:
    """The pages whose sentences are measured."""
    return [root / "README.md", *sorted((root / "docs" / "guide").rglob("*.md"))]


def words_pages(root: Path = ROOT) -> list[Path]:
    """The pages whose words are checked."""
    patterns = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "configs/README.md", "examples/**/*.md")
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def without_code(source: str) -> str:
    """The page without blocks of code, comments and generated keys, its lines kept."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    source = re.sub(r"^( *)```.*?^ *```$", blank, source, flags=re.MULTILINE | re.DOTALL)
    # The table of keys is generated from the config's types.
    source = re.sub(r"<!-- keys -->.*?<!-- end of keys -->", blank, source, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", blank, source, flags=re.DOTALL)


def paragraphs(source: str) -> list[str]:
    """Paragraphs and list items of a page, each on one line."""
    found: list[str] = []
    fresh = True
    for line in without_code(source).splitlines():
        text = line.strip()
        indented = line.startswith("    ") and fresh and not (found and found[-1].startswith("- "))
        if not text or indented or text.startswith(("#", "|", "![")) or re.fullmatch(r"-{3,}", text):
            fresh = True
        elif fresh or re.match(r"[-*] |\d+\. ", text):
            found.append(text)
            fresh = False
        else:
            found[-1] += f" {text}"
    return [re.sub(r"^(?:[-*]|\d+\.) ", "", text) for text in found]


def plain(text: str) -> str:
    """A paragraph without marks: inline code is the word `code`, a link its text."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"(`+).+?\1", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}", "", text)


def sentences(source: str) -> list[str]:
    """The sentences of a page."""
    found = []
    for paragraph in paragraphs(source):
        parts = re.split(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]*[A-Z0-9]|code\b)", plain(paragraph))
        found += [part for part in parts if re.search(r"\w", part)]
    return found


def words(sentence: str) -> int:
    """How many words a sentence has; marks that stand alone are none."""
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def lengths(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Words of each sentence of each page that has any."""
    found = {path: [words(each) for each in sentences(path.read_text(encoding="utf-8"))] for path in paths}
    return {path: counts for path, counts in found.items() if counts}


def foreign(source: str) -> list[tuple[int, str, str]]:
    """Line, word and what the docs write instead, for each word that is not the house's."""
    found = []
    for number, line in enumerate(without_code(source).splitlines(), 1):
        text = re.sub(r"(`+).+?\1|\]\([^)]*\)", "", line)
        for pattern, instead in HOUSE.items():
            found += [(number, match[0], instead) for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)]
    return found


def table(found: dict[Path, list[int]], root: Path = ROOT) -> str:
    """A line for each page, and one for all."""
    lines = [f"{'page':44} sentences  words each  longest"]
    every = [count for counts in found.values() for count in counts]
    rows = [(path.relative_to(root).as_posix(), counts) for path, counts in found.items()]
    for name, counts in [*rows, ("all", every)]:
        lines.append(f"{name:44} {len(counts):9} {sum(counts) / len(counts):11.1f} {max(counts):8}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table of the pages, or of those that are named, and the words that are not the house's."""
    named = [Path(name).resolve() for name in arguments]
    print(table(lengths(named or pages()), Path.cwd().resolve() if named else ROOT))
    for path in named or words_pages():
        for line, word, instead in foreign(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(Path.cwd().resolve() if named else ROOT)}:{line}: {word} -> {instead}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
