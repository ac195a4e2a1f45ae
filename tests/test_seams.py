"""Each seam still holds: a test per public name of `seams.transformers` and `seams.engines`, called after it.

Those without which other tests of the package fail at once are in `ELSEWHERE`.
"""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from repo import ROOT
from safetensors.torch import load_file
from tiny_runs import stock, trained
from torch import Tensor, nn
from transformers.trainer_jit_checkpoint import CheckpointManager

import moq_hf
from moq_hf import MoQTrainer, QuantLinear
from moq_hf.processes import is_gathered_per_pass, shape_of
from moq_hf.seams import engines
from moq_hf.seams import transformers as seams

PACKAGE = Path(moq_hf.__file__).parent
SEAMS = [Path(seams.__file__), Path(engines.__file__)]
# Private by their names, documented all the same.
DOCUMENTED = {"_asdict", "_fields", "_getframe", "_replace"}

# The versions that every seam was checked with, which are those of constraints.txt; the lower ends of `setup.cfg` are
# what the code needs, and other versions in between may be installed.
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
    "torch._foreach_copy_": "straight_through: a cast for each gradient of a block, in place of one for all",
    "torch._C._current_graph_task_id": "layer_state: the same, in what checkpointing recomputes",
    "torch._dynamo": "training.measuring: a compiled model would be compiled again for measuring",
    "torch.nn.RNNBase._flat_weights": "training.measuring: an LSTM would be measured with other weights",
    "torch.nn.RNNBase._flat_weights_names": "training.measuring: the same",
    "torch.nn.Module._parameters": "training.measuring: a module's parameters could not be exchanged",
    "torch.nn.Module._buffers": "training.measuring: neither could its buffers",
    "torch.nn.Module._modules": "model.convert: adapters could be merged into quantized layers",
    # `tl.max` and `tl.sum` are of the interpreter or of the compiler from Triton's import on.
    "triton.language.standard._elementwise_max": "kernels.arithmetic: maxima would not follow TRITON_INTERPRET",
    "triton.language.standard._sum_combine": "kernels.arithmetic: the same, of sums",
}

# Files whose tests fail where these seams do not hold any more: run them too for a new version of a library.
ELSEWHERE = {
    "model/test_float_saves.py": ["at_state_dict", "callers", "saves_checkpoint"],
    "packed/test_delivery.py": ["attention_to_load", "COMPILED", "without_generation_config"],
    "packed/test_loading.py": ["has_loss_of_its_own"],
    "packed/test_gemma.py": ["stays_float"],
    "packed/test_matrices.py": ["as_constructed", "experts_transposed", "matrices_in_files"],
    "packed/test_packed_training.py": ["callbacks_of", "save_training_args", "training_summary"],
    "packed/test_save.py": ["decompress", "original_format", "takes_apart", "write_packing_config"],
    "packed/test_tied.py": ["tied_parameters", "ties_in_files", "untie"],
    "packed/test_train_on.py": ["packed_loader", "unpack"],
    "packed/test_versions.py": ["refuse_older"],
    "test_callback.py": ["CALLBACKS_KEY", "ExportableState", "average_loss"],
    "test_eigen.py": ["attention_of", "undo_mixed_precision"],
    "test_forward_pass.py": ["frames", "has_hooks", "in_evaluation_loop", "pre_hooks", "remove_forward_hooks"],
    "test_inputs.py": ["with_gradient_of"],
    "test_loaded.py": ["give_to_each_trainer"],
    "test_processes.py": ["CHECKPOINTED"],
    "test_quant_conv.py": ["convolve"],
    "test_quant_linear.py": ["is_transformed"],
    "test_trainer.py": ["FUSED_HEAD", "KNOWS_SCALE", "is_trl", "metrics_apart"],
    "test_shards.py": ["FSDP2", "is_offloaded"],
    "test_trained_scales.py": ["loads_checkpoint"],
    "training/test_gptq.py": ["prepared_inputs"],
    "training/test_lora.py": ["ADAPTED", "ORIGINAL", "TRAINED_COPIES", "active_lora", "has_adapter", "lora_fault"],
    "training/test_plan_in_training.py": ["add_notebook_column", "call_first", "is_reporter", "tell_of_saves"],
    "training/test_precision.py": ["loss_scale"],
    "training/test_resume.py": ["callback_states", "checkpoint_folder", "train_no_more_than_asked"],
    "training/test_tasks.py": [
        "PROMPTS",
        "factors_base",
        "has_dora",
        "is_its_own_reference",
        "is_peft",
        "start_in_base",
        "trains_tokens",
        "without_start",
    ],
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
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE)
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    assert elsewhere <= TEXTS.keys()
    for name, text in TEXTS.items():
        assert (f"test_{name.lower()}" in globals()) != (name in elsewhere), name
        assert re.search(r"^Relies on: .+^Breaks: .", text, re.MULTILINE | re.DOTALL), name


# The Trainer.


def test_checked() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.replace("-", "_").split("==") for line in lines if "==" in line)
    assert {name: ".".join(pinned[name].split(".")[:2]) for name in CHECKED} == CHECKED


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
        # Where Triton has no wheels, nothing needs its names.
        if path.startswith("triton.") and importlib.util.find_spec("triton") is None:
            continue
        try:
            resolved(path)
        except (AttributeError, ImportError) as error:
            pytest.fail(f"{path} is gone ({error}); {breaks}")


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """As before an `Accelerator` was made, and afterwards too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("name", "dtype"), [("no", None), ("bf16", torch.bfloat16)])
def test_mixed_precision(name: str, dtype: torch.dtype | None, no_accelerator: None) -> None:
    assert seams.mixed_precision() is None
    Accelerator(mixed_precision=name, cpu=True)
    assert seams.mixed_precision() == dtype


def test_uses_deepspeed(no_accelerator: None) -> None:
    assert not seams.uses_deepspeed()
    Accelerator(cpu=True)
    assert not seams.uses_deepspeed()
    # DeepSpeed itself need not be there.
    PartialState().distributed_type = DistributedType.DEEPSPEED
    assert seams.uses_deepspeed()


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


def test_calling_trainer(tmp_path: Path) -> None:
    found = []

    class Asks(hf.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append(seams.calling_trainer(state))
            with pytest.raises(moq_hf.MoQError, match="none calls it"):
                seams.calling_trainer(hf.TrainerState())

    trainer = trained(stock(tmp_path, callbacks=[Asks()]))
    assert found == [trainer]
    with pytest.raises(moq_hf.MoQError, match="none calls it"):
        seams.calling_trainer(trainer.state)


# Models of transformers.


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


def test_never_saved(tmp_path: Path, tiny_bert: hf.BertForSequenceClassification) -> None:
    name = "bert.pooler.dense.bias"
    tiny_bert._keys_to_ignore_on_save = [name]
    tiny_bert.save_pretrained(tmp_path)
    assert seams.never_saved(tiny_bert) == {name}
    assert tiny_bert.state_dict().keys() - load_file(tmp_path / "model.safetensors").keys() == {name}


def scaled_tables() -> list[nn.Embedding]:
    """Of a constant that is a number, and of one that is a buffer."""
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    return [cls(4, 2, 0, embed_scale=3.3) for cls in (BartScaledWordEmbedding, Gemma3TextScaledWordEmbedding)]


def test_is_scaled_table() -> None:
    assert not seams.is_scaled_table(nn.Linear)
    for table in scaled_tables():
        plain = nn.functional.embedding(torch.arange(4), table.weight)
        assert seams.is_scaled_table(type(table)) and torch.equal(table(torch.arange(4)), plain * 3.3)


def test_only_scales() -> None:
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

    assert all(seams.only_scales(type(table)) for table in scaled_tables())
    assert not seams.only_scales(T5Gemma2TextScaledWordEmbedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_rows(dtype: torch.dtype) -> None:
    for table in scaled_tables():
        table.weight.data = table.weight.data.to(dtype)
        assert torch.equal(seams.scaled_rows(table, table.weight), table(torch.arange(4)))


# Packed models.


@pytest.mark.parametrize("bits", range(2, 9))
def test_compress(bits: int) -> None:
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, low + 2**bits, (3, 37))
    scale = torch.tensor([[0.3], [-0.7], [1.1]])
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    group = {"weights": weights, "format": "pack-quantized"}
    parts = seams.compress({"weight": codes * scale, "weight_scale": scale}, group)
    words = -(-37 * bits // 32)
    assert parts["weight_shape"].tolist() == [3, 37] and parts["weight_scale"].equal(scale)
    for row, packed_row in zip(codes, parts["weight_packed"], strict=True):
        number = sum((int(code) - low) << (bits * place) for place, code in enumerate(row))
        made = [(number >> (32 * place)) & 0xFFFFFFFF for place in range(words)]
        assert [int(word) & 0xFFFFFFFF for word in packed_row] == made
    assert seams.decompress(parts, group)["weight"].equal(codes * scale)


# PyTorch and DeepSpeed.


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
    assert not is_gathered_per_pass(layer.weight)
    setattr(layer.weight, engines.ZERO_3, 0)
    assert is_gathered_per_pass(layer.weight)


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


def test_is_compiled_in_place() -> None:
    layer = nn.Linear(2, 2)
    assert not seams.is_compiled_in_place(layer)
    layer.compile(backend="eager")
    assert seams.is_compiled_in_place(layer)


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


# PEFT.


# Goes with PEFT's first version that is made for transformers 6.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_called_part(tiny_bert: hf.BertForSequenceClassification) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_bert, LoraConfig(target_modules=["query"], modules_to_save=["classifier"]))
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
