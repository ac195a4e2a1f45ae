"""The docs are written for their reader: short sentences, and one word for one thing."""

import sentences
from sentences import foreign, lengths, pages, table, words, words_pages


def test_sentences_are_short() -> None:
    found = lengths(pages())
    # A folder that has moved would leave nothing to measure.
    assert sentences.ROOT / "README.md" in found and len(found) > 10
    every = [count for counts in found.values() for count in counts]
    too_long = [path.name for path, counts in found.items() if sum(counts) / len(counts) > sentences.PAGE]
    assert sum(every) / len(every) <= sentences.OVERALL and too_long == [], table(found)


def test_words_are_those_of_the_house() -> None:
    found = {path.relative_to(sentences.ROOT).as_posix(): foreign(path.read_text("utf-8")) for path in words_pages()}
    assert {name: words for name, words in found.items() if words} == {}


def test_what_a_sentence_is() -> None:
    source = """# A heading is none. Really.

One sentence of `code with spaces` here. Another, with [a link](page.md) in
it! `Code` begins this one.

    indented code. Not counted.

| a table | is none |
| --- | --- |

- An item: one sentence.
- an item without a dot
- **Bold.** 3.5 of 4 bits are one - mark - less

```bash
not. counted.
```

![A picture](a.png)
Is this one?
"""
    assert [words(each) for each in sentences.sentences(source)] == [5, 6, 4, 4, 5, 1, 8, 3]


def test_foreign_words_are_found() -> None:
    source = "A `colour` and\n```text\nflavour\n```\nnormalised neighbours, it is told that\nit cannot be told from"
    assert [(line, word) for line, word, _ in foreign(source)] == [
        (5, "normalised"),
        (5, "neighbours"),
        (5, "is told"),
    ]
