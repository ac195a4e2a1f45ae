"""A config on a command line, and in a YAML file of TRL's."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import arguments, new_model, rows
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from moq_hf import MoQArguments, MoQConfig, MoQConfigError, MoQTrainer
from moq_hf.config_reading import key_schemas, places


def parsed(*words: str) -> MoQArguments:
    (found,) = HfArgumentParser(MoQArguments).parse_args_into_dataclasses([*words])  # type: ignore[arg-type]
    assert isinstance(found, MoQArguments)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--bits", "4"], MoQConfig(bits=4)),
        (["--moq_config", "w4", "--start-bits", "8"], MoQConfig("w4", start_bits=8)),
        (["--moq_config", "lm-w4", "--group_size", "64"], MoQConfig("lm-w4", group_size=64)),
        (["--bits", '{"mean": 3.0, "choices": [2, 4]}'], MoQConfig(bits={"mean": 3.0, "choices": [2, 4]})),
        (["--bits", "8", "--activations"], MoQConfig(bits=8, activations=True)),
        (["--bits", "8", "--activations", "7"], MoQConfig(bits=8, activations=7)),
        (["--bits", "8", "--activations", "false"], MoQConfig(bits=8)),
        (["--bits", "4", "--embeddings", "null"], MoQConfig(bits=4, embeddings=None)),
        (["--bits", "4", "--heads", "--prove", "false"], MoQConfig(bits=4, heads=True, prove=False)),
        (["--bits", "4", "--serve", "vllm", "llama.cpp"], MoQConfig(bits=4, serve=["vllm", "llama.cpp"])),
        (["--bits", "4", "--eigenvalue", '{"enabled": true}'], MoQConfig(bits=4, eigenvalue={"enabled": True})),
        (["--bits", "4", "--offset", "0.25", "--groups", "per_channel"], MoQConfig(bits=4, offset=0.25)),
        (["--bits", "4", "--teacher", "a/b"], MoQConfig(bits=4, distillation={"teacher": "a/b"})),
        (["--bits", "4", "--overrides", '{"a": {"bits": 8}}'], MoQConfig(bits=4, overrides={"a": {"bits": 8}})),
    ],
)  # fmt: skip
def test_words_of_a_command_line_are_the_config_s(words: list[str], expected: MoQConfig) -> None:
    assert parsed(*words).config() == expected


def test_arguments_outlive_json() -> None:
    for given in (parsed(), parsed("--moq_config", "lm-w4", "--group_size", "null")):
        assert MoQArguments(**json.loads(json.dumps(dataclasses.asdict(given)))).config() == given.config()


def test_nothing_asked_for_is_no_config(tmp_path: Path) -> None:
    found = parsed()
    assert found.config() is None and found.for_trainer() == {"moq_config": None, "float_first": None}
    trainer = MoQTrainer(new_model(), arguments(tmp_path), train_dataset=rows(), **found.for_trainer())
    assert trainer.moq is None


def test_what_a_trainer_takes(tmp_path: Path) -> None:
    found = parsed("--bits", "2", "--float_first")
    trainer = MoQTrainer(new_model(), arguments(tmp_path), train_dataset=rows(), **found.for_trainer())
    assert trainer.float_phase is not None and trainer.moq is not None and trainer.moq.config.bits == 2
    assert parsed("--bits", "2", "--float_first", "0.25").float_first == 0.25


def test_a_wrong_word_is_the_config_s_error() -> None:
    for words, text in (
        (["--bits", "int4"], r'bits: "int4" is not legal; .* \(write 4\)'),
        (["--moq_config", "w4", "--bits", "17"], "preset w4: bits: 17 is not legal"),
        (["--bits", "4", "--eigenvalue", '{"tolerance": 1}'], "eigenvalue.tolerance: unknown key"),
        (["--bits", "4", "--eigenvalue", "on"], 'eigenvalue: "on" is not an object of keys'),
        (["--teacher", "a/b"], "bits: 16 would quantize nothing"),
    ):
        with pytest.raises(MoQConfigError, match=text):
            parsed(*words).config()


def test_each_keyword_is_there_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {field.name: field for field in dataclasses.fields(MoQArguments)}
    assert places().keys() - fields.keys() == {"enabled", "verbose", "seed"}
    # argparse has it back as it was.
    assert key_schemas()["offset"]["description"] in fields["offset"].metadata["help"].replace("%%", "%")
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "--start_bits" in capsys.readouterr().out


def test_no_name_is_one_of_transformers_arguments() -> None:
    own = {field.name for field in dataclasses.fields(MoQArguments)}
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        assert own.isdisjoint(field.name for field in dataclasses.fields(kind))


def test_a_mapping_is_parsed_too() -> None:
    written: dict[str, Any] = {"bits": {"mean": 3.0}, "serve": ["vllm"], "overrides": {"layer.0": {"bits": 8}}}
    (found,) = HfArgumentParser(MoQArguments).parse_dict(written)  # type: ignore[arg-type]
    assert found.config() == MoQConfig(**written)


@pytest.mark.parametrize("parser", ["transformers", "trl"])
def test_null_in_yaml_is_a_value(parser: str, tmp_path: Path) -> None:
    path = tmp_path / "moq.yaml"
    path.write_text("moq_config: lm-w4\ngroup_size: null\nembeddings: null\nbits: null\n")
    if parser == "trl":
        trl = pytest.importorskip("trl")
        (found,) = trl.TrlParser(MoQArguments).parse_args_and_config(["--config", str(path)])
    else:
        (found,) = HfArgumentParser(MoQArguments).parse_yaml_file(path)  # type: ignore[arg-type]
    expected = MoQConfig("lm-w4", group_size=None, embeddings=None)
    assert found.config() == dataclasses.replace(found, heads=None).config() == expected


# TRL's own default.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
def test_yaml_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    path = tmp_path / "sft.yaml"
    path.write_text(
        "bits: 4\ngroup_size: 32\nserve: [vllm]\nactivations: false\nfloat_first: 0.5\neigenvalue: {enabled: true}\n"
        f"output_dir: {tmp_path}\nuse_cpu: true\nlearning_rate: 0.1\n"
    )
    parser = trl.TrlParser((MoQArguments, trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments))
    words = ["--config", str(path), "--start_bits", "6", "--dataset_name", "none"]
    found, settings, *_ = parser.parse_args_and_config(words)
    expected = MoQConfig(bits=4, start_bits=6, group_size=32, serve=["vllm"], eigenvalue={"enabled": True})
    assert found.config() == expected and found.float_first == 0.5 and settings.learning_rate == 0.1


def test_it_is_imported_without_torch() -> None:
    code = (
        "import json, sys; from moq_hf import MoQArguments; MoQArguments().config(); print(json.dumps([*sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers"}.isdisjoint(json.loads(run.stdout))


def test_what_is_no_section_and_two_teachers_are_told() -> None:
    with pytest.raises(MoQConfigError, match="distillation"):
        MoQArguments(bits="4", teacher="x", distillation="foo").config()
    with pytest.raises(MoQConfigError, match=r"teacher and distillation\.teacher mean the same"):
        MoQArguments(bits="4", teacher="x", distillation='{"teacher": "y"}').config()
    with pytest.raises(MoQConfigError, match="bits"):
        MoQArguments(bits="[" * 2000).config()
