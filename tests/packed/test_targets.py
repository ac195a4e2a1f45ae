"""Targets of config groups: they match in the model that was saved, in one with another head, and in servers."""

import re
from typing import Any

import pytest

from moq_hf.packed.encode import Patterns

BERT = [
    f"bert.encoder.layer.{i}.{part}"
    for i in range(12)
    for part in ("attention.self.query", "attention.self.key", "attention.output.dense", "intermediate.dense")
] + [f"bert.encoder.layer.{i}.output.dense" for i in range(12)]
HEADS = ["bert.pooler.dense", "classifier"]
LISTS = {"bert.encoder.layer": 12}


def matching(name: str, patterns: list[str]) -> bool:
    # As compressed-tensors, vLLM and SGLang do.
    return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)


def owner(name: str, targets: dict[str, list[str]], ignore: list[str]) -> str | None:
    if matching(name, ignore):
        return None
    found = [group for group, patterns in targets.items() if matching(name, patterns)]
    assert len(found) <= 1
    return found[0] if found else None


def test_one_group_is_one_pattern_and_its_layers_are_found_under_any_prefix() -> None:
    targets, ignore = Patterns([*BERT, *HEADS], LISTS, "bert").of({"group_0": BERT}, HEADS)
    assert targets == {"group_0": [r"re:(?:.*\.)?layer\.\d+\.(?:.*\.)?(?:query|key|dense)$"]}
    # In the base model, and under what vLLM calls the parts of BERT's attention.
    for name in ("encoder.layer.3.attention.self.query", "model.encoder.layer.11.attention.output.key"):
        assert owner(name, targets, ignore) == "group_0"
    for name in ("bert.pooler.dense", "pooler.dense", "model.classifier", "cls.predictions.decoder"):
        assert owner(name, targets, ignore) is None


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        # SGLang's BERT, vLLM's GPT-J, vLLM's StableLM.
        (("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.qkv_proj"),
        (("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.qkv_proj"),
        (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    ],
)
def test_what_servers_make_one_layer_of_is_found(parts: tuple[str, ...], whole: str) -> None:
    names = [f"bert.encoder.layer.{i}.{part}" for i in range(2) for part in parts]
    patterns = Patterns([*names, *HEADS], {"bert.encoder.layer": 2}, "bert")
    targets, ignore = patterns.of({"group_0": names}, HEADS)
    assert owner(f"model.encoder.layer.1.{whole}", targets, ignore) == "group_0"
    # Left out together, they are ignored together; of different groups they are no one layer.
    _, ignore = patterns.of({}, [*names, *HEADS])
    assert matching(f"model.encoder.layer.1.{whole}", ignore)
    targets, ignore = patterns.of({"group_0": names[:1], "group_1": names[1:]}, HEADS)
    assert owner(f"model.encoder.layer.0.{whole}", targets, ignore) is None


def by_block(name: str) -> str | None:
    block = re.search(r"layer\.(\d+)", name)
    return None if block is None else f"group_{int(block[1]) % 3}"


def by_part(name: str) -> str | None:
    if "attention.output" in name:
        return None
    return None if name in HEADS else "group_1" if name.endswith("output.dense") else "group_0"


def alone(name: str) -> str | None:
    return None if name in ("bert.encoder.layer.1.output.dense", *HEADS) else "group_0"


@pytest.mark.parametrize("rule", [by_block, by_part, alone])
def test_each_layer_has_its_group(rule: Any) -> None:
    names = [*BERT, *HEADS]
    groups: dict[str, list[str]] = {}
    for name in names:
        if rule(name) is not None:
            groups.setdefault(rule(name), []).append(name)
    targets, ignore = Patterns(names, LISTS, "bert").of(groups, [name for name in names if rule(name) is None])
    assert {name: owner(name, targets, ignore) for name in names} == {name: rule(name) for name in names}
    assert all(pattern.startswith("re:") for patterns in (*targets.values(), ignore) for pattern in patterns)


def test_blocks_of_two_stacks_are_told_apart() -> None:
    names = [f"{stack}.block.{i}.layer.0.q" for stack in ("encoder", "decoder") for i in range(2)]
    groups = {"group_0": names[:2], "group_1": names[2:]}
    targets, ignore = Patterns(names, {"encoder.block": 2, "decoder.block": 2}, "transformer").of(groups, [])
    assert ignore == []
    for group, members in groups.items():
        assert {owner(f"model.{name}", targets, ignore) for name in members} == {group}


def test_where_patterns_would_not_do_targets_are_names() -> None:
    # The end of one name is the other.
    names = ["proj", "part.proj"]
    assert Patterns(names, {}, "").of({"group_0": ["proj"], "group_1": ["part.proj"]}, []) == (
        {"group_0": ["proj"], "group_1": ["part.proj"]},
        [],
    )


def test_a_list_of_plain_layers_is_not_one_of_blocks() -> None:
    """Gemma3n has two of them."""
    lists = {"model.altup_projections": 2, "model.layers": 2}
    layers = [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    plain = [f"model.altup_projections.{i}" for i in range(2)]
    names = [*plain, *layers, "lm_head"]
    targets, ignore = Patterns(names, lists, "model").of({"group_0": layers, "group_1": plain}, ["lm_head"])
    assert [owner(name, targets, ignore) for name in names] == ["group_1"] * 2 + ["group_0"] * 2 + [None]
