"""Wrong configs: one MoQConfigError that names the key, the value, what is legal and what was probably meant."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from config_reference import json_schema
from jsonschema import Draft202012Validator

from moq_hf.config import MoQConfig
from moq_hf.errors import MoQConfigError, MoQError

BITS = {"quantize_bits": {"start_bits": 12, "target_bits": 8}}


def with_bits(**more: Any) -> dict[str, Any]:
    return BITS | more


def bits(start: Any, target: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": start, "target_bits": target}}


def schedule(**keys: Any) -> dict[str, Any]:
    return with_bits(quantize_schedule=keys)


def algo(**keys: Any) -> dict[str, Any]:
    return with_bits(quantize_algo=keys)


def eigenvalue(**keys: Any) -> dict[str, Any]:
    return with_bits(eigenvalue=keys)


# Each row: what is wrong, the document, what the error must hold. Text is the content of a file, bytes too.
CASES: list[tuple[str, Any, list[str]]] = [
    # Not JSON, or not the JSON of a config.
    ("empty file", "", ["bad.json is not JSON", "line 1, column 1"]),
    ("missing brace", '{"quantize_groups": 8,\n "seed": 1', ["is not JSON", "line 2, column 11"]),
    ("duplicate key", '{"seed": 1, "seed": 2}', ["bad.json", "key given twice: seed"]),
    (
        "duplicate key further in",
        '{"quantize_bits": {"start_bits": 12, "start_bits": 10}}',
        ["key given twice: start_bits"],
    ),
    ("NaN literal", '{"eigenvalue": {"tol": NaN}}', ["eigenvalue.tol: NaN is not legal", "a number above 0"]),
    ("not UTF-8", b'{"seed": "\xe9"}', ["cannot read", "bad.json", "utf-8", "0xe9"]),
    ("too deep", "[" * 100_000, ["bad.json"]),
    ("endless number", '{"seed": ' + "9" * 5000 + "}", ["bad.json", "4300 digits"]),
    ("list at the top", "[1, 2]", ["bad.json: must be an object of keys, got [1, 2]"]),
    ("nothing", None, ["must be an object of keys, got null"]),
    # DeepSpeed's documents.
    (
        "DeepSpeed config without the block",
        {"fp16": {"enabled": True}, "train_batch_size": 32},
        ["DeepSpeed config without the section quantize_training", "nothing to quantize", '"quantize_bits"'],
    ),
    (
        "compression_training",
        {"compression_training": {"weight_quantization": {}}},
        ["without the section quantize_training", "compression_training is another method"],
    ),
    ("misspelt block", {"quantize_trainning": BITS}, ["quantize_trainning", "did you mean quantize_training?"]),
    (
        "a key beside the block",
        {"quantize_training": BITS, "quantize_groups": 8},
        ["quantize_groups: belongs in quantize_training"],
    ),
    ("empty block", {"quantize_training": {}}, ["target_bits: 16 would quantize nothing", "it is the default"]),
    # Keys.
    ("misspelt key", with_bits(quantise_groups=8), ["quantise_groups", "did you mean quantize_groups?"]),
    (
        "misspelt key of a section",
        {"quantize_bits": {"start_bit": 12, "target_bits": 8}},
        ["quantize_bits.start_bit: ", "did you mean quantize_bits.start_bits?"],
    ),
    ("key outside of its section", {"target_bits": 8}, ["target_bits: unknown key, did you mean bits?"]),
    (
        "key in another section",
        schedule(rounding="nearest"),
        ["quantize_schedule.rounding", "did you mean quantize_algo.rounding?"],
    ),
    ("section with a longer name", with_bits(quantize_algorithm={}), ["did you mean quantize_algo?"]),
    ("off, with wrong bits", {"enabled": False} | bits(4, 8), ["target_bits 8 is above quantize_bits.start_bits 4"]),
    ("dotted key", {"quantize_bits.target_bits": 8}, ["quantize_bits.target_bits: unknown key"]),
    (
        "a key of the Trainer's",
        with_bits(learning_rate=1e-4),
        ["learning_rate: unknown key; it is an argument of TrainingArguments"],
    ),
    ("unknown key", with_bits(weather=1), ["weather: unknown key; legal here are", "quantize_bits"]),
    ("switch where there is none", schedule(enabled=True), ["quantize_schedule.enabled: unknown key; legal here are"]),
    ("number for a key", {8: 8} | BITS, ["8: keys must be text"]),
    # Keywords in a document.
    (
        "two words for one key",
        {"bits": 4} | BITS,
        ["quantize_bits: a word of DeepSpeed's among keywords; write bits, start_bits"],
    ),
    ("two words for an equal section", {"bits": 4, "blend": {}, "fp16_mixed_quantize": {}}, ["keywords; write blend"]),
    (
        "a second word for the type",
        {"bits": 4, "q_type": "symmetric", "quantize_type": "symmetric"},
        ["write q_type"],
    ),
    ("a keyword among DeepSpeed's words", with_bits(group_size=32), ["words; write quantize_group_size"]),
    ("a section among DeepSpeed's words", with_bits(activations=8), ["words; write activation_quantization"]),
    (
        "a keyword beside the block",
        {"quantize_training": BITS, "bits": 4},
        ["bits: keywords do not go beside quantize_training; write quantize_bits.target_bits in it, or keywords alone"],
    ),
    (
        "a keyword in the block",
        {"quantize_training": {"bits": 4}},
        ["bits: a keyword among DeepSpeed's words; write quantize_bits.target_bits"],
    ),
    ("a wrong keyword", {"bits": 17}, [": bits: 17 is not legal", "from 1 to 16"]),
    ("keywords that conflict", {"bits": 4, "groups": 8, "group_size": 32}, [": groups 8 and group_size 32 exclude"]),
    # Types.
    ("text for bits", bits("12", 8), ['quantize_bits.start_bits: "12" is not legal', "a whole number from 1 to 16"]),
    ("bool for bits", bits(12, True), ["quantize_bits.target_bits: true is not legal", "a whole number"]),
    ("float for bits", bits(12, 8.0), ["quantize_bits.target_bits: 8.0 is not legal", "whole number", "(write 8)"]),
    ("no budget", bits(8, {}), ["quantize_bits.target_bits: mean null and file_mb null: give one of them"]),
    (
        "two budgets",
        bits(8, {"mean": 3, "file_mb": 2.0}),
        ["quantize_bits.target_bits: mean 3.0 and file_mb 2.0: give one of them"],
    ),
    ("no such budget", bits(8, {"means": 3}), ['target_bits: {"means": 3} is not legal', '{"mean": 3.0, "choices"']),
    ("no mean of these", bits(8, {"mean": 8.0}), ["target_bits.mean: 8.0 must be between the choices 2 and 8"]),
    (
        "one choice",
        bits(8, {"mean": 3, "choices": [3]}),
        ["target_bits.choices: [3] must be two numbers of bits or more"],
    ),
    ("choices not in order", bits(8, {"mean": 3, "choices": [4, 2]}), ["target_bits.choices: [4, 2]", "ascending"]),
    (
        "1 bit asymmetric among the choices",
        {**bits(8, {"mean": 3, "choices": [1, 8]}), "quantize_type": "asymmetric"},
        ["quantize_bits.target_bits: 1 bit is symmetric only"],
    ),
    (
        "a measure that nothing asks for",
        bits(8, 4) | {"sensitivity": {"measure": "divergence"}},
        ['sensitivity.measure: nothing asks for "divergence"', "eigenvalue.enabled", "a budget"],
    ),
    *(
        (f"the measure {gone}", bits(8, 4) | {"sensitivity": {"measure": gone}}, ['gone, use "divergence"'])
        for gone in ("trace", "loss")
    ),
    ("bool for a number", eigenvalue(tol=True), ["eigenvalue.tol: true is not legal", "a number above 0"]),
    ("empty path", eigenvalue(layer_name=""), ['eigenvalue.layer_name: ""', "text, or null"]),
    ("object for a value", with_bits(seed={"a": 1}), ['seed: {"a": 1} is not legal', "a whole number from 0"]),
    ("no JSON type", with_bits(seed={1, 2}), ["seed: set is not legal"]),
    # Ranges.
    ("0 bits", bits(12, 0), ["quantize_bits.target_bits: 0 is not legal", "from 1 to 16"]),
    (
        "start below target",
        bits(4, 8),
        ["target_bits 8 is above quantize_bits.start_bits 4", "start_bits must be 8 or more"],
    ),
    ("no target", {"quantize_bits": {"start_bits": 16}}, ["16 would quantize nothing (it is the default)"]),
    ("a list that names nothing", with_bits(modules_to_not_convert=[]), ["[] names nothing", "quantize_heads is true"]),
    (
        "start below the default target",
        {"quantize_bits": {"start_bits": 12}},
        ["target_bits 16 is above quantize_bits.start_bits 12"],
    ),
    ("period 0", schedule(quantize_period=0), ["quantize_schedule.quantize_period: 0", 'from 1, or "auto"']),
    ("negative offset", schedule(schedule_offset=-1), ["quantize_schedule.schedule_offset: -1", "from 0"]),
    (
        "a deadline, its default, that is no later than the offset",
        schedule(schedule_offset=0.25),
        ["deadline: 0.25 of the run is not after quantize_schedule.schedule_offset 0.25, where bits begin to fall"],
    ),
    ("deadline after the end", schedule(deadline=1.5), ["quantize_schedule.deadline: 1.5", "above 0 up to 1, or null"]),
    ("negative stability", eigenvalue(stability=-1e-6), ["eigenvalue.stability: -1e-06", "a number from 0"]),
    (
        "ratio 0",
        with_bits(fp16_mixed_quantize={"quantize_change_ratio": 0}),
        ["fp16_mixed_quantize.quantize_change_ratio: 0", "from 1e-9"],
    ),
    ("seed of 64 bits", with_bits(seed=2**63), ["seed: 9223372036854775808", "a whole number from 0 and below 2**63"]),
    (
        "16-bit embeddings",
        with_bits(quantize_embeddings=16),
        ["quantize_embeddings: 16", 'from 2 to 8, or "auto", or null'],
    ),
    # Words.
    ("misspelt word", with_bits(quantize_type="symetric"), ['"symetric"', 'did you mean "symmetric"?']),
    # Keys that do not go together.
    (
        "two types",
        {"quantize_type": "symmetric", "quantize_algo": {"q_type": "asymmetric"}} | BITS,
        ["quantize_type and quantize_algo.q_type mean the same, give one"],
    ),
    (
        "two spellings",
        {"quantize_algo": {"q_type": "symmetric"}, "quantize-algo": {"rounding": "nearest"}} | BITS,
        ["quantize_algo and quantize-algo", "give one"],
    ),
    (
        "groups and a group size",
        with_bits(quantize_groups=8, quantize_group_size=64),
        ["quantize_groups 8 and quantize_group_size 64 exclude each other"],
    ),
    (
        "stochastic ternary",
        bits(4, 2) | {"quantize_algo": {"rounding": "stochastic", "range": "narrow"}},
        ["quantize_algo.rounding", "symmetric grids of 2 bits", "nearest, or quantize_bits.target_bits to 3 or more"],
    ),
    ("asymmetric binary", bits(4, 1) | {"quantize_type": "asymmetric"}, ["1 bit is symmetric only", "or 2 bits"]),
    (
        "asymmetric full range",
        bits(4, 3) | {"quantize_type": "asymmetric", "quantize_algo": {"range": "full"}},
        ["quantize_algo.range: full is for symmetric grids", "set it to narrow, or quantize_type to symmetric"],
    ),
    # Layers that differ.
    ("no object of globs", with_bits(overrides=[8]), ["overrides: [8] is not legal; it must be an object of globs"]),
    (
        "bits for a glob",
        with_bits(overrides={"*": 8}),
        ["overrides.*: 8 is not an object of bits, start_bits, group_size, activations"],
    ),
    (
        "misspelt key of an override",
        with_bits(overrides={"layer.0": {"bit": 8}}),
        ["overrides.layer.0.bit: unknown key, did you mean overrides.layer.0.bits?"],
    ),
    (
        "a letter too many, and a keyword elsewhere",
        with_bits(distillation={"embeddings": 1.0}),
        ["distillation.embeddings: unknown key, did you mean distillation.embedding?"],
    ),
    (
        "two wrong overrides",
        with_bits(overrides={"a": {"bits": 17}, "b": {"group_size": 0}}),
        ["overrides.a.bits: 17 is not legal; it must be a whole number from 1 to 16", "overrides.b.group_size: 0 is"],
    ),
    ("an override that says nothing", with_bits(overrides={"*": {}}), ["overrides.*: says nothing; give bits, start_"]),
    (
        "an override above its start",
        with_bits(overrides={"layer.0": {"bits": 8, "start_bits": 6}}),
        ["overrides.layer.0: quantize_bits.target_bits 8 is above quantize_bits.start_bits 6"],
    ),
    # More than one thing.
    (
        "many at once",
        {
            "quantize_bits": {"start_bits": 17, "target_bits": 8.0},
            "quantize_schedule": {"quantize_period": 0, "ofset": 3},
            "quantize_algo": {"rounding": "up"},
            "seed": True,
            "colour": "red",
        },
        [
            "7 things are wrong",
            "  - quantize_bits.start_bits: 17",
            "  - quantize_bits.target_bits: 8.0",
            "  - quantize_schedule.quantize_period: 0",
            "  - quantize_schedule.ofset: unknown key",
            '  - quantize_algo.rounding: "up"',
            "  - seed: true",
            "  - colour: unknown key",
        ],
    ),
    (
        "inside and beside the block",
        {"quantize_training": bits(12, 0), "seed": 1, "fp16": {"enabled": True}},
        ["2 things are wrong", "seed: belongs in quantize_training", "quantize_bits.target_bits: 0"],
    ),
    (
        "values wrong alone and together",
        bits(4, 8) | {"quantize_type": "asymetric"},
        ["2 things are wrong", 'did you mean "asymmetric"?', "target_bits 8 is above quantize_bits.start_bits 4"],
    ),
]


def check(error: MoQConfigError, fragments: list[str]) -> None:
    message = str(error)
    assert [fragment for fragment in fragments if fragment not in message] == [], message
    assert isinstance(error, MoQError) and isinstance(error, ValueError)
    first, *others = message.split("\n")
    assert len(others) == (int(first.split(": ")[-1].split()[0]) if "things are wrong" in first else 0), message
    assert all(len(line) < 600 for line in others or [first])


@pytest.mark.parametrize(("document", "fragments"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_one_readable_error(document: Any, fragments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    if isinstance(document, (str, bytes)):
        path.write_bytes(document.encode() if isinstance(document, str) else document)
        with pytest.raises(MoQConfigError) as caught:
            MoQConfig.from_file(path)
        check(caught.value, [*fragments, "bad.json"])
        return
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.from_dict(document)
    check(caught.value, [*fragments, "MoQ config"])
    try:
        text = json.dumps(document)
    except (TypeError, ValueError):
        return
    if json.loads(text) == document:
        path.write_text(text)
        with pytest.raises(MoQConfigError) as caught:
            MoQConfig.from_file(path)
        check(caught.value, [*fragments, "bad.json"])


@pytest.mark.parametrize("place", ["top", "section", "beside", "twice"])
def test_thousands_of_wrong_keys_are_told_briefly_and_at_once(place: str, tmp_path: Path) -> None:
    keys = {f"quantize_bit_{index}": index for index in range(20_000)}
    documents = {
        "top": with_bits(**keys),
        "section": {"quantize_bits": BITS["quantize_bits"] | keys},
        "beside": {"quantize_training": with_bits(sead=1)} | keys,
        "twice": with_bits(**keys),
    }
    text = json.dumps(documents[place])
    if place == "twice":
        text = text[:-1] + ", " + text[1:]
    path = tmp_path / "moq.json"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.from_file(path)
    # It took 4.6 s and 7 MB.
    assert time.process_time() - began < 1.0
    message = str(caught.value)
    assert len(message) < 20_000
    if place in ("top", "section"):
        lines = message.split("\n")
        assert lines[0].endswith("20000 things are wrong") and lines[-1] == "  and 19980 more" and len(lines) == 22
        assert re.search("did you mean|legal here are", lines[1]) and "quantize_bit_19" in lines[20]
    elif place == "twice":
        assert message.endswith("and 19981 more")


def test_huge_keys_and_values_are_cut_short() -> None:
    for document in (
        {"a" * 10**7: 1},
        with_bits(quantize_type="s" * 10**7),
        with_bits(seed=[0] * 10**6),
        with_bits(seed={"a" * 10**6: 1}),
        with_bits(quantize_algo={"b" * 10**7: 1}),
        with_bits(modules_to_not_convert=["x"] * 10**6 + [1]),
        {"quantize_training": "x" * 10**7},
        {"line\nbreak\x1b[2J": 1} | BITS,
    ):
        with pytest.raises(MoQConfigError) as caught:
            MoQConfig.from_dict(document)
        check(caught.value, [])


# A JSON Schema sees neither text, nor the type of 8.0, nor two values together.
ONLY_OURS = {
    *("duplicate key", "duplicate key further in", "float for bits"),
    *("empty block", "off, with wrong bits", "start below target", "start below the default target"),
    *("no target", "two types", "groups and a group size", "keywords that conflict"),
    *("stochastic ternary", "asymmetric binary", "asymmetric full range"),
    *("no mean of these", "choices not in order", "1 bit asymmetric among the choices"),
    *("a measure that nothing asks for", "a list that names nothing", "an override that says nothing"),
    *("an override above its start", "a deadline, its default, that is no later than the offset"),
}


def test_the_schema_refuses_the_same() -> None:
    validator = Draft202012Validator(json_schema())
    accepted = set()
    for name, document, _ in CASES:
        try:
            text = document.decode() if isinstance(document, bytes) else document
            # int: refuses NaN and Infinity.
            document = json.loads(text if isinstance(text, str) else json.dumps(text), parse_constant=int)
        except (TypeError, ValueError, RecursionError):
            # No JSON can hold it.
            continue
        if validator.is_valid(document):
            accepted.add(name)
    assert accepted == ONLY_OURS


@pytest.mark.parametrize(("name", "reason"), [("none.json", "No such file"), (".", "Is a directory"), ("\0", "null")])
def test_what_is_no_file(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.load(tmp_path / name)
    check(caught.value, ["cannot read the MoQ config", reason])


@pytest.mark.parametrize("source", [None, 8, True, ["moq.json"]])
def test_no_source_of_a_config(source: Any) -> None:
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.load(source)
    check(
        caught.value,
        [
            "a preset (w8, w4, ",
            "a path, a mapping or a MoQConfig",
            "nothing" if source is None else type(source).__name__,
        ],
    )


def moq(**arguments: Any) -> Any:
    return lambda: MoQConfig(**({"start_bits": 12, "bits": 8} | arguments))


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (moq(start_bits=4, bits=8), ["MoQConfig: ", "bits 8 is above start_bits 4"]),
        (moq(bits=8.0), ["bits: 8.0 is not legal", "a whole number from 1 to 16", "(write 8)"]),
        (moq(q_type="sym"), ['q_type: "sym" is not legal; it must be "symmetric" or "asymmetric"']),
        (lambda: MoQConfig(quantize_schedule=1), ["quantize_schedule: 1 is not an object of keys"]),  # type: ignore[call-arg]
        (
            lambda: MoQConfig("w4", quantize_training=BITS),  # type: ignore[call-arg]
            ["quantize_training: unknown key; it is a section of a document, which comes first: MoQConfig({"],
        ),
        (moq(eigenvalue={"max_iter": 0}), ["eigenvalue.max_iter: 0 is not legal"]),
        (moq(period=0, offset=-1), ["2 things are wrong", "period: 0 is", "offset: -1 is"]),
        (moq(period="auot"), ['period: "auot" is not legal', 'did you mean "auto"?']),
        (moq(target_bits=4), ["target_bits: unknown key, did you mean bits?"]),
        (moq(weather=1), ["MoQConfig: weather: unknown key; legal here are enabled, "]),
        (lambda: MoQConfig(num_bits=4), ["MoQConfig: num_bits: unknown key, did you mean bits?"]),  # type: ignore[call-arg]
        (lambda: MoQConfig.load("w4", target_bits=3), ["preset w4: target_bits: unknown key, did you mean bits?"]),
        (lambda: MoQConfig.load({"quantize_bits": 4}), ["MoQ config: quantize_bits: 4 is not an object of keys"]),
        (lambda: MoQConfig.load("lm_w4"), ["cannot read the MoQ config lm_w4", "did you mean lm-w4?"]),
        *((lambda name=name: MoQConfig.load(name), ["did you mean w4?"]) for name in ("int4", "4", "w4.json", "4-bit")),
        (lambda: MoQConfig.load("w5"), ["did you mean bits=5?"]),
        (lambda: MoQConfig.load("W8A8"), ["did you mean w8a8?"]),
        (moq(offset="10%"), ['offset: "10%" is not legal', "(write 0.1)"]),
        (moq(bits="int4"), ["(write 4)"]),
        (lambda: MoQConfig.load(3), ["such as MoQConfig(bits=3); got int"]),  # type: ignore[arg-type]
        (lambda: MoQConfig(3), ["such as MoQConfig(bits=3); got int"]),  # type: ignore[call-arg]
        (lambda: MoQConfig("w4", bits=17), ["preset w4: bits: 17 is not legal"]),
        (moq(ignore=["x"]), ["ignore: unknown key, did you mean modules_to_not_convert?"]),
        (moq(sym=True), ['sym: unknown key; write q_type="asymmetric", or "symmetric"']),
        (
            moq(float_first=True),
            [
                "float_first: unknown key; it is an argument of MoQTrainer or MoQMixin: a callback cannot change the "
                "loss"
            ],
        ),
        (moq(bits="4"), ['bits: "4" is not legal', "(write 4)"]),
        (moq(serve="vllm"), ['(write ["vllm"])']),
        (moq(modules_to_not_convert="pooler"), ['modules_to_not_convert: "pooler"', '(write ["pooler"])']),
        (moq(modules_to_not_convert=[]), ["modules_to_not_convert: [] names nothing; ", " unless heads is true"]),
        (moq(quantize_bits={"target_bits": 4}), ["quantize_bits: a word of DeepSpeed's among keywords; write bits, "]),
        (moq(activations=9), ["activations.bits: 9 is not legal", "from 2 to 8"]),
        (
            moq(activations={"scale": "per_token", "symmetric": False, "window": 9}),
            ["activations: window: for static ranges alone, and per_token scales follow each call"],
        ),
        (
            moq(activations={"scale": "per_block", "symmetric": False}),
            ["activations: symmetric: for static ranges alone, and per_block scales follow each call"],
        ),
        (
            lambda: MoQConfig("w8a8", activations={"scale": "per_block"}),
            ["or the preset that has it, or set scale to"],
        ),
        (moq(activations={"percentile": 0}), ["activations.percentile: 0 is not legal", "a number above 0 up to 100"]),
        (moq(activations={"percentile": 100.5}), ["activations.percentile: 100.5 is not legal"]),
        (moq(activations={"window": 0}), ["activations.window: 0 is not legal; it must be a whole number from 1"]),
        (moq(activations={"symmetric": None}), ["activations.symmetric: null is not legal; it must be true or false"]),
        (
            moq(activations={"symmetric": False}, serve=["llama.cpp"]),
            ["activations.symmetric: llama.cpp rounds inputs by itself, around zero", 'leave "llama.cpp" out of serve'],
        ),
        (
            moq(overrides={"*.a": {"activations": {"symmetric": False}}}, serve=["llama.cpp"]),
            ["activations.symmetric: llama.cpp rounds inputs by itself"],
        ),
        (moq(overrides={"*.a": {"activations": 9}}), ["overrides.*.a.activations.bits: 9 is not legal"]),
        (
            moq(overrides={"*.a": {"activations": "8"}}),
            ['overrides.*.a.activations: "8" is not an object of enabled, bits', "a number of bits, true or false"],
        ),
        (
            moq(overrides={"*.a": {"activations": {"bit": 4}}}),
            ["overrides.*.a.activations.bit: unknown key, did you mean overrides.*.a.activations.bits?"],
        ),
        (
            moq(overrides={"*.a": {"activations": {"scale": "per_token", "percentile": 99}}}),
            ["overrides.*.a.activations: percentile: for static ranges alone"],
        ),
        (moq(activations="8"), ['activations: "8" is not an object of keys, a number of bits, true or false']),
        (moq(seed=True, kernel="triton"), ["2 things are wrong", "seed: true", 'kernel: "triton"']),
        (
            moq(blend={"enabled": 1, "quantize_change_ratio": 0.0}),
            ["2 things are wrong", "enabled: 1 is", "quantize_change_ratio: 0.0 is not legal"],
        ),
    ],
)
def test_the_constructors_check_too(make: Any, fragments: list[str]) -> None:
    with pytest.raises(MoQConfigError) as caught:
        make()
    check(caught.value, fragments)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("num_bits nbits w_bit wbits weight_dtype BITS", "did you mean bits?"),
        ("group groupsize q_group_size group-size groupSize", "did you mean group_size?"),
        ("ignore skip_modules llm_int8_skip_modules exclude_modules", "did you mean modules_to_not_convert?"),
        ("sym symmetric zero_point", 'write q_type="asymmetric", or "symmetric"'),
        ("method desc_act damp_percent dataset", "to round by GPTQ write gptq=128"),
        ("load_in_4bit", "write bits=4"),
        ("load_in_8bit", "write bits=8"),
        ("bnb_4bit_compute_dtype torch_dtype dtype", "the model says it: from_pretrained"),
        ("bnb_4bit_quant_type quant_type", "did you mean format?"),
        ("targets modules_to_convert", "every linear layer but the heads is quantized; modules_to_not_"),
        ("kv_cache_scheme kv_cache", "the server decides it"),
        ("lr", "it is learning_rate of TrainingArguments"),
        ("learning_rate max_steps bf16", "it is an argument of TrainingArguments"),
        ("warmup_steps", "the learning rate's warmup is an argument of TrainingArguments, and offset is"),
        ("tokenizer", "it is processing_class of the Trainer"),
        # A wrong hint is worse than none.
        ("bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_threshold load_in_2bit size", "legal here are"),
    ],
)
def test_a_word_of_another_library_leads_to_what_it_means_here(words: str, hint: str) -> None:
    for word in words.split():
        with pytest.raises(MoQConfigError, match=f"MoQConfig: {word}: unknown key[,;] {re.escape(hint)}"):
            moq(**{word: 4})()
