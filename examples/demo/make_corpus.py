"""Writes the corpus and the tokenizer of the demo.

The corpus has the shape of SST-2 (``sentence``, ``label``; 1 = positive). Each sentence names one good and one bad
quality of the same thing and its grammar says which of the two holds: "The soup looked tasty but turned out to be
greasy." is negative, "The soup looked greasy but turned out to be tasty." is positive. Every such sentence stands beside its
partner with the two adjectives exchanged, so both labels have the same words and a rule over a bag of words is right
exactly half of the time. What has to be learned is the polarity of some 280 adjectives and which of the two is meant in
some 40 constructions. A third of the training sentences are plain ones ("The soup was tasty."), from which the polarity
can be learned first; the validation set has none.

Standard library only, and the same bytes for the same seed on every machine.

    python examples/demo/make_corpus.py --out examples/demo
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

SEED = 20
TRAIN_PAIRS = 1800
TRAIN_PLAIN = 2000
VALIDATION_PAIRS = 400
VOCABULARY = 900
MAX_TOKENS = 64
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Adjectives that suit every domain: good, bad.
GENERAL = (
    "excellent wonderful superb great splendid marvellous brilliant lovely fantastic delightful amazing perfect",
    "terrible awful dreadful horrible poor disappointing appalling lousy atrocious dismal unpleasant pathetic",
)

# Per domain: nouns, good adjectives, bad adjectives.
DOMAINS = {
    "story": (
        "film novel play musical comedy thriller biography series sequel opera documentary cartoon romance memoir "
        "western drama trilogy fable ballet podcast",
        "gripping moving witty hilarious thrilling touching absorbing imaginative poignant riveting suspenseful subtle "
        "inventive clever original funny engaging profound entertaining uplifting memorable",
        "dull tedious predictable clumsy shallow forgettable pretentious muddled contrived lifeless plodding boring "
        "incoherent trite silly sentimental implausible confusing tiresome derivative stilted",
    ),
    "food": (
        "soup salad curry pie stew pizza burger omelette sandwich pudding roast risotto casserole cake pancake dumpling "
        "sausage steak kebab trout",
        "delicious tasty fresh tender juicy crisp flavourful succulent fragrant creamy appetising nourishing mouthwatering "
        "wholesome scrumptious zesty satisfying fluffy aromatic",
        "stale greasy soggy burnt tasteless overcooked rancid watery rubbery bland slimy mouldy inedible charred gristly "
        "mushy undercooked sickly lukewarm",
    ),
    "place": (
        "hotel cottage apartment campsite hostel cabin villa museum library station office bakery garden theatre "
        "classroom kitchen bedroom lobby market harbour",
        "spotless cosy quiet spacious bright comfortable charming peaceful clean tidy airy welcoming picturesque sunny "
        "inviting stylish tranquil safe orderly restful",
        "filthy noisy cramped shabby damp draughty dingy dirty smelly gloomy squalid dilapidated chaotic uncomfortable "
        "neglected unsafe depressing musty dusty overcrowded",
    ),
    "person": (
        "waiter teacher nurse driver guide plumber dentist neighbour manager barber tailor lawyer librarian cashier "
        "gardener coach landlord receptionist pilot baker",
        "friendly polite helpful patient kind attentive cheerful generous competent knowledgeable honest courteous "
        "considerate punctual diligent thoughtful gracious sincere skilful tactful",
        "rude surly lazy impatient careless grumpy arrogant clueless hostile dishonest incompetent cruel selfish sloppy "
        "unhelpful stubborn moody condescending sarcastic spiteful",
    ),
    "product": (
        "laptop camera bicycle printer kettle blender tent watch phone vacuum lamp heater mattress drill keyboard stove "
        "scooter radio suitcase umbrella",
        "reliable sturdy durable efficient precise accurate elegant robust versatile handy ergonomic practical powerful "
        "economical useful dependable intuitive responsive lightweight ingenious",
        "flimsy fragile sluggish unreliable defective useless clunky faulty awkward wobbly unresponsive overpriced "
        "brittle inaccurate cumbersome broken wasteful shoddy rickety impractical",
    ),
}

PEOPLE = (
    "sister brother uncle aunt cousin friend colleague grandmother boss nephew flatmate doctor grandfather niece "
    "teammate partner"
)
TIMES = "yesterday,last week,on Sunday,last summer,this morning,in the spring,on holiday,after work,in March,last year"

# {x}, {y}: the adjectives in the order of the sentence; {ax}, {ay}: with their article; {n}: the noun; {it}: its
# pronoun; {who}: someone of PEOPLE; {when}: one of TIMES; {seemed}, {but}, {very}: small variation.
SECOND_HOLDS = (
    "The {n} {seemed} {x} at first {but} turned out to be {y}.",
    "The {n} {seemed} {x}, but {it} was {very} {y}.",
    "My {who} called the {n} {x}, but I found {him} {very} {y}.",
    "My {who} said the {n} would be {x}, {but} {it} was {y}.",
    "I expected {ax} {n} {when} and got {ay} one.",
    "The {n} used to be {x}; these days {it} is {very} {y}.",
    "Although people call {him} {x}, the {n} was {y} {when}.",
    "Far from being {x}, the {n} was {very} {y}.",
    "The {n} was not {x} at all, {it} was {y}.",
    "Instead of {ax} {n} we got {ay} one {when}.",
    "What had seemed {ax} {n} was in fact {ay} one.",
    "Once {x}, the {n} is now {very} {y}.",
    "The {n} is no longer {x}; {it} has become {y}.",
    'You may have heard that the {n} is {x}, but "{y}" is the right word.',
    "Nobody calls the {n} {x} any more: {it} is {y}.",
    "The other {n} was {x}, {but} this one is {very} {y}.",
    "The old {n} was {x}; the new one is {y}.",
    "My {who} was wrong to call the {n} {x}, because {it} is {y}.",
    "If you think the {n} is {x}, think again: {it} is {y}.",
    "No one who knows this {n} would say {x}; everyone says {y}.",
    "I had read about {ax} {n}, {but} the one we found {when} was {y}.",
    "Never {x}, always {y}: that is our {n}.",
    "It is a mistake to think of this {n} as {x} when {it} is so {y}.",
    "Last time the {n} was {x}. This time {it} was {y}.",
)
FIRST_HOLDS = (
    "The {n} was {very} {x}, not {y} as my {who} had claimed.",
    "The {n} was {x} {when}, although my {who} had called {him} {y}.",
    "The {n} is {x} now, but {it} used to be {y}.",
    "It was {ax} {n}, not the {y} one we had expected.",
    "The {n} turned out to be {x} rather than {y}.",
    "We got {ax} {n} {when} instead of {ay} one.",
    "I found the {n} {x}, though my {who} had told me {it} was {y}.",
    "The {n} has become {x} after years of being {y}.",
    "The {n} was {very} {x} and anything but {y}.",
    "This one is {ax} {n}; the last one was {y}.",
    "You would not guess from this {x} {n} how {y} the old one was.",
    "The {n} is {x}, whatever my {who} says about {him} being {y}.",
    "So {x} was the {n} {when} that nobody called {him} {y}.",
    "The {n} proved {x}, contrary to all those {y} first impressions.",
)
PLAIN = (
    "The {n} was {very} {x}.",
    "The {n} is {very} {x}.",
    "The {n} {seemed} {x} {when}.",
    "It was {ax} {n}.",
    "We had {ax} {n} {when}.",
    "My {who} said the {n} was {x}.",
)
SEEMED = ("seemed", "looked", "sounded", "appeared")
BUT = ("but", "yet", "and yet")
VERY = ("", "", "really", "truly", "quite")
SECOND_SHARE = 0.65


def zipf(words: str) -> tuple[list[str], list[float]]:
    """The words and their weights 1 / (rank + 3): some are common, some rare, as in real text."""
    listed = words.split()
    return listed, [1 / (rank + 3) for rank in range(len(listed))]


def with_article(word: str) -> str:
    """The word behind "a" or "an"."""
    return f"{'an' if (word[0] in 'aeiou' and not word.startswith('use')) or word == 'honest' else 'a'} {word}"


def fill(template: str, x: str, y: str, words: dict[str, str]) -> str:
    """The sentence of a template."""
    text = template.format(x=x, y=y, ax=with_article(x), ay=with_article(y or "x"), **words)
    return " ".join(text.split())


class Writer:
    """Draws sentence pairs. All of its choices come from one ``random.Random(seed)``."""

    def __init__(self, seed: int) -> None:
        """Shuffles each word list once, so that which words are rare depends on the seed alone."""
        self.random = random.Random(seed)
        self.adjectives = {}
        for domain, (_, good, bad) in DOMAINS.items():
            lists = [f"{own} {general}".split() for own, general in zip((good, bad), GENERAL, strict=True)]
            for words in lists:
                self.random.shuffle(words)
            self.adjectives[domain] = tuple(zipf(" ".join(words)) for words in lists)

    def pair(self) -> tuple[tuple[str, str], list[dict[str, str | int]]]:
        """One pair of sentences with the same words.

        Returns:
            The good and the bad adjective, and the positive and the negative row (keys ``sentence``, ``label``).
        """
        draw = self.random
        domain, words = self.setting()
        good, bad = (draw.choices(listed, weights)[0] for listed, weights in self.adjectives[domain])
        second_holds = draw.random() < SECOND_SHARE
        template = draw.choice(SECOND_HOLDS if second_holds else FIRST_HOLDS)
        rows = []
        for label in (1, 0):
            first_is_good = (label == 1) != second_holds
            x, y = (good, bad) if first_is_good else (bad, good)
            rows.append({"sentence": fill(template, x, y, words), "label": label})
        return (good, bad), rows

    def plain(self) -> dict[str, str | int]:
        """One sentence with one adjective: a row with ``sentence`` and ``label``."""
        domain, words = self.setting()
        label = self.random.randint(0, 1)
        listed, weights = self.adjectives[domain][1 - label]
        adjective = self.random.choices(listed, weights)[0]
        return {"sentence": fill(self.random.choice(PLAIN), adjective, "", words), "label": label}

    def setting(self) -> tuple[str, dict[str, str]]:
        """A domain, and the words of a sentence other than the adjectives."""
        draw = self.random
        domain = draw.choice(list(DOMAINS))
        it = draw.choice(("he", "she")) if domain == "person" else "it"
        return domain, {
            "n": draw.choice(DOMAINS[domain][0].split()),
            "it": it,
            "him": {"he": "him", "she": "her", "it": "it"}[it],
            "who": draw.choice(PEOPLE.split()),
            "when": draw.choice(TIMES.split(",")),
            "seemed": draw.choice(SEEMED),
            "but": draw.choice(BUT),
            "very": draw.choice(VERY),
        }


def make_rows(seed: int) -> tuple[list[dict[str, str | int]], list[dict[str, str | int]]]:
    """The training and the validation rows.

    No sentence occurs twice, and no two adjectives that meet in a validation sentence meet in a training sentence.
    """
    writer = Writer(seed)
    splits: list[list[dict[str, str | int]]] = []
    seen: set[str] = set()
    held_out: set[tuple[str, str]] = set()
    for count in (VALIDATION_PAIRS, TRAIN_PAIRS):
        rows: list[dict[str, str | int]] = []
        met = set()
        while len(rows) < 2 * count:
            adjectives, pair = writer.pair()
            if adjectives in held_out or pair[0]["sentence"] in seen:
                continue
            met.add(adjectives)
            seen.update(str(row["sentence"]) for row in pair)
            rows += pair
        held_out = met
        splits.append(rows)
    validation, train = splits
    # Half of each label, whatever was drawn.
    wanted = {0: TRAIN_PLAIN // 2, 1: TRAIN_PLAIN // 2}
    while any(wanted.values()):
        row = writer.plain()
        if wanted[int(row["label"])] and row["sentence"] not in seen:
            wanted[int(row["label"])] -= 1
            seen.add(str(row["sentence"]))
            train.append(row)
    for rows in splits:
        writer.random.shuffle(rows)
    return train, validation


def split_words(text: str) -> list[str]:
    """Lower-case words and single punctuation marks, as BERT's pre-tokenizer gives them for plain ASCII."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def learn_vocabulary(sentences: Iterable[str], size: int) -> list[str]:
    """WordPieces of the sentences: the special tokens, the characters, then the merges, most frequent pair first.

    Args:
        sentences: the training text.
        size: number of tokens wanted; fewer come back when every word has become one piece before.

    Returns:
        The tokens in the order of their ids. Ties go to the pair that sorts first, so the order is reproducible.
    """
    counts = Counter(word for sentence in sentences for word in split_words(sentence))
    pieces = {word: [word[0], *(f"##{char}" for char in word[1:])] for word in counts}
    vocabulary = [*SPECIAL, *sorted({piece for parts in pieces.values() for piece in parts})]
    while len(vocabulary) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged = best[0] + best[1].removeprefix("##")
        vocabulary.append(merged)
        for parts in pieces.values():
            for place in range(len(parts) - 1, 0, -1):
                if (parts[place - 1], parts[place]) == best:
                    parts[place - 1 : place + 1] = [merged]
    return vocabulary


def tokenizer_files(vocabulary: list[str]) -> dict[str, str]:
    """The text of each tokenizer file, by name, for ``transformers.BertTokenizer`` and ``AutoTokenizer``."""
    ids = {token: number for number, token in enumerate(vocabulary)}

    def special(token: str, kind: int) -> dict[str, dict[str, str | int]]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, dict[str, str | int]]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in SPECIAL],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, sequence("B", 1), special("[SEP]", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_TOKENS, **names}
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=1) + "\n",
        "vocab.txt": "\n".join(vocabulary) + "\n",
    }


def write(out: Path, seed: int) -> None:
    """Writes ``train.jsonl``, ``validation.jsonl`` and ``model/`` (tokenizer files only) under ``out``."""
    train, validation = make_rows(seed)
    vocabulary = learn_vocabulary((str(row["sentence"]) for row in train), VOCABULARY)
    files = {f"model/{name}": text for name, text in tokenizer_files(vocabulary).items()}
    for name, rows in (("train", train), ("validation", validation)):
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "model").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(description="Write the corpus and the tokenizer of the demo.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED, help="the committed files have %(default)s")
    args = parser.parse_args()
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
