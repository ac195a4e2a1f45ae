"""Wrong configs: each gives one error that says where, what, and what would be right."""

import json
from pathlib import Path
from typing import Any

import pytest

from moq_hf import MoQConfig, MoQConfigError

GOOD: dict[str, Any] = {"quantize_bits": {"start_bits": 12, "target_bits": 8}}


def bits(start: Any, target: Any, **more: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": start, "target_bits": target}, **more}


DOCUMENTS: list[tuple[Any, list[str]]] = [
    # Nothing to do
    ({}, ["quantize_bits.target_bits", "quantize nothing", "8, 4, 3 or 2"]),
    ({"quantize_bits": {"start_bits": 16}}, ["it is the default"]),
    (bits(16, 16), ["16 would quantize nothing"]),
    ({"quantize_training": {}}, ["quantize nothing"]),
    ({"train_batch_size": 32, "fp16": {"enabled": True}}, ["without the section quantize_training"]),
    ({"compression_training": {}}, ["without the section quantize_training", "compression_training is another method"]),
    # Not an object
    ([], ["must be an object", "[]"]),
    (8, ["must be an object", "8"]),
    ("moq", ["must be an object"]),
    (None, ["must be an object", "null"]),
    ({"quantize_training": 8}, ["quantize_training must be an object", "8"]),
    ({"quantize_bits": 8}, ["quantize_bits: 8 is not an object"]),
    ({**GOOD, "eigenvalue": True}, ["eigenvalue: true is not an object"]),
    # Unknown keys
    ({**GOOD, "quantize_group": 8}, ["quantize_group: unknown key", "did you mean quantize_groups?"]),
    ({**GOOD, "quantise_schedule": {}}, ["did you mean quantize_schedule?"]),
    ({"quantize_bits": {"start_bit": 12, "target_bits": 8}}, ["quantize_bits.start_bit:", "quantize_bits.start_bits?"]),
    ({**GOOD, "start_bits": 12}, ["start_bits: unknown key", "did you mean quantize_bits.start_bits?"]),
    ({**GOOD, "quantize_period": 10}, ["did you mean quantize_schedule.quantize_period?"]),
    ({**GOOD, "rounding": "nearest"}, ["did you mean quantize_algo.rounding?"]),
    ({**GOOD, "eigenvalue": {"layer_nme": "x"}}, ["eigenvalue.layer_nme", "eigenvalue.layer_name?"]),
    ({**GOOD, "zzz": 1}, ["zzz: unknown key; legal here are", "quantize_bits"]),
    ({"quantize_training": {**GOOD, "quantize_algorithm": {}}}, ["quantize_algorithm", "quantize_algo"]),
    ({**GOOD, 8: 1}, ["8: keys must be text"]),
    # Types
    (bits(True, 8), ["start_bits: true", "a whole number from 1 to 16"]),
    (bits(12, "8"), ['target_bits: "8"', "a whole number"]),
    (bits(12, 8.0), ["target_bits: 8.0", "write 8"]),
    (bits(12, None), ["target_bits: null"]),
    (bits(12, [8]), ["target_bits: [8]"]),
    ({**GOOD, "enabled": "true"}, ['enabled: "true"', "true or false"]),
    ({**GOOD, "enabled": 1}, ["enabled: 1", "true or false"]),
    ({**GOOD, "quantizer_kernel": "yes"}, ["quantizer_kernel", "true or false, or null"]),
    ({**GOOD, "seed": 1.5}, ["seed: 1.5"]),
    ({**GOOD, "modules_to_not_convert": "classifier"}, ["modules_to_not_convert", "a list of names"]),
    ({**GOOD, "modules_to_not_convert": ["a", ""]}, ["modules_to_not_convert", "a list of names"]),
    # Ranges
    (bits(17, 8), ["start_bits: 17", "1 to 16"]),
    (bits(12, 0), ["target_bits: 0", "1 to 16"]),
    (bits(12, -4), ["target_bits: -4"]),
    (bits(4, 8), ["target_bits 8 is above start_bits 4"]),
    ({**GOOD, "quantize_groups": 0}, ["quantize_groups: 0", "per_channel"]),
    ({**GOOD, "quantize_groups": "per-channel"}, ['"per-channel"', '"per_channel"']),
    ({**GOOD, "quantize_group_size": 0}, ["quantize_group_size: 0"]),
    ({**GOOD, "quantize_schedule": {"quantize_period": 0}}, ["quantize_period: 0", '"auto"']),
    ({**GOOD, "quantize_schedule": {"quantize_period": "automatic"}}, ['"automatic"', '"auto"']),
    ({**GOOD, "quantize_schedule": {"schedule_offset": -1}}, ["schedule_offset: -1", "from 0"]),
    ({**GOOD, "quantize_schedule": {"deadline": 0}}, ["deadline: 0", "above 0 up to 1"]),
    ({**GOOD, "quantize_schedule": {"deadline": 1.5}}, ["deadline: 1.5"]),
    ({**GOOD, "fp16_mixed_quantize": {"quantize_change_ratio": 0}}, ["quantize_change_ratio: 0"]),
    ({**GOOD, "eigenvalue": {"max_iter": 0}}, ["eigenvalue.max_iter: 0"]),
    ({**GOOD, "eigenvalue": {"tol": 0}}, ["eigenvalue.tol: 0"]),
    ({**GOOD, "eigenvalue": {"stability": -1e-6}}, ["eigenvalue.stability"]),
    ({**GOOD, "eigenvalue": {"method": "lancsoz"}}, ['"lancsoz"', 'did you mean "lanczos"?']),
    ({**GOOD, "eigenvalue": {"max_overhead": 2}}, ["eigenvalue.max_overhead: 2"]),
    ({**GOOD, "quantize_embeddings": 1}, ["quantize_embeddings: 1", "2 to 8, or null"]),
    ({**GOOD, "seed": -1}, ["seed: -1"]),
    ({**GOOD, "seed": 2**63}, ["seed"]),
    ({**GOOD, "quantize_algo": {"scale_refresh": 0}}, ["scale_refresh: 0"]),
    # Words
    ({**GOOD, "quantize_type": "symetric"}, ["quantize_type", '"symetric"', 'did you mean "symmetric"?']),
    ({**GOOD, "quantize-algo": {"q_type": "sym"}}, ["quantize_algo.q_type", '"sym"']),
    ({**GOOD, "quantize_algo": {"rounding": "floor"}}, ['"floor"', '"nearest" or "stochastic"']),
    ({**GOOD, "quantize_algo": {"scale": "max"}}, ['"max"', '"absmax"']),
    # Together
    (
        {**GOOD, "quantize_type": "symmetric", "quantize_algo": {"q_type": "asymmetric"}},
        ["quantize_type", "quantize_algo.q_type", "they mean the same"],
    ),
    ({**GOOD, "quantize_algo": {}, "quantize-algo": {}}, ["two spellings of one key"]),
    ({**GOOD, "quantize_groups": 8, "quantize_group_size": 64}, ["quantize_groups 8", "64", "exclude each other"]),
    (bits(4, 1, quantize_type="asymmetric"), ["1 bit is symmetric only"]),
    (bits(4, 2, quantize_algo={"rounding": "stochastic"}), ["stochastic needs equal steps", "2 bits symmetric"]),
    (bits(4, 1, quantize_algo={"rounding": "stochastic"}), ["stochastic needs equal steps", "1 bits"]),
    # Several at once
    (
        {"quantize_bits": {"start_bits": 17, "target_bit": 8}, "quantize_grops": 8, "seed": "x", "quantize_type": "a"},
        ["5 things are wrong", "start_bits: 17", "target_bit:", "quantize_grops", 'seed: "x"', 'quantize_type: "a"'],
    ),
]

TEXTS: list[tuple[bytes, list[str]]] = [
    (b"", ["is no JSON", "line 1, column 1"]),
    (b"{\n 'enabled': true}", ["is no JSON", "line 2, column 2"]),
    (b'{"quantize_bits": {"start_bits": 12,}}', ["is no JSON", "line 1"]),
    (b'{"enabled": true, "enabled": false}', ["key given twice: enabled"]),
    (b'{"seed": NaN}', ["NaN is no number of JSON"]),
    (b'{"eigenvalue": {"tol": -Infinity}}', ["-Infinity is no number"]),
    (b'{"seed": "\xff"}', ["cannot read", "utf-8"]),
    (b"[" * 100_000, ["moq.json"]),
    (b'{"seed": ' + b"9" * 5000 + b"}", ["moq.json"]),
]


@pytest.mark.parametrize("document, fragments", DOCUMENTS)
def test_wrong_documents_are_told(document: Any, fragments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "moq.json"
    sources = [document]
    if not isinstance(document, dict) or all(isinstance(key, str) for key in document):
        path.write_text(json.dumps(document))
        sources.append(path)
    for source in sources:
        with pytest.raises(MoQConfigError) as error:
            MoQConfig.from_file(source) if source is path else MoQConfig.from_dict(source)
        message = str(error.value)
        assert [fragment for fragment in fragments if fragment not in message] == [], message
        assert (str(path) in message) == (source is path)


@pytest.mark.parametrize("text, fragments", TEXTS)
def test_wrong_files_are_told(text: bytes, fragments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "moq.json"
    path.write_bytes(text)
    with pytest.raises(MoQConfigError) as error:
        MoQConfig.from_file(path)
    assert [fragment for fragment in [str(path), *fragments] if fragment not in str(error.value)] == [], error.value


def test_missing_files_folders_and_other_things_are_told(tmp_path: Path) -> None:
    with pytest.raises(MoQConfigError, match=r"cannot read the MoQ config .*none\.json: No such file"):
        MoQConfig.from_file(tmp_path / "none.json")
    with pytest.raises(MoQConfigError, match="Is a directory"):
        MoQConfig.load(tmp_path)
    with pytest.raises(MoQConfigError, match="a MoQConfig, a mapping or a path, got list"):
        MoQConfig.load([])  # type: ignore[arg-type]
    with pytest.raises(MoQConfigError, match="start_bits: 20"):
        MoQConfig(start_bits=20, target_bits=8)


def test_off_still_has_its_keys_and_types_checked() -> None:
    assert not MoQConfig.from_dict({"enabled": False}).enabled
    with pytest.raises(MoQConfigError, match="did you mean quantize_bits"):
        MoQConfig.from_dict({"enabled": False, "quantize_bit": {}})
