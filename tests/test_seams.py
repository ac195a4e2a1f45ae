"""Each seam still holds: one test per public name of `seams.transformers` and `seams.engines`, called after it."""

import ast
import copy
import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from tqdm.auto import tqdm
from transformers.trainer_jit_checkpoint import CheckpointManager

import moq_hf
from moq_hf import MoQTrainer, QuantLinear, quantize_model, save_quantized
from moq_hf.model.convert import quant_layers
from moq_hf.packed.load_check import quiet
from moq_hf.processes import is_apart, shape_of
from moq_hf.seams import engines
from moq_hf.seams import transformers as seams

PACKAGE = Path(moq_hf.__file__).parent
SEAMS = [Path(seams.__file__), Path(engines.__file__)]
# Private by their names, documented all the same.
DOCUMENTED = {"_asdict", "_fields", "_getframe", "_replace"}

# The versions that every seam was checked with; the lower ends of `setup.cfg` are what the code needs.
CHECKED = {
    "accelerate": "1.15",
    "compressed_tensors": "0.20",
    "huggingface_hub": "2.4",
    "peft": "0.21",
    "torch": "2.13",
    "transformers": "5.23",
}


class Override(NamedTuple):
    """A method that moq_hf overrides: its parameters, which its library passes, and what would break without it."""

    parameters: tuple[str, ...]
    breaks: str


# Methods without a documented contract that are overridden; their library calls them with these parameters.
OVERRIDDEN = {
    "transformers.Trainer._load_callback_state": Override((), "a restored callback would not know its MoQTrainer"),
    "transformers.Trainer._save": Override(("output_dir", "state_dict"), "save_model would deliver float weights"),
    "transformers.Trainer._save_checkpoint": Override(("model", "trial"), "checkpoints would hold packed weights"),
    "transformers.Trainer.save_model": Override(("output_dir", "_internal_call"), "push_to_hub would fail"),
    "torch.nn.Module._apply": Override(("fn", "recurse"), "model.to(device) would leave quantized copies behind"),
    "torch.nn.Module._load_from_state_dict": Override(
        ("state_dict", "prefix", "local_metadata", "strict", "missing_keys", "unexpected_keys", "error_msgs"),
        "load_state_dict would leave the quantized copies of the weights from before",
    ),
}

# What stays where it is used, often in every forward pass, where a function around it would take longer than it does.
IN_PLACE = {
    "torch.Tensor._version": "layer_state: a weight written by hand would not be quantized again",
    "torch.nn.Module._call_impl": "layer_state: the weight that a forward pass reads would be the float one",
    "torch._C._current_graph_task_id": "layer_state: the same, in what checkpointing recomputes",
    "torch._dynamo": "training.measuring: a compiled model would be compiled again for measuring",
    "torch.nn.RNNBase._flat_weights": "training.measuring: an LSTM would be measured with other weights",
    "torch.nn.RNNBase._flat_weights_names": "training.measuring: the same",
    "torch.nn.Module._parameters": "training.measuring: a module's parameters could not be exchanged",
    "torch.nn.Module._buffers": "training.measuring: neither could its buffers",
    "torch.nn.Module._modules": "model.convert: adapters could be merged into quantized layers",
    # `tl.max` is of the interpreter or of the compiler from Triton's import on.
    "triton.language.standard._elementwise_max": "kernels.triton: TRITON_INTERPRET set later would not compute maxima",
}


def texts() -> dict[str, str]:
    """What the module says of each seam: the docstring of a function, the string after a constant."""
    found = {}
    body = [node for path in SEAMS for node in [*ast.parse(path.read_text()).body, ast.Pass()]]
    for node, after in pairwise(body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            text = after.value if isinstance(after, ast.Expr) else None
            found[ast.unparse(target)] = str(text.value) if isinstance(text, ast.Constant) else ""
    return found


TEXTS = texts()


@pytest.fixture(autouse=True)
def what_would_break(request: pytest.FixtureRequest) -> None:
    """What pytest shows beside a failure."""
    tests = {f"test_{name.lower()}": f"{name}: {text}" for name, text in TEXTS.items()}
    print(tests.get(request.node.originalname, ""))


def test_every_seam_is_described_and_tested() -> None:
    for name, text in TEXTS.items():
        assert f"test_{name.lower()}" in globals()
        assert re.search(r"^Relies on: .+^Breaks: .", text, re.MULTILINE | re.DOTALL), name


# The Trainer.


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Counter(hf.TrainerCallback, seams.ExportableState):
    def __init__(self, start: int = 0) -> None:
        self.start, self.count = start, 0

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


def trainer_of(folder: Path, callback: hf.TrainerCallback | None = None, model: Any = None, **more: Any) -> hf.Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "learning_rate": 0.0,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }
    return hf.Trainer(
        Tiny() if model is None else model,
        hf.TrainingArguments(str(folder), **settings),
        train_dataset=[{"x": torch.ones(2)}] * 8,
        callbacks=[] if callback is None else [callback],
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> hf.Trainer:
    """A run of two steps, saved at each and resumed after the first; with a `Counter`, restored from the checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    trainer_of(folder, Counter(5)).train()
    trainer = trainer_of(folder, Counter(9), restore_callback_states_from_checkpoint=True)
    trainer.train(str(folder / "checkpoint-1"))
    return trainer


def the_counter(trainer: hf.Trainer) -> Counter:
    return next(callback for callback in seams.callbacks_of(trainer) if isinstance(callback, Counter))


def test_checked() -> None:
    installed = {name: metadata.version(name).split("+")[0] for name in CHECKED}
    assert {name: ".".join(version.split(".")[:2]) for name, version in installed.items()} == CHECKED


def resolved(path: str) -> Any:
    """What a full name means: an attribute of a module or a class, or of an instance of the class."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for part in parts[1:]:
        if not hasattr(found, part) and found in (nn.Module, nn.RNNBase):
            found = nn.LSTM(1, 1) if found is nn.RNNBase else nn.Module()._replicate_for_data_parallel()
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")
    return found


@pytest.mark.parametrize("path", OVERRIDDEN)
def test_overridden(path: str) -> None:
    parameters, breaks = OVERRIDDEN[path]
    assert tuple(inspect.signature(resolved(path)).parameters)[1:] == parameters, breaks
    ours = MoQTrainer if path.startswith("transformers.") else QuantLinear
    method = getattr(ours, path.rpartition(".")[2])
    assert method is not resolved(path)
    inspect.signature(method).bind(None, *parameters)
    inspect.signature(method).bind(None, **dict.fromkeys(parameters))


def test_in_place() -> None:
    for path, breaks in IN_PLACE.items():
        try:
            resolved(path)
        except (AttributeError, ImportError) as error:
            pytest.fail(f"{path} is gone ({error}); {breaks}")


def test_exportablestate(finished: hf.Trainer) -> None:
    counter = the_counter(finished)
    assert (counter.start, counter.count) == (5, 2)


def test_callbacks_key(finished: hf.Trainer) -> None:
    for step in (1, 2):
        path = Path(finished.args.output_dir, f"checkpoint-{step}", "trainer_state.json")
        saved = json.loads(path.read_text())[seams.CALLBACKS_KEY]["Counter"]
        assert saved == {"args": {"start": 5}, "attributes": {"count": step}}


def test_incomplete(tmp_path: Path) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    trainer: Any = SimpleNamespace(
        state=hf.TrainerState(global_step=3),
        model=None,
        _get_output_dir=lambda trial: str(tmp_path),
        _save_checkpoint=full,
    )
    with pytest.raises(OSError, match="full"):
        CheckpointManager(trainer).execute_jit_checkpoint()
    assert [path.name for path in (tmp_path / "checkpoint-3").iterdir()] == [seams.INCOMPLETE]


def test_callback_states(finished: hf.Trainer) -> None:
    assert seams.callback_states(finished.state)["Counter"]["args"] == {"start": 5}
    assert seams.callback_states(hf.TrainerState()) == {}


class FirstOfAll(hf.TrainerCallback):
    """Calls seams from the events of a Trainer, and keeps what they gave."""

    def __init__(self) -> None:
        self.found: Any = None
        self.logs: list[list[str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = seams.calling_trainer(state)
        with pytest.raises(moq_hf.MoQError, match="none calls it"):
            seams.calling_trainer(hf.TrainerState())
        seams.call_first(self.found, self)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["added"] = 1.0


class Onlooker(hf.TrainerCallback):
    """Keeps the names of the events that it sees, and what is in the logs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("begin")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture
def leading(tmp_path: Path) -> tuple[hf.Trainer, FirstOfAll, list[Onlooker]]:
    """A finished run with a callback that puts itself first, between two that look on."""
    first, others = FirstOfAll(), [Onlooker(), type("Another", (Onlooker,), {})()]
    trainer = trainer_of(tmp_path, save_strategy="no")
    for callback in (others[0], first, others[1]):
        trainer.add_callback(callback)
    trainer.train()
    return trainer, first, others


def test_calling_trainer(leading: Any) -> None:
    trainer, first, _ = leading
    assert first.found is trainer
    with pytest.raises(moq_hf.MoQError, match="none calls it"):
        seams.calling_trainer(trainer.state)


def test_call_first(leading: Any) -> None:
    trainer, first, others = leading
    assert seams.callbacks_of(trainer)[0] is first
    for other in others:
        # Neither called twice nor passed over, though the list changed under the Trainer.
        assert other.events == ["begin"]
        assert [log.get("added") for log in other.logs if "loss" in log] == [1.0, 1.0]


def test_is_reporter() -> None:
    assert seams.is_reporter(object.__new__(hf.integrations.WandbCallback))
    assert not seams.is_reporter(hf.PrinterCallback()) and not seams.is_reporter(hf.ProgressCallback())


def test_add_notebook_column() -> None:
    # As in transformers.utils.notebook, which cannot be imported without IPython; the callback's own table is tested
    # in tests/training/test_plan_in_training.py.
    tracker: Any = type("Tracker", (), {"write_line": lambda self, cells: self.lines.append(cells)})()
    tracker.inner_table, tracker.lines = [["Step", "Training Loss"]], []
    trainer: Any = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[object(), SimpleNamespace(training_tracker=tracker)])
    )
    for _ in range(2):
        seams.add_notebook_column(trainer, "bits", lambda: 4)
    tracker.write_line({"Step": 1, "Training Loss": 0.5})
    assert tracker.inner_table == [["Step", "bits", "Training Loss"]]
    assert tracker.lines == [{"Step": 1, "Training Loss": 0.5, "bits": 4}]
    trainer.callback_handler.callbacks = [SimpleNamespace(training_tracker=None)]
    seams.add_notebook_column(trainer, "bits", lambda: 4)


def test_tell_of_saves(leading: Any, tmp_path: Path) -> None:
    trainer, told = leading[0], []
    for _ in range(2):
        seams.tell_of_saves(trainer, told.append)
    trainer.save_model()
    trainer.save_model(str(tmp_path / "elsewhere"))
    trainer.is_in_train = True
    trainer.save_model(str(tmp_path / "checkpoint"), _internal_call=True)
    assert told == [tmp_path, tmp_path / "elsewhere"]
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_callbacks_of(finished: hf.Trainer) -> None:
    given = Counter()
    assert given in seams.callbacks_of(trainer_of(Path(finished.args.output_dir), given))


def test_prepared_inputs(finished: hf.Trainer) -> None:
    prepared = seams.prepared_inputs(finished, {"x": torch.ones(2), "name": "a"})
    assert prepared["name"] == "a" and prepared["x"].equal(torch.ones(2))


def test_checkpoint_folder(finished: hf.Trainer) -> None:
    assert seams.checkpoint_folder(finished) == Path(finished.args.output_dir, "checkpoint-2")
    assert seams.checkpoint_folder(finished).is_dir()


def test_save_training_args(finished: hf.Trainer, tmp_path: Path) -> None:
    seams.save_training_args(finished.args, tmp_path)
    (path,) = tmp_path.iterdir()
    assert (seams.checkpoint_folder(finished) / path.name).is_file()


def test_training_summary(tiny_bert: hf.BertForSequenceClassification, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model=tiny_bert)
    known = seams.training_summary(trainer, tasks="text-classification", dataset="one", language="en")
    assert (known.tasks, known.dataset, known.language) == ("text-classification", "one", "en")
    assert known.hyperparameters["learning_rate"] == 0.0
    for name in ("dataset_args", "dataset_tags", "license", "model_name", "tags"):
        assert hasattr(known, name), name


def test_average_loss(finished: hf.Trainer, tmp_path: Path) -> None:
    def logged(average: bool) -> float:
        # `num_items_in_batch` counts labels.
        rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
        trainer = trainer_of(tmp_path, model=finished.model, max_steps=1, gradient_accumulation_steps=4)
        trainer.train_dataset, trainer.args.remove_unused_columns = rows, False
        if average:
            seams.average_loss(trainer)
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    assert logged(average=False) == pytest.approx(4 * logged(average=True), rel=1e-3)


def test_loss_scale(tmp_path: Path) -> None:
    accelerator = trainer_of(tmp_path).accelerator
    weight = nn.Parameter(torch.ones(1))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD([weight], lr=1.0))
    assert seams.loss_scale(optimizer) == 8.0
    accelerator.scaler.scale(weight * torch.inf).backward()
    optimizer.step()
    assert optimizer.step_was_skipped and seams.loss_scale(optimizer) == 4.0


def test_undo_mixed_precision(tmp_path: Path) -> None:
    model, x = Tiny(), torch.randn(64, 2)
    exact = float(model(x)["loss"].detach())
    trainer_of(tmp_path, bf16=True).accelerator.prepare_model(model)
    assert float(model(x)["loss"].detach()) != exact
    seams.undo_mixed_precision(model)
    assert float(model(x)["loss"].detach()) == exact


# Models of transformers.


def test_attention_of(tiny_bert: hf.BertForSequenceClassification) -> None:
    assert seams.attention_of(tiny_bert.config) == "sdpa"
    tiny_bert.set_attn_implementation("eager")
    assert seams.attention_of(tiny_bert.config) == "eager"
    assert seams.attention_of(SimpleNamespace()) is None


def test_attention_to_load(tiny_bert: hf.BertForSequenceClassification) -> None:
    assert seams.attention_to_load(tiny_bert.config) == "sdpa"
    assert seams.attention_to_load(SimpleNamespace()) is None
    config = hf.CLIPConfig(attn_implementation="sdpa")
    assert seams.attention_to_load(config) == "sdpa"
    config.vision_config._attn_implementation = "eager"
    mixed = seams.attention_to_load(config)
    assert mixed == {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = hf.CLIPModel._from_config(config, attn_implementation=mixed)
    assert (model.config._attn_implementation, model.config.vision_config._attn_implementation) == ("sdpa", "eager")


def test_set_attention(tiny_bert: hf.BertForSequenceClassification, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(type(tiny_bert).__module__)
    eager, called = module.eager_attention_forward, []
    monkeypatch.setattr(module, "eager_attention_forward", lambda *a, **k: called.append(1) or eager(*a, **k))
    ids = torch.ones(1, 4, dtype=torch.long)
    tiny_bert(ids)
    assert not called
    seams.set_attention(tiny_bert.config, "eager")
    tiny_bert(ids)
    assert called and seams.attention_of(tiny_bert.config) == "eager"
    parts = hf.CLIPConfig(attn_implementation="sdpa")
    seams.set_attention(parts, "eager")
    assert (seams.attention_of(parts), seams.attention_of(parts.text_config)) == ("eager", "sdpa")


def test_initialize_again(tiny_bert: hf.BertForSequenceClassification, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[nn.Module] = []
    monkeypatch.setattr(hf.BertPreTrainedModel, "_init_weights", lambda self, module: begun.append(module))
    seams.initialize_again(tiny_bert)
    assert set(begun) == set(tiny_bert.modules())
    tiny_bert.initialize_weights()
    assert len(begun) == len(list(tiny_bert.modules())), "what is initialized is no longer passed over"


def test_original_format() -> None:
    config = hf.SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1], num_heads=[2])
    swin = hf.SwinForImageClassification(config)
    name = "swin.encoder.layers.0.blocks.0.attention.q_proj"
    tensors = {f"{name}.weight_packed": torch.ones(2, 2), f"{name}.weight_scale": torch.ones(2, 1)}
    there = seams.original_format(swin, tensors)
    assert list(there) == [
        f"{name.replace('q_proj', 'self.query')}.{part}" for part in ("weight_packed", "weight_scale")
    ]
    # The very tensors, by which layers find their names.
    assert {id(tensor) for tensor in there.values()} == {id(tensor) for tensor in tensors.values()}
    mixtral = tiny_mixtral()
    experts = seams.original_format(mixtral, mixtral.state_dict())
    assert experts["model.layers.0.block_sparse_moe.experts.1.w2.weight"].shape == (16, 16)


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=20, num_local_experts=2, num_key_value_heads=2, **SIZES))


def test_checkpoints_as_modules(tmp_path: Path) -> None:
    """In checkpoints alone, also where a run ends by an error."""
    model = tiny_mixtral()
    args = hf.TrainingArguments(str(tmp_path), save_steps=1, max_steps=2, use_cpu=True, report_to=[])
    row = {"input_ids": torch.arange(4), "labels": torch.arange(4)}

    class Fail(hf.TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            raise InterruptedError

    trainer = hf.Trainer(model, args, train_dataset=[row], callbacks=[Fail()])
    seams.checkpoints_as_modules(trainer, model)
    with pytest.raises(InterruptedError):
        trainer.train()
    model.save_pretrained(tmp_path)
    files = [load_file(folder / "model.safetensors") for folder in (tmp_path / "checkpoint-1", tmp_path)]
    assert files[0].keys() == model.state_dict().keys() and "model.layers.0.mlp.experts.down_proj" in files[0]
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in files[1]


def test_experts_transposed() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    gpt_oss = hf.GptOssForCausalLM(hf.GptOssConfig(vocab_size=20, num_local_experts=2, rope_parameters=rope, **SIZES))
    for model, expected in ((tiny_mixtral(), False), (gpt_oss, True)):
        found = {name: seams.experts_transposed(module) for name, module in model.named_modules()}
        assert {name for name, value in found.items() if value is not None} == {"model.layers.0.mlp.experts"}
        assert found["model.layers.0.mlp.experts"] is expected


def test_as_constructed() -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model = tiny_mixtral()
    model._weight_conversions = []
    name = "model.layers.0.mlp.gate.weight"
    assert list(seams.original_format(model, {name: torch.ones(2, 16)})) == [name]
    found = revert_weight_conversion(seams.as_constructed(model), {name: torch.ones(2, 16)})
    assert list(found) == ["model.layers.0.block_sparse_moe.gate.weight"]


def test_matrices_in_files() -> None:
    model = tiny_mixtral()
    found = seams.matrices_in_files(model, "model.layers.0.mlp.experts.gate_up_proj", 2, 32)
    place = "model.layers.0.block_sparse_moe.experts"
    assert {name: numbers.flatten().tolist() for name, numbers in found.items()} == {
        f"{place}.{expert}.{half}.weight": list(range(first, first + 16))
        for expert, half, first in ((0, "w1", 0), (0, "w3", 16), (1, "w1", 32), (1, "w3", 48))
    }
    assert list(seams.matrices_in_files(model, "somewhere.else", 2, 2)) == ["somewhere.else"]


def test_never_saved(tmp_path: Path, tiny_bert: hf.BertForSequenceClassification) -> None:
    name = "bert.pooler.dense.bias"
    tiny_bert._keys_to_ignore_on_save = [name]
    tiny_bert.save_pretrained(tmp_path)
    assert seams.never_saved(tiny_bert) == {name}
    assert tiny_bert.state_dict().keys() - load_file(tmp_path / "model.safetensors").keys() == {name}


def test_has_adapter(tiny_bert: hf.BertForSequenceClassification) -> None:
    from peft import LoraConfig

    assert not seams.has_adapter(tiny_bert)
    tiny_bert.add_adapter(LoraConfig(target_modules=["query"]))
    assert seams.has_adapter(tiny_bert)


def test_is_scaled_table() -> None:
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    assert not seams.is_scaled_table(nn.Linear)
    for cls in (BartScaledWordEmbedding, Gemma3TextScaledWordEmbedding):
        table = cls(4, 2, 0, embed_scale=3.0)
        plain = nn.functional.embedding(torch.arange(4), table.weight)
        assert seams.is_scaled_table(cls) and torch.equal(table(torch.arange(4)), plain * 3.0)


def test_tied_parameters(tiny_bert: hf.BertForSequenceClassification) -> None:

    assert seams.tied_parameters(tiny_bert) == {}
    config = hf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=1)
    assert seams.tied_parameters(hf.GPT2LMHeadModel(config)) == {"lm_head.weight": "transformer.wte.weight"}


def test_stays_float(tiny_bert: hf.BertForSequenceClassification) -> None:
    config = hf.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = hf.T5EncoderModel(config)
    feed = model.encoder.block[0].layer[1].DenseReluDense
    assert seams.stays_float(model, "encoder.block.0.layer.1.DenseReluDense.wo", feed.wo)
    assert not seams.stays_float(model, "encoder.block.0.layer.1.DenseReluDense.wi", feed.wi)
    assert not seams.stays_float(tiny_bert, "classifier", tiny_bert.classifier)
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

    assert seams.stays_float(tiny_bert, "shared", BartScaledWordEmbedding(4, 2, 0))


# Packed models.


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a packed model, and the weights that its layers compute with."""
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=20, num_labels=2, **SIZES))
    quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": "per_channel"})
    folder = save_quantized(model, tmp_path_factory.mktemp("packed") / "model")
    return folder, {name: layer.quantized_weight().detach() for name, layer in quant_layers(model).items()}


@pytest.fixture
def loaded(packed: tuple[Path, Any]) -> hf.BertForSequenceClassification:
    return hf.BertForSequenceClassification.from_pretrained(packed[0])


def test_packed_loader(loaded: hf.BertForSequenceClassification, tiny_bert: hf.BertForSequenceClassification) -> None:
    assert seams.packed_loader(loaded) is not None and seams.packed_loader(tiny_bert) is None


def test_unpack(loaded: hf.BertForSequenceClassification, packed: tuple[Path, dict[str, Tensor]]) -> None:
    plain = hf.BertForSequenceClassification(loaded.config)
    seams.unpack(loaded)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    assert not hasattr(loaded.config, "quantization_config") and seams.packed_loader(loaded) is None
    assert not loaded._forward_pre_hooks and all(p.requires_grad for p in loaded.parameters())
    for name, module in loaded.named_modules():
        left = vars(module).keys() - vars(plain.get_submodule(name)).keys()
        assert not left or not name, left
    for name, weight in packed[1].items():
        assert loaded.get_submodule(name).weight.equal(weight), name


def group_of(bits: int, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "strategy": "channel"}
    return {"weights": weights, "format": "pack-quantized"}


@pytest.mark.parametrize("bits", range(2, 9))
def test_compress(bits: int) -> None:
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, low + 2**bits, (3, 37))
    scale = torch.tensor([[0.3], [-0.7], [1.1]])
    parts = seams.compress({"weight": codes * scale, "weight_scale": scale}, group_of(bits))
    words = -(-37 * bits // 32)
    assert parts["weight_shape"].tolist() == [3, 37] and parts["weight_scale"].equal(scale)
    for row, packed_row in zip(codes, parts["weight_packed"], strict=True):
        number = sum((int(code) - low) << (bits * place) for place, code in enumerate(row))
        made = [(number >> (32 * place)) & 0xFFFFFFFF for place in range(words)]
        assert [int(word) & 0xFFFFFFFF for word in packed_row] == made
    assert seams.decompress(parts, group_of(bits))["weight"].equal(codes * scale)


@pytest.mark.parametrize("bits", range(2, 9))
def test_decompress(bits: int) -> None:
    low = -(2 ** (bits - 1))
    codes, zero = torch.randint(low, low + 2**bits, (37, 5)), torch.randint(low, low + 2**bits, (37, 1))
    scale = torch.rand(37, 1) + 0.1
    weight = (codes - zero) * scale
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    parts = seams.compress(tensors, group_of(bits, False))
    assert parts["weight_zero_point"].dtype == torch.int32
    found = seams.decompress(parts, group_of(bits, False))
    assert found["weight"].equal(weight) and found["weight_zero_point"].equal(zero.to(torch.int8))


def test_what_is_loaded_is_what_decompress_gives(packed: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = packed
    tensors = load_file(folder / "model.safetensors")
    (group,) = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    for name, weight in weights.items():
        prefix = f"{name}.weight_"
        parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(prefix)}
        assert seams.decompress(parts, group)["weight"].equal(weight), name


def test_write_packing_config(packed: tuple[Path, Any], tmp_path: Path) -> None:
    written = json.loads((packed[0] / "config.json").read_text())["quantization_config"]
    keys = ("config_groups", "format", "ignore", "quantization_status")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    seams.write_packing_config(tmp_path, {key: written[key] for key in keys})
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["model_type"] == "bert"
    assert document["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {key: document["quantization_config"][key] for key in keys} == {key: written[key] for key in keys}


def test_refuse_older(packed: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(packed[0], tmp_path / "guarded")
    seams.refuse_older(folder / "config.json", "5.15.0")
    monkeypatch.setattr("transformers.configuration_utils.__version__", "5.15.0")
    names = {name for name, _ in hf.BertForSequenceClassification.from_pretrained(folder).named_buffers()}
    assert names == {name for name, _ in hf.BertForSequenceClassification.from_pretrained(packed[0]).named_buffers()}
    monkeypatch.setattr("transformers.configuration_utils.__version__", "5.14.1")
    with pytest.raises(ValueError, match=r"this model needs transformers >= 5\.15\.0"):
        hf.BertForSequenceClassification.from_pretrained(folder)


def test_no_bars_of_the_libraries(packed: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(), quiet():
        hf.BertForSequenceClassification.from_pretrained(packed[0])(torch.ones(1, 4, dtype=torch.long))
    assert capfd.readouterr().err == ""
    assert list(tqdm(range(2))) == [0, 1]
    assert "2/2" in capfd.readouterr().err


# PyTorch and DeepSpeed.


def test_compiled() -> None:
    layer = nn.Linear(2, 2)
    assert getattr(torch.compile(layer, backend="eager"), seams.COMPILED) is layer


def test_checkpointed() -> None:
    layer = nn.Linear(2, 2)
    assert dict(checkpoint_wrapper(layer).named_modules())[seams.CHECKPOINTED] is layer


def test_fsdp2(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(2, 2)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    assert [cls.__name__ for cls in type(layer).__bases__] == [engines.FSDP2, "Linear"]


def test_is_offloaded() -> None:
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert not any(map(engines.is_offloaded, model.modules()))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert [engines.is_offloaded(module) for module in model] == [True, False]


def test_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert FullyShardedDataParallel.__name__ == engines.FSDP1


def partitioned(values: Tensor) -> Any:
    """A parameter as ZeRO-3 leaves it in a process: DeepSpeed is not installed where this runs."""
    parameter: Any = nn.Parameter(torch.empty(0))
    setattr(parameter, engines.ZERO_3, 0)
    setattr(parameter, engines.ZERO_3_SHAPE, values.shape)
    parameter.ds_numel, parameter.ds_process_group = values.numel(), dist.group.WORLD
    # The last partition is filled up.
    parameter.ds_tensor = torch.cat([values.flatten(), torch.full((2,), torch.nan)])
    return parameter


def test_zero_3() -> None:
    layer = nn.Linear(2, 2)
    assert not is_apart(layer.weight)
    setattr(layer.weight, engines.ZERO_3, 0)
    assert is_apart(layer.weight)


def test_zero_3_shape(alone: None) -> None:
    assert shape_of(partitioned(torch.ones(3, 2))) == (3, 2)


def test_whole_of_partitions(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(6.0).view(3, 2)

    class GatheredParameters:
        def __init__(self, parameters: list[Any]) -> None:
            self.parameters = parameters

        def __enter__(self) -> None:
            for parameter in self.parameters:
                parameter.data = parameter.ds_tensor[: parameter.ds_numel].view(parameter.ds_shape)

        def __exit__(self, *exception: object) -> None:
            for parameter in self.parameters:
                parameter.data = torch.empty(0)

    engine = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=GatheredParameters))
    monkeypatch.setitem(sys.modules, "deepspeed", engine)
    parameter = partitioned(values)
    assert torch.equal(engines.whole_of_partitions(parameter), values) and not parameter.numel()


def test_fsdp_model() -> None:
    from accelerate.utils import constants

    assert constants.FSDP_MODEL_NAME == engines.FSDP_MODEL


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_convolve(mode: str) -> None:
    layers = [(nn.Conv1d(4, 6, 3, 2, 1, groups=2, padding_mode=mode), (2, 4, 9)), (nn.Conv2d(2, 3, 3), (2, 2, 5, 5))]
    for layer, shape in layers:
        inputs = torch.randn(shape)
        other = copy.deepcopy(layer)
        other.weight = nn.Parameter(layer.weight * 2)
        assert torch.equal(seams.convolve(layer, inputs, other.weight), other(inputs))


def test_is_compiled_in_place() -> None:
    layer = nn.Linear(2, 2)
    assert not seams.is_compiled_in_place(layer)
    layer.compile(backend="eager")
    assert seams.is_compiled_in_place(layer)


# PEFT.

# Goes with PEFT's first version that is made for transformers 6.
from_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(model: nn.Module, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["query"], modules_to_save=["classifier"], **more))


@from_peft
def test_adapted(tiny_bert: hf.BertForSequenceClassification) -> None:
    query = tiny_bert.bert.encoder.layer[0].attention.self.query
    adapted(tiny_bert)
    wrapper = tiny_bert.bert.encoder.layer[0].attention.self.query
    assert dict(wrapper.named_children())[seams.ADAPTED] is query


@from_peft
def test_original(tiny_bert: hf.BertForSequenceClassification) -> None:
    classifier = tiny_bert.classifier
    adapted(tiny_bert)
    assert dict(tiny_bert.classifier.named_children())[seams.ORIGINAL] is classifier


@from_peft
def test_trained_copies(tiny_bert: hf.BertForSequenceClassification) -> None:
    adapted(tiny_bert)
    copies = dict(tiny_bert.classifier.named_children())[seams.TRAINED_COPIES]
    assert all(parameter.requires_grad for parameter in copies.parameters())


def test_is_exporting() -> None:
    found: list[bool] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            exporting = seams.is_exporting()
            found.append(exporting)
            return x + int(exporting)

    torch.export.export(Asks(), (torch.ones(1),))
    assert found == [True] and not seams.is_exporting()
    compiled = torch.compile(lambda x: x + int(seams.is_exporting()), backend="eager")
    assert float(compiled(torch.ones(1))) == 1


def test_is_transformed() -> None:
    found = []

    def square(x: torch.Tensor) -> torch.Tensor:
        found.append(seams.is_transformed())
        return x * x

    square(torch.ones(()))
    torch.func.grad(square)(torch.ones(()))
    torch.func.vmap(square)(torch.ones(2))
    assert found == [False, True, True]


@from_peft
def test_is_peft(tiny_bert: hf.BertForSequenceClassification) -> None:
    assert not seams.is_peft(tiny_bert.bert.encoder.layer[0].attention.self.query)
    adapted(tiny_bert)
    assert seams.is_peft(tiny_bert.bert.encoder.layer[0].attention.self.query)
    assert seams.is_peft(tiny_bert.classifier)


@from_peft
@pytest.mark.parametrize("use_dora", [True, False])
def test_has_dora(tiny_bert: hf.BertForSequenceClassification, use_dora: bool) -> None:
    adapted(tiny_bert, use_dora=use_dora)
    assert seams.has_dora(tiny_bert.bert.encoder.layer[0].attention.self.query) == use_dora
    assert not seams.has_dora(tiny_bert.classifier)


@from_peft
@pytest.mark.parametrize("use_dora", [True, False])
def test_active_lora(tiny_bert: hf.BertForSequenceClassification, use_dora: bool) -> None:
    model = adapted(tiny_bert, use_dora=use_dora, r=2, lora_alpha=6)
    wrapper = tiny_bert.bert.encoder.layer[0].attention.self.query
    [found] = seams.active_lora(wrapper)
    assert found.scaling == 3.0 and found.a is wrapper.lora_A["default"].weight
    assert found.b is wrapper.lora_B["default"].weight and (found.magnitude is not None) == use_dora
    with model.disable_adapter():
        assert not seams.active_lora(wrapper)
    model.merge_adapter()
    assert not seams.active_lora(wrapper)


@from_peft
def test_lora_fault(tiny_bert: hf.BertForSequenceClassification) -> None:
    adapted(tiny_bert, lora_dropout=0.25)
    query = tiny_bert.bert.encoder.layer[0].attention.self.query
    assert str(seams.lora_fault(query)).startswith("lora_dropout is 0.25")


@from_peft
def test_called_part(tiny_bert: hf.BertForSequenceClassification) -> None:
    model = adapted(tiny_bert)
    assert seams.called_part(tiny_bert.classifier) == "modules_to_save.default"
    with model.disable_adapter():
        assert seams.called_part(tiny_bert.classifier) == seams.ORIGINAL


# Nothing private is used beside the seams.


def private(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-z]\w*", name) is not None


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """The private names that the package itself defines: functions, classes, variables and attributes of `self`."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a private name is read as an attribute, or written as a string for `getattr` and its like."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if private(name):
            yield node.lineno, name


def test_nothing_private_is_used_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path not in SEAMS}
    in_place = {path.rpartition(".")[2] for path in (*IN_PLACE, *OVERRIDDEN)}
    known = own_names(trees) | in_place | DOCUMENTED
    assert not [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in uses(tree)
        if name not in known
    ]


@pytest.mark.parametrize("cls", [MoQTrainer, moq_hf.MoQCallback, QuantLinear])
def test_nothing_private_is_overridden_unlisted(cls: type) -> None:
    # A library that comes to use a name of ours would call what is no override.
    for ours in (base for base in cls.__mro__ if base.__module__.startswith("moq_hf.")):
        theirs = [base for base in ours.__mro__ if not base.__module__.startswith("moq_hf.")]
        both = {name for name in vars(ours) if private(name) for base in theirs if name in vars(base)}
        assert both <= {path.rpartition(".")[2] for path in OVERRIDDEN}, ours
