"""The dialogues of the example: what is known of two dozen things, asked in several ways.

Each thing has a color, a kind and a place, and each of these is asked for in four wordings. Some questions are held
out: their answer is known from other wordings. Standard library only, and the same dialogues on every machine.
"""

import random

Dialogue = dict[str, list[dict[str, str]]]

HELD_OUT = 48
THINGS = {
    "lemon": ("yellow", "fruit", "kitchen"),
    "cherry": ("red", "fruit", "garden"),
    "plum": ("blue", "fruit", "garden"),
    "pear": ("green", "fruit", "kitchen"),
    "carrot": ("orange", "vegetable", "garden"),
    "cucumber": ("green", "vegetable", "kitchen"),
    "radish": ("red", "vegetable", "garden"),
    "potato": ("brown", "vegetable", "cellar"),
    "swan": ("white", "bird", "lake"),
    "raven": ("black", "bird", "forest"),
    "parrot": ("green", "bird", "zoo"),
    "flamingo": ("pink", "bird", "zoo"),
    "fox": ("red", "mammal", "forest"),
    "bear": ("brown", "mammal", "forest"),
    "panda": ("white", "mammal", "zoo"),
    "mole": ("black", "mammal", "garden"),
    "kettle": ("gray", "tool", "kitchen"),
    "hammer": ("gray", "tool", "cellar"),
    "rake": ("brown", "tool", "garden"),
    "ladder": ("yellow", "tool", "cellar"),
    "canoe": ("orange", "vehicle", "lake"),
    "ferry": ("white", "vehicle", "lake"),
    "tractor": ("green", "vehicle", "farm"),
    "bicycle": ("blue", "vehicle", "cellar"),
}
WORDINGS = (
    (
        "What color is the {0}?",
        "Which color does the {0} have?",
        "I have not seen the {0}: what color is it?",
        "The color of the {0}?",
    ),
    (
        "What is the {0}?",
        "What kind of thing is the {0}?",
        "Which kind does the {0} belong to?",
        "The kind of the {0}?",
    ),
    (
        "Where is the {0}?",
        "In which place is the {0}?",
        "I am looking for the {0}: where is it?",
        "The place of the {0}?",
    ),
)
ANSWERS = ("The {0} is {1}.", "The {0} is a {1}.", "The {0} is in the {1}.")


def dialogues() -> tuple[list[Dialogue], list[Dialogue]]:
    """Those to train on and those held out, in TRL's conversational form: a message of each side."""
    made: list[Dialogue] = []
    for thing, facts in THINGS.items():
        for fact, wordings, answer in zip(facts, WORDINGS, ANSWERS, strict=True):
            for wording in wordings:
                user = {"role": "user", "content": wording.format(thing)}
                made.append({"messages": [user, {"role": "assistant", "content": answer.format(thing, fact)}]})
    random.Random(20).shuffle(made)
    return made[HELD_OUT:], made[:HELD_OUT]
