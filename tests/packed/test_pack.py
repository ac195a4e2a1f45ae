"""`moq-hf pack` of a checkpoint writes what `MoQTrainer.save_model` would have written at its step."""

import contextlib
import gc
import json
import shutil
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_runs
import torch
import transformers as hf
import transformers as t
from checkpoint_formats import FORMATS, take_weights
from experts import mixture
from repo import ROOT
from safetensors.torch import load_file, save_file
from small_files import files_of
from torch import Tensor, nn

from moq_hf import MoQCallback, MoQError, MoQTrainer, cli, quantize_model, save_quantized, verify_quantized
from moq_hf.packed import checkpoint_weights
from moq_hf.packed.checkpoint_weights import distributed_weights, zero_folder, zero_weights
from moq_hf.packed.pack import pack_checkpoint
from moq_hf.report import read_run
from moq_hf.training.checkpoints import checksums, last_checkpoint

AT = 8
CONFIG = {**tiny_runs.CONFIG, "quantize_embeddings": 8}
TIED = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Deliver(hf.TrainerCallback):
    """Saves the packed model in the middle of a run, where a checkpoint was just written."""

    trainer: MoQTrainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AT < state.max_steps:
            self.trainer.save_model(str(Path(args.output_dir) / "delivered"))


def run(folder: Path, config: Any, model: nn.Module | None = None, **more: Any) -> tuple[Path, Path]:
    """A checkpoint of a run, and what the run delivered after that step, which may be its last one."""
    deliver = Deliver()
    rows = tiny_runs.rows()
    if model is not None and not hasattr(model, "classifier"):
        rows = [{"input_ids": row["input_ids"] % 40, "labels": row["input_ids"] % 40} for row in rows]
    args = tiny_runs.arguments(folder, save_strategy="steps", save_steps=AT, **{"max_steps": AT, **more})
    model = tiny_runs.new_model() if model is None else model
    trainer = MoQTrainer(model, args, train_dataset=rows, callbacks=[deliver], moq_config=config)
    deliver.trainer = trainer
    trainer.train()
    if args.max_steps == AT:
        trainer.save_model(str(folder / "delivered"))
    return folder / f"checkpoint-{AT}", folder / "delivered"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with a tokenizer, and what was delivered; not to be changed."""
    checkpoint, delivered = run(tmp_path_factory.mktemp("run"), CONFIG, max_steps=16)
    shutil.copy(checkpoint.parent / "checkpoint-16" / "trainer_state.json", checkpoint / "state_at_16")
    hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model").save_pretrained(checkpoint)
    return checkpoint, delivered


@pytest.fixture
def checkpoint(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made[0], tmp_path / f"checkpoint-{AT}"))


def assert_same(packed: Path, delivered: Path) -> None:
    """All but the proof, for which there was no model."""
    found, expected = (load_file(folder / "model.safetensors") for folder in (packed, delivered))
    tiny_runs.assert_same(found, expected)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: e.dtype for n, e in expected.items()}
    states = [json.loads((folder / "moq_state.json").read_text()) for folder in (packed, delivered)]
    # The tokenizer was put into the checkpoint alone.
    for state in states:
        state["files"] = [name for name in state["files"] if not name.startswith("tokenizer")]
    different = {key: (value, states[1].get(key)) for key, value in states[0].items() if value != states[1].get(key)}
    assert different.keys() <= {"proof", "digest"}, different
    assert states[0].keys() == states[1].keys() and states[0]["history"]
    assert states[0]["proof"] is None
    for name in ("config.json", "generation_config.json"):
        assert [(folder / name).is_file() for folder in (packed, delivered)] in ([True] * 2, [False] * 2)
        if (packed / name).is_file():
            assert (packed / name).read_text() == (delivered / name).read_text()
    assert (packed / "README.md").is_file()
    verify_quantized(packed)


@pytest.mark.parametrize("form", FORMATS)
def test_packs_what_would_have_been_delivered(form: str, checkpoint: Path, made: Any, tmp_path: Path) -> None:
    FORMATS[form](checkpoint, take_weights(checkpoint))
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    assert cli.main(["pack", str(checkpoint), str(tmp_path / "out")]) == 0
    assert_same(tmp_path / "out", made[1])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_packs_the_layout_that_is_asked_for(checkpoint: Path, made: Any, tmp_path: Path) -> None:
    assert cli.main(["pack", str(checkpoint), str(tmp_path / "out"), "--layout", "gemma"]) == 0
    found = verify_quantized(tmp_path / "out")
    assert found.state["layout"] == "gemma" and {layer.stored for layer in found.layers.values()} == {"gemma"}
    kind = type(tiny_runs.new_model())
    ids = torch.arange(8)[None]
    logits = [kind.from_pretrained(folder)(ids).logits for folder in (tmp_path / "out", made[1])]
    assert torch.equal(*logits)


def test_a_tokenizer_that_cannot_be_copied_is_a_warning(
    checkpoint: Path, made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "vocab.txt").symlink_to(tmp_path / "gone")
    assert cli.main(["pack", str(checkpoint), str(tmp_path / "out")]) == 0
    assert "not saved beside the weights: TokenizerFiles (FileNotFoundError" in caplog.text
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert_same(tmp_path / "out", made[1])


def generating(model: Any) -> Any:
    """A model with a way of its own to generate, which its config does not know."""
    model.generation_config.update(do_sample=True, temperature=0.7, max_new_tokens=8)
    return model


OTHERS: dict[str, tuple[Any, Callable[[], Any] | None]] = {
    "blend": (tiny_runs.BLEND, None),
    "activations": ({**CONFIG, "activation_quantization": {"enabled": True, "scale": "static"}}, None),
    "budget": (
        {
            **CONFIG,
            "quantize_bits": {"start_bits": 2, "target_bits": {"mean": 3.5, "choices": [2, 8]}},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 2},
        },
        None,
    ),
    "tied": (CONFIG, lambda: generating(t.LlamaForCausalLM(t.LlamaConfig(**TIED, tie_word_embeddings=True)))),
    "bfloat16": (CONFIG, lambda: tiny_runs.new_model().bfloat16()),
    "tied, in float, asymmetric": (
        {**tiny_runs.CONFIG, "quantize_type": "asymmetric"},
        lambda: t.LlamaForCausalLM(t.LlamaConfig(**TIED, tie_word_embeddings=True)),
    ),
    "experts, stochastic": (tiny_runs.STOCHASTIC, mixture),
    "Conv1D": (
        tiny_runs.CONFIG,
        lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32)),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_of_other_runs_and_models(case: str, tmp_path: Path) -> None:
    config, model = OTHERS[case]
    t.set_seed(1)
    made, delivered = run(tmp_path / "run", config, None if model is None else model())
    pack_checkpoint(made, tmp_path / "out")
    assert_same(tmp_path / "out", delivered)


def test_reads_what_deepspeed_wrote() -> None:
    """Two processes, bfloat16, frozen tables and small flat groups; what it gathered itself lies beside it."""
    golden = ROOT / "tests" / "golden" / "zero_3"
    folder = zero_folder(golden)
    found, expected = dict(zero_weights(folder)), load_file(golden / "expected.safetensors")
    tiny_runs.assert_same(found, expected)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_shards_of_the_result(checkpoint: Path, made: Any, tmp_path: Path) -> None:
    with files_of("4KB"):
        assert cli.main(["pack", str(checkpoint), str(tmp_path / "out")]) == 0
    found = sorted((tmp_path / "out").glob("model-*.safetensors"))
    whole: dict[str, Tensor] = {}
    for path in found:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 4000
        whole |= tensors
    assert len(found) == 2
    tiny_runs.assert_same(whole, load_file(made[1] / "model.safetensors"))
    verify_quantized(tmp_path / "out")


# What is wrong, what is done for it, and what the error says.
def without(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return edit


def in_format(form: str, damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        FORMATS[form](folder, take_weights(folder))
        damage(folder)

    return write


def cut(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def reweighted(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        weights = take_weights(folder)
        change(weights)
        # In files of other names, since the state has a checksum of the one that the run wrote.
        FORMATS["files"](folder, weights)

    return write


def replaced(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"
DCP, ZERO = "pytorch_model_fsdp_0", "global_step8"


def noted(folder: Path) -> None:
    """Give a state the checksums of the files that are there now, as if the run had written them."""
    entry = json.loads((folder / "trainer_state.json").read_text())
    entry["stateful_callbacks"]["MoQCallback"]["attributes"]["weights"] = checksums(folder)
    (folder / "trainer_state.json").write_text(json.dumps(entry))


def swapped_ranks(folder: Path) -> None:
    noted(folder)
    one, other = (folder / ZERO / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2))
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def other_shards(folder: Path) -> None:
    noted(folder)
    weights = {name: tensor + 1 for name, tensor in distributed_weights(folder / DCP).items()}
    shutil.rmtree(folder / DCP)
    FORMATS["FSDP2"](folder, weights)


NOT_THOSE = "is not the file that was saved with its trainer_state.json"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Sentence Transformers": (
        lambda folder: (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}'),
        "it is a checkpoint of Sentence Transformers; resume the run from it",
    ),
    "a delivered model": (replaced("moq_state.json", "{}"), "it is what a run delivered; give a checkpoint"),
    "no folder": (shutil.rmtree, "not a whole checkpoint (there is no such folder)"),
    "no state": (without("trainer_state.json"), "not a whole checkpoint (trainer_state.json is missing)"),
    "cut off": (cut("model.safetensors"), "not a whole checkpoint (model.safetensors is damaged)"),
    "no MoQ": (
        edited("trainer_state.json", lambda state: state["stateful_callbacks"].pop("MoQCallback")),
        "trainer_state.json holds no state of MoQ: it is not the checkpoint of a run with moq_hf",
    ),
    "changed state": (
        edited(
            "trainer_state.json", lambda s: s["stateful_callbacks"]["MoQCallback"]["attributes"]["saved"].pop("config")
        ),
        "stateful_callbacks.MoQCallback.attributes.saved.config",
    ),
    "folder of a run": (
        lambda folder: [(folder / name).unlink() for name in ("config.json", "model.safetensors")],
        "is not a folder checkpoint-N of a run: it holds no weights",
    ),
    "no config": (
        without("config.json"),
        "config.json is missing: copy the model's, and its tokenizer, into the checkpoint",
    ),
    "no class": (edited("config.json", lambda c: c.pop("architectures")), "names no architectures: add the model's"),
    "own class": (edited("config.json", lambda c: c.update(architectures=["Mine"])), "'Mine' is not a class"),
    "broken config": (replaced("config.json", "{"), "the config of"),
    "other sizes": (edited("config.json", lambda c: c.update(hidden_size=32)), "size mismatch for "),
    "more layers": (edited("config.json", lambda c: c.update(num_hidden_layers=3)), "Missing key(s) in state_dict"),
    "no weights": (without("model.safetensors"), "holds no weights"),
    "state of another step": (
        lambda folder: shutil.copy(folder / "state_at_16", folder / "trainer_state.json"),
        f"not a whole checkpoint (model.safetensors {NOT_THOSE})",
    ),
    "shards of another step": (in_format("FSDP2", other_shards), f"{DCP}/__0_0.distcp {NOT_THOSE}"),
    "ZeRO-3 with swapped processes": (
        in_format("ZeRO-3", swapped_ranks),
        f"{ZERO}/zero_pp_rank_1_mp_rank_00_optim_states.pt {NOT_THOSE}",
    ),
    "no numbers": (
        reweighted(lambda w: w.update({QUERY: w[QUERY].long()})),
        "not the weights that config.json describes",
    ),
    "NaN": (reweighted(lambda w: w[QUERY][0].fill_(torch.nan)), f"{QUERY} cannot be quantized"),
    "adapters": (
        lambda folder: (
            without("config.json")(folder),
            (folder / "model.safetensors").rename(folder / "adapter_model.safetensors"),
            (folder / "adapter_config.json").write_text("{}"),
        ),
        "holds only PEFT's adapters",
    ),
    "adapters inside": (
        reweighted(lambda w: w.update({QUERY.replace(".weight", ".base_layer.weight"): w.pop(QUERY)})),
        "holds the weights of a model with PEFT's adapters",
    ),
    "a file missing": (in_format("files", without("model-00002-of-00002.safetensors")), "model-00002-of-00002"),
    "another index": (
        in_format("files", edited("model.safetensors.index.json", lambda i: i["weight_map"].pop(QUERY))),
        "its tensors are not those that model.safetensors.index.json names",
    ),
    "an index that points out": (
        in_format("files", edited("model.safetensors.index.json", lambda i: i["weight_map"].update({QUERY: "../x"}))),
        "should match pattern",
    ),
    "no metadata": (in_format("FSDP2", without(f"{DCP}/.metadata")), ".metadata cannot be read"),
    "a process missing": (in_format("FSDP2", without(f"{DCP}/__0_0.distcp")), "cannot be read"),
    "ZeRO elsewhere": (in_format("ZeRO-1", replaced("latest", "../x")), "names '../x'"),
    "ZeRO cut off": (in_format("ZeRO-1", cut(f"{ZERO}/mp_rank_00_model_states.pt")), "model_states.pt is damaged"),
    "ZeRO-3 without its first": (
        in_format("ZeRO-3", without(f"{ZERO}/zero_pp_rank_0_mp_rank_00_model_states.pt")),
        "zero_pp_rank_0_mp_rank_00_model_states.pt is missing",
    ),
    "ZeRO-3 without a process": (
        in_format("ZeRO-3", without(f"{ZERO}/zero_pp_rank_2_mp_rank_00_optim_states.pt")),
        "zero_pp_rank_2_mp_rank_00_optim_states.pt is missing: the run had 3 processes",
    ),
    "ZeRO-3 with too little": (
        in_format(
            "ZeRO-3",
            lambda f: torch.save(
                {"optimizer_state_dict": {"fp32_flat_groups": [torch.ones(3)]}},
                f / ZERO / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            ),
        ),
        "cannot be read: RuntimeError",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, text = FAULTS[fault]
    damage(checkpoint)
    assert cli.main(["pack", str(checkpoint), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_go_on_with_the_weights_of_another_step(checkpoint: Path, tmp_path: Path) -> None:
    save_file({name: 2 * tensor for name, tensor in take_weights(checkpoint).items()}, checkpoint / "model.safetensors")
    assert last_checkpoint(tmp_path) is None
    trainer = tiny_runs.moq(tmp_path, CONFIG, max_steps=16)
    with pytest.raises(MoQError, match=f"cannot resume from .* {NOT_THOSE}"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_what_it_cannot_write_to(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    for out, text in (
        (checkpoint, "is not empty: give a new folder"),
        (tmp_path / "file", "exists already"),
        (tmp_path / "model", "is not empty: give a new folder"),
    ):
        assert cli.main(["pack", str(checkpoint), str(out)]) == 2
        assert text in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before


def test_before_the_offset(tmp_path: Path) -> None:
    schedule = {"quantize_period": 2, "schedule_offset": 10, "allow_unreached": True}
    late = {**CONFIG, "quantize_schedule": schedule}
    trainer = tiny_runs.moq(tmp_path / "run", late, save_strategy="steps", save_steps=AT, max_steps=12)
    trainer.train()
    assert cli.main(["pack", str(tmp_path / "run" / f"checkpoint-{AT}"), str(tmp_path / "out")]) == 2
    assert cli.main(["pack", str(tmp_path / "run" / "checkpoint-12"), str(tmp_path / "out")]) == 0


def test_the_metrics_are_those_of_its_own_step(tmp_path: Path) -> None:
    scores = iter((0.9, 0.3, 0.9, 0.3))
    at_once = {"quantize_bits": {"target_bits": 4}}
    for load, best in ((False, 4), (True, 2)):
        folder = tmp_path / str(load)
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        chosen = {"metric_for_best_model": "score", "load_best_model_at_end": load}
        trainer = tiny_runs.stock(folder, at_once, max_steps=4, **settings, **chosen)
        trainer.compute_metrics = lambda prediction: {"score": next(scores)}
        trainer.train()
        trainer.save_state()
        assert trainer.state.best_global_step == 2
        pack_checkpoint(folder / "checkpoint-4", folder / "out")
        for made, step in ((folder / "quantized", best), (folder / "out", 4)):
            assert verify_quantized(made).state["metrics"]["step"] == step
        assert read_run(folder).quantized["score"] == {2: 0.9, 4: 0.3}[best]


def test_the_float_metrics_of_a_run_that_was_float_first(tmp_path: Path) -> None:
    trainer = MoQTrainer(
        tiny_runs.new_model(),
        tiny_runs.arguments(tmp_path, save_strategy="steps", save_steps=AT, max_steps=AT),
        train_dataset=tiny_runs.rows(),
        eval_dataset=tiny_runs.rows(8),
        moq_config={**CONFIG, "quantize_schedule": {"quantize_period": 1}},
        float_first=0.5,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "delivered"))
    pack_checkpoint(tmp_path / f"checkpoint-{AT}", tmp_path / "out")
    assert_same(tmp_path / "out", tmp_path / "delivered")
    assert json.loads((tmp_path / "out" / "moq_state.json").read_text())["float_metrics"]


class Lazy(UserDict[str, Tensor]):
    """Tensors that are made when they are asked for."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).clone()


@pytest.fixture
def count() -> Callable[[], int]:
    """Bytes of the tensors that are alive, but for those that were there before."""

    def storages() -> dict[int, int]:
        gc.collect()
        found = {}
        for one in gc.get_objects():
            if isinstance(one, Tensor) and one.device.type == "cpu":
                # What torch.compile keeps of other tests has no memory.
                with contextlib.suppress(RuntimeError):
                    found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return found

    gc.collect()
    # What is frozen is not listed.
    gc.freeze()
    return lambda: sum(storages().values())


def wide() -> t.BertForSequenceClassification:
    return t.BertForSequenceClassification(
        t.BertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            max_position_embeddings=32,
        )
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_saved_from_tensors_that_are_made_when_asked_for(tmp_path: Path) -> None:
    model = peft.get_peft_model(wide(), peft.LoraConfig(target_modules=["query"], modules_to_save=["classifier"]))
    quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_quantized(model, tmp_path / "whole")
    save_quantized(model, tmp_path / "lazy", state_dict=Lazy(weights))
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "lazy" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return run(tmp_path_factory.mktemp("wide"), CONFIG, wide())[0]


@pytest.mark.parametrize(("form", "layout"), [("one file", "packed"), ("FSDP2", "packed"), ("ZeRO-3", "unpacked")])
def test_packing_holds_one_float_weight_beside_what_it_writes(
    form: str,
    layout: Any,
    wide_checkpoint: Path,
    count: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Path(shutil.copytree(wide_checkpoint, tmp_path / wide_checkpoint.name))
    weights = take_weights(checkpoint)
    sizes = [tensor.nbytes for tensor in weights.values()]
    FORMATS[form](checkpoint, weights)
    del weights
    base, held = count(), list[int]()
    read = checkpoint_weights.Weights.__getitem__

    def noted(self: checkpoint_weights.Weights, name: str) -> Tensor:
        held.append(count() - base)
        return read(self, name)

    monkeypatch.setattr(checkpoint_weights.Weights, "__getitem__", noted)
    pack_checkpoint(checkpoint, tmp_path / "out", layout=layout)
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert len(held) == len(sizes) and max(held) <= max(sizes) + written < sum(sizes) / 2


def test_a_stock_trainer_describes_what_fsdp_saved_in_shards(tmp_path: Path) -> None:
    """Accelerate writes no config beside its shards; the run that does so is in test_processes.py."""

    class Sharded(hf.Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)

    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    args = tiny_runs.arguments(tmp_path, max_steps=4, save_steps=4, save_strategy="steps")
    config = {**CONFIG, "prove": False}
    trainer = Sharded(
        tiny_runs.new_model(),
        args,
        train_dataset=tiny_runs.rows(),
        callbacks=[MoQCallback(config)],
        processing_class=tokenizer,
    )
    with files_of("4KB"):
        trainer.train()
    folder = tmp_path / "checkpoint-4"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    assert (folder / "tokenizer.json").is_file()
    assert len(list((tmp_path / "quantized").glob("model-*.safetensors"))) == 2
