"""Packed checkpoints: what loads is what was saved, bit for bit; damage is noticed; a killed save leaves no half."""

import json
import logging
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version as read_version
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import transformers as hf
from by_hand import WRONG, places
from long_tests import LONG
from model_zoo import Stranger
from safetensors.torch import load_file, save_file
from small_files import files_of
from tables import quant_embeddings

from moq_hf import (
    MoQConfig,
    MoQError,
    quantize_model,
    quantizer,
    save_quantized,
    serving,
    verify_quantized,
)
from moq_hf.cli import main
from moq_hf.grid import Grid, PerGroup
from moq_hf.model.convert import quant_layers
from moq_hf.packed.files import digest_of, digest_of_configs
from moq_hf.packed.reading import stored_weights
from moq_hf.packed.state import STATE_NAME, write_state
from moq_hf.packed.verify import recorded
from moq_hf.training.controller import MoQController

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IDS = {"input_ids": torch.arange(5, 32).view(3, 9)}


def config_of(bits: int, **more: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_groups": 4, **more}


def bert(blocks: int = 2) -> hf.BertForSequenceClassification:
    return hf.BertForSequenceClassification(hf.BertConfig(**{**SMALL, "num_hidden_layers": blocks})).eval()


def mixed(model: Any, bits: list[int], config: dict[str, Any]) -> Any:
    """The model with the bits in turn on its layers, and a stochastic rounding step that is not the first."""
    quantize_model(model, config)
    for index, layer in enumerate(quant_layers(model).values()):
        layer.set_bits(bits[index % len(bits)])
        layer.moq.seed = layer.moq.seed._replace(step=7)
    return model


def first(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**inputs)[0]
    return result


def assert_loads(folder: Path, model: Any, inputs: Any = IDS) -> None:
    """Plain `from_pretrained` makes a model that gives the same outputs, bit for bit."""
    loaded = type(model).from_pretrained(folder).eval()
    assert torch.equal(first(loaded, inputs), first(model, inputs))


GROUPED = {"quantize_groups": "per_channel", "quantize_group_size": 16}
# Each with the bits below 3 that it has.
ALGOS: dict[str, tuple[dict[str, str], list[int]]] = {
    "symmetric": ({"range": "narrow"}, [2, 1]),
    "asymmetric": ({"q_type": "asymmetric"}, [2]),
    "stochastic": ({"range": "narrow", "rounding": "stochastic"}, []),
    "full": ({"range": "full"}, [2, 1]),
    "full, stochastic": ({"range": "full", "rounding": "stochastic"}, [2]),
    "half-precision scales": ({"scale_dtype": "float16"}, [2, 1]),
}


GRIDS: list[tuple[str, dict[str, Any]]] = [
    ("symmetric", {"quantize_groups": 1}),
    ("symmetric", {"quantize_groups": 4}),
    ("symmetric", {"quantize_groups": "per_channel"}),
    ("asymmetric", {"quantize_groups": 4}),
    *((algo, GROUPED) for algo in ALGOS),
]


@pytest.mark.parametrize(("algo", "grouping"), GRIDS, ids=str)
def test_any_grid_loads_with_the_same_logits(
    algo: str, grouping: dict[str, Any], tmp_path: Path, stranger: Stranger
) -> None:
    """In a process without moq_hf."""
    settings, few = ALGOS[algo]
    config = config_of(8, quantize_algo=settings) | grouping
    model = mixed(bert(), [8, 7, 6, 5, 4, 3, 11, *few], config)
    assert save_quantized(model, tmp_path / "packed") == tmp_path / "packed"
    assert stranger.load(tmp_path / "packed", model, IDS) == {"equal": True, "tied": []}
    found = verify_quantized(tmp_path / "packed", model)
    assert {name: layer.bits for name, layer in found.layers.items()} == {
        name: layer.moq.bits for name, layer in quant_layers(model).items()
    }


def text_t5(cls: Any, **more: Any) -> Any:
    config = {"vocab_size": 60, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8}
    return cls(hf.T5Config(**config, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0, **more))


ENDED = {"input_ids": torch.tensor([[5, 6, 7, 1], [9, 9, 4, 1]])}


def test_the_base_model_and_another_head_load_the_same_layers(tmp_path: Path) -> None:
    model = mixed(bert(), [8, 4, 3], config_of(8))
    save_quantized(model, tmp_path)
    assert torch.equal(first(hf.AutoModel.from_pretrained(tmp_path).eval(), IDS), first(model.bert, IDS))
    base = hf.AutoModel.from_config(model.config).eval()
    mixed(base, [5, 2], config_of(8))
    save_quantized(base, tmp_path / "base")
    headed = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    # The whole model's first forward pass unpacks its layers.
    first(headed, IDS)
    assert torch.equal(first(headed.bert, IDS), first(base, IDS))


class TwoPoolers(hf.BertForSequenceClassification):
    """A layer outside of the base model that is called as one inside."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.pooler = torch.nn.Module()
        self.pooler.dense = torch.nn.Linear(32, 32)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return (self.classifier(self.pooler.dense(self.bert(input_ids)[1])),)


def test_layers_of_one_name_inside_and_outside_of_the_base_model(tmp_path: Path) -> None:
    model = quantize_model(TwoPoolers(hf.BertConfig(**SMALL)).eval(), config_of(4))
    save_quantized(model, tmp_path)
    assert_loads(tmp_path, model)


def test_sizes(tmp_path: Path) -> None:
    config = hf.BertConfig(**{**SMALL, "hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 512})
    for bits in (8, 4, 3, 2):
        model = quantize_model(hf.BertForSequenceClassification(config), config_of(bits))
        save_quantized(model, tmp_path / str(bits))
        found = verify_quantized(tmp_path / str(bits))
        after, _ = found.quantized_bytes
        weights = sum(layer.shape[0] * layer.shape[1] for layer in found.layers.values())
        # A float32 scale for each row of 128 columns or more.
        assert bits <= 8 * after / weights <= 1.03 * bits + 32 / 128
        # What the table says is what lies there.
        tensors = load_file(tmp_path / str(bits) / "model.safetensors")
        packed = [tensor for name, tensor in tensors.items() if ".weight_" in name]
        assert after == sum(tensor.nbytes for tensor in packed)
        assert found.file_bytes == (tmp_path / str(bits) / "model.safetensors").stat().st_size


def test_layers_above_8_bits_are_dense_on_their_grid_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mixed(bert(), [12, 4], config_of(12, quantize_algo={"q_type": "asymmetric"}))
    caplog.clear()
    save_quantized(model, tmp_path)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "packed (bert.encoder.layer.*.attention.self.query (2)" in warning and "self.key" not in warning
    name = "bert.encoder.layer.0.attention.self.query.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors[name], model.get_submodule(name[:-7]).quantized_weight())
    # Off the grid by one float32, with a digest that was forged to fit.
    tensors[name][3, 4] = torch.nextafter(tensors[name][3, 4], torch.tensor(1.0))
    forge(tmp_path, tensors)
    with pytest.raises(MoQError, match=r"self\.query: a weight is not on the grid of 12 bits"):
        verify_quantized(tmp_path)


def forge(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the tensors with digests that fit, so that only the check of the grid is left."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    state = json.loads((folder / STATE_NAME).read_text())
    state["tensors"] = {name: digest_of(tensor) for name, tensor in tensors.items()}
    write_state(folder, state)


@pytest.mark.parametrize(
    ("bits", "algo", "part", "change", "text"),
    [
        (8, "symmetric", "weight_packed", lambda t: t.fill_(0), "codes beyond 127 at 8 bits"),
        (2, "symmetric", "weight_packed", lambda t: t.fill_(0), "codes beyond 1 at 2 bits"),
        (3, "symmetric", "weight_packed", lambda t: t[:, :-1].clone(), "cannot be read|do not belong to a weight"),
        (3, "symmetric", "weight_shape", lambda t: t + 1, "do not belong to a weight"),
        (4, "symmetric", "weight_scale", lambda t: -t, "a scale is not a positive number"),
        (4, "asymmetric", "weight_scale", lambda t: t * torch.nan, "a scale is not a positive number"),
        (4, "asymmetric", "weight_zero_point", lambda t: t + 100, "zero points beyond 15 at 4 bits"),
        (4, "full", "weight_scale", lambda t: t * 0, "a scale is not a finite nonzero number"),
        (4, "full", "weight_packed", lambda t: t.fill_(-0x66666667), "no code is beyond 3"),
    ],
)
def test_codes_off_the_grid_are_noticed(
    bits: int, algo: str, part: str, change: Any, text: str, tmp_path: Path
) -> None:
    model = quantize_model(bert(), config_of(bits, quantize_algo=ALGOS[algo][0]))
    save_quantized(model, tmp_path, layout="packed")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"bert.encoder.layer.1.output.dense.{part}"
    tensors[name] = change(tensors[name])
    forge(tmp_path, tensors)
    with pytest.raises(MoQError, match=text):
        verify_quantized(tmp_path)


def rewrite(folder: Path, change: Any, name: str = STATE_NAME) -> None:
    """Changes a JSON file of a packed folder, with digests that were forged to fit."""
    state = json.loads((folder / STATE_NAME).read_text())
    document = state if name == STATE_NAME else json.loads((folder / name).read_text())
    change(document)
    if name != STATE_NAME:
        (folder / name).write_text(json.dumps(document))
        state["config_json"] = digest_of_configs(folder)
    write_state(folder, state)


@pytest.fixture(scope="module")
def of_four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose fourth layer is dense, of 12 bits; not to be changed."""
    return save_quantized(mixed(bert(), [4, 4, 4, 12], config_of(4)), tmp_path_factory.mktemp("saved") / "packed")


@pytest.fixture
def edited(of_four_bits: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(of_four_bits, tmp_path / "edited"))


QUERY = "bert.encoder.layer.0.attention.self.query"
OUTPUT = "bert.encoder.layer.0.attention.output.dense"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("format"), "has format null, written by moq_hf"),
        (
            lambda s: s.update(format=1, versions=[]),
            "has format 1, written by moq_hf null, and this is moq_hf .* plain transformers loads",
        ),
        (lambda s: s.pop("layers"), "layers is missing"),
        (lambda s: s.update(layers={}), "layers: Dictionary should have at least 1 item"),
        (lambda s: s.update(config_json=7), "config_json must be a valid string, not 7"),
        (lambda s: s["layers"][QUERY].update(x=1), f"layers.{QUERY}.x: "),
        (lambda s: s["layers"][QUERY].pop("kind"), f"layers.{QUERY}.kind is missing"),
        (lambda s: s["layers"][QUERY].update(kind="lstm"), "kind must be 'linear', "),
        (lambda s: s["layers"][QUERY].update(shape="x"), 'shape must be a valid tuple, not "x"'),
        (lambda s: s["layers"][QUERY].update(shape=[0, 32]), "shape.0 must be greater than or equal to 1"),
        (lambda s: s["layers"][QUERY].update(scales=[0, 0]), f"layers.{QUERY}.scales do not fit its shape"),
        (lambda s: s["layers"][QUERY].update(bytes_before=-1), "bytes_before must be greater than or equal to 0"),
        (lambda s: s["parameters"].update(mean_bits=10**400), "mean_bits must be "),
        (lambda s: s["layers"][QUERY].update(group="none"), "the weights cannot be read: KeyError: 'none'"),
        (lambda s: s["layers"][QUERY].update(bits=0), f"layers.{QUERY}.bits must be greater than or equal to 1, not 0"),
        (lambda s: s["layers"][QUERY].update(bits=9), "no code is beyond 127, so they are of fewer than 9 bits"),
        (lambda s: s["layers"][QUERY].update(bits=5), "no code is beyond 7, so they are of fewer than 5 bits"),
        (lambda s: s["layers"][QUERY].update(bits=3), "codes beyond 3 at 3 bits"),
        (lambda s: s["layers"][OUTPUT].update(bits=17), "no code is beyond 32767, so they are of fewer than 17 bits"),
        (lambda s: s["layers"][OUTPUT].update(bits=11), "a weight is not on the grid of 11 bits"),
        (lambda s: s["layers"][OUTPUT].update(grid=["x", None]), "the weights cannot be read"),
    ],
)
def test_a_state_changed_by_hand_is_one_error_that_names_file_and_key(
    change: Any, text: str, edited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(edited, change)
    with pytest.raises(MoQError, match=text) as error:
        verify_quantized(edited)
    assert str(edited) in str(error.value)
    assert main(["inspect", str(edited)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {error.value}\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("quantization_config"),
        lambda c: c["quantization_config"].pop("config_groups"),
        lambda c: c["quantization_config"]["config_groups"].update(group_0=5),
        lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits=40),
        lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits=8),
    ],
)
def test_a_config_changed_by_hand_is_one_error(change: Any, edited: Path) -> None:
    rewrite(edited, change, "config.json")
    with pytest.raises(MoQError, match=str(edited)):
        verify_quantized(edited)


@pytest.mark.parametrize("algo", ["symmetric", "asymmetric", "full"])
def test_bits_in_a_container_are_held_against_the_codes(algo: str, tmp_path: Path) -> None:
    """Models that are unpacked while loading have one width for all layers, so only the codes tell the bits."""
    config = config_of(5, quantize_algo=ALGOS[algo][0])
    save_quantized(mixed(text_t5(hf.T5ForSequenceClassification), [5, 3, 4], config), tmp_path)
    layers = {name: layer.bits for name, layer in verify_quantized(tmp_path).layers.items()}
    assert set(layers.values()) == {3, 4, 5}
    for name, bits in list(layers.items())[:3]:
        for other in (1, bits - 1, bits + 1, 7, bits):
            rewrite(tmp_path, partial(put, path=("layers", name, "bits"), value=other))
            if other == bits:
                verify_quantized(tmp_path)
                continue
            with pytest.raises(MoQError, match=r"binary codes must be|a positive number|beyond"):
                verify_quantized(tmp_path)


@pytest.mark.parametrize("layout", ["packed", "unpacked"])
@pytest.mark.parametrize("algo", ["symmetric", "asymmetric", "full"])
def test_stored_weights_are_signed_codes_of_their_own_bits(algo: str, layout: Any, tmp_path: Path) -> None:
    # Unpacked while loading, codes of 4 bits lie in the 8 bits of the largest layer.
    model = mixed(bert(), [8, 4, 3, 2], config_of(8, quantize_algo=ALGOS[algo][0]))
    save_quantized(model, tmp_path, layout=layout)
    layers = quant_layers(model)
    for name, (codes, scale, zero) in stored_weights(tmp_path).items():
        half = 2 ** (layers[name].moq.bits - 1)
        assert -half <= int(codes.min()) and int(codes.max()) < half, name
        assert torch.equal(quantizer.dequantize(codes, scale, zero), layers[name].quantized_weight()), name


@pytest.mark.parametrize(
    ("algo", "own"),
    [
        ("symmetric", {"group_size": 32}),
        ("symmetric", {"groups": 2}),
        ("asymmetric", {"group_size": 8}),
        ("asymmetric", {"groups": "per_channel"}),
    ],
    ids=str,
)
def test_layers_with_groups_of_their_own_are_unpacked_while_loading(algo: str, own: Any, tmp_path: Path) -> None:
    """There all layers have one group size: the others repeat their scales."""
    model = text_t5(hf.T5ForSequenceClassification, feed_forward_proj="gated-gelu").eval()
    quantize_model(model, MoQConfig(bits=4, q_type=algo, **own, overrides={"*.encoder.*.k": {"group_size": 16}}))
    save_quantized(model, tmp_path, layout="unpacked")
    found = verify_quantized(tmp_path, model, inputs=ENDED)
    assert {layer.stored for layer in found.layers.values()} == {"packed"}


# The last one is too small for float16.
ODD = (torch.zeros(1024), torch.full((1024,), -1.0), torch.linspace(1, 1.01, 1024), torch.linspace(1e-8, 3e-7, 1024))


@pytest.mark.parametrize("algo", ["symmetric", "asymmetric", "full", "half-precision scales"])
def test_odd_weights_are_of_their_bits(algo: str, tmp_path: Path) -> None:
    for bits in (2, 3, 4, 8, 12):
        model = bert()
        attention = model.bert.encoder.layer[0].attention
        odd = (attention.self.query, attention.self.key, attention.self.value, attention.output.dense)
        with torch.no_grad():
            for layer, weight in zip(odd, ODD, strict=True):
                layer.weight.copy_(weight.view(32, 32))
        save_quantized(mixed(model, [bits], config_of(bits, quantize_algo=ALGOS[algo][0])), tmp_path)
        assert {layer.bits for layer in verify_quantized(tmp_path, model).layers.values()} == {bits}


@pytest.mark.parametrize("place", ["../outside.safetensors", "{outside}", "sub/model.safetensors", "", 5])
def test_a_shard_index_points_nowhere_else(place: Any, edited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outside = edited, edited.parent / "outside.safetensors"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(outside)
    place = place.format(outside=outside) if isinstance(place, str) else place
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, place)}))
    opened: list[Path] = []
    monkeypatch.setattr("moq_hf.packed.files.safe_open", lambda path, **_: opened.append(path))
    with pytest.raises(
        MoQError, match=r"index.json: weight_map.bert\S* ?(must be a valid string|: String should match)"
    ):
        verify_quantized(folder)
    assert opened == []


@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=LONG)])
def test_any_value_changed_by_hand_is_one_error_or_none(share: float, tmp_path: Path) -> None:
    config = config_of(4, quantize_embeddings=4, quantize_schedule={"schedule_offset": 1})
    controller = MoQController(bert(blocks=1), MoQConfig.from_dict(config), 9)
    controller.step()
    save_quantized(controller.model, tmp_path / "ok", controller=controller, metrics={"eval_f1": 0.5})
    generator, told = random.Random(0), 0
    for name in (STATE_NAME, "config.json"):
        document = json.loads((tmp_path / "ok" / name).read_text())
        for path in places(document):
            if path[0] in ("digest", "config_json") or generator.random() >= share:
                continue
            folder = tmp_path / "changed"
            shutil.copytree(tmp_path / "ok", folder, dirs_exist_ok=True)
            rewrite(folder, partial(put, path=path, value=generator.choice(WRONG)), name)
            try:
                verify_quantized(folder).table()
            except MoQError as error:
                assert len(str(error)) < 2000
                told += 1
    print(f"{told} told")
    assert told > 50


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "packed"
    return save_quantized(mixed(bert(blocks=1), [8, 4, 3, 2, 1, 12], config_of(8, quantize_embeddings=8)), folder)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=LONG)])
def test_damaged_bytes_are_noticed_and_none_is_a_crash(count: int, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    generator = random.Random(0)
    missed, unread = [], 0
    for _ in range(count):
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        path = folder / generator.choice(["model.safetensors"] * 8 + [STATE_NAME, "config.json"])
        before = path.read_bytes()
        place = generator.randrange(len(before))
        damaged = bytearray(before)
        damaged[place] = generator.choice([b for b in range(256) if b != before[place]])
        path.write_bytes(damaged)
        try:
            verify_quantized(folder)
        except MoQError:
            continue
        # Blanks between JSON's words mean nothing, and one that becomes another changes nothing.
        unread += 1
        header = int.from_bytes(before[:8], "little") + 8 if path.suffix == ".safetensors" else len(before)
        if place >= header or not before[place : place + 1].isspace():
            missed.append((path.name, place))
    print(f"{count - unread} of {count} noticed, the others in blanks of JSON")
    assert missed == []


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / STATE_NAME).unlink(), "moq_state.json is missing"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: os.truncate(f / "model.safetensors", 1000), "the weights cannot be read"),
        (lambda f: (f / STATE_NAME).write_text("{"), "cannot be read"),
        (lambda f: (f / STATE_NAME).write_text("[]"), "must hold an object"),
        (shutil.rmtree, "is not a directory"),
    ],
)
def test_what_is_missing_or_cut_short_is_told(damage: Any, text: str, edited: Path) -> None:
    damage(edited)
    with pytest.raises(MoQError, match=text):
        verify_quantized(edited)
    assert main(["inspect", str(edited)]) == 2


def test_a_tensor_that_the_folder_lacks_is_told(tmp_path: Path) -> None:
    model = mixed(bert(), [4], config_of(4))
    verify_quantized(save_quantized(model, tmp_path / "packed"), model)
    model.classifier.extra = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(MoQError, match=r"packed lacks tensors of the model: classifier\.extra$"):
        verify_quantized(tmp_path / "packed", model)


def test_answers_that_are_all_nan_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mixed(bert(), [4], config_of(4))
    model.classifier.bias.data.fill_(torch.nan)
    save_quantized(model, tmp_path / "packed", inputs=IDS)
    assert "Not verified: all outputs of the model in memory are NaN" in capsys.readouterr().out


def test_floats_that_were_asked_for_have_that_reason_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(quantize_model(bert(), config_of(4)), tmp_path, layout="floats")
    assert caplog.messages == [
        "moq_hf: every quantized layer is saved as rounded floats, at full size: the layout floats has no codes"
    ]


@pytest.mark.parametrize(
    ("bits", "why"), [(1, "2 bits are the fewest that are packed"), (9, "8 bits are the most that are packed")]
)
def test_bits_that_are_not_packed_are_told_before_and_after(
    bits: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = f"every quantized layer is saved as rounded floats, at full size: {why}"
    model = quantize_model(bert(), MoQConfig(bits=bits, embeddings=None))
    assert caplog.messages == [f"moq_hf: {told}; the file will be as large as in float"]
    caplog.clear()
    save_quantized(model, tmp_path / "out")
    assert caplog.messages == [f"moq_hf: {told}"]
    # The same before the first step of a run; of a budget nobody knows it yet.
    controller = MoQController(bert(), MoQConfig(bits=bits, start_bits=16, embeddings=None), 99)
    assert controller.warnings()[-1] == f"{told}; the file will be as large as in float"
    budget = MoQConfig(bits={"mean": 3.0, "choices": [1, 4]})
    assert told not in "".join(MoQController(bert(), budget, 99).warnings())
    # What is packed is not named.
    caplog.clear()
    save_quantized(quantize_model(bert(), MoQConfig(bits=4, overrides={"pooler": {"bits": bits}})), tmp_path / "one")
    told = f"these layers are saved as rounded floats, at full size: {why} (bert.pooler.dense)"
    assert caplog.messages == [f"moq_hf: {told}"] * 2


def test_experts_whose_names_in_the_files_are_others(tmp_path: Path) -> None:
    config = hf.GraniteMoeConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    model = quantize_model(hf.GraniteMoeForCausalLM(config), config_of(4))
    found = verify_quantized(save_quantized(model, tmp_path / "out", inputs=IDS), model)
    assert found.state["layout"] == "packed" and found.proof.agrees
    name = "model.layers.0.block_sparse_moe.experts.gate_up_proj"
    assert found.layers[name].bits == 4
    assert found.state["names"][name] == "model.layers.0.block_sparse_moe.input_linear.weight"


# What is done to the config of a folder whose state was made to fit: a person's or a program's edit.
CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no class": lambda c: c.update(architectures=[]),
    "a number": lambda c: c.update(architectures=[3]),
    "a mapping": lambda c: c.update(architectures={"a": 1}),
    "a function": lambda c: c.update(architectures=["set_seed"]),
    "code of its own": lambda c: c.update(auto_map={"AutoConfig": "mine.C"}, model_type="mine"),
    "fewer layers": lambda c: c.update(num_hidden_layers=0),
    "no size": lambda c: c.update(hidden_size=None),
    "a pattern": lambda c: next(iter(c["quantization_config"]["config_groups"].values())).update(targets=["re:["]),
    "no groups": lambda c: c["quantization_config"].update(config_groups=[]),
}


@pytest.mark.parametrize("change", CONFIGS)
def test_a_crafted_config_is_one_error(
    change: str, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(edited, CONFIGS[change], "config.json")
    codes = []
    for words in (
        ["inspect", str(edited)],
        ["export", "--to", "float", str(edited), str(tmp_path / "out")],
        ["export", "--to", "onnx", str(edited), str(tmp_path / "out")],
        ["plan", "w4", "--max_steps", "100", "--model", str(edited)],
    ):
        codes.append(main(words))
        told = capsys.readouterr().err
        assert codes[-1] in (0, 2) and (not codes[-1] or (told.startswith("error: ") and told.count("\n") == 1))
    assert 2 in codes


def test_sharded(tmp_path: Path) -> None:
    model = mixed(bert(), [8, 4, 12], config_of(8, quantize_embeddings=8))
    with files_of("20KB"):
        save_quantized(model, tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert recorded(tmp_path) == verify_quantized(tmp_path, model)
    assert_loads(tmp_path, model)
    # Saved again in one piece: no shard of before is left to be loaded.
    save_quantized(model, tmp_path)
    assert not list(tmp_path.glob("model-*")) and not (tmp_path / "model.safetensors.index.json").exists()
    verify_quantized(tmp_path, model)
    with files_of("20KB"):
        save_quantized(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    shards[1].unlink()
    with pytest.raises(MoQError, match=rf"{shards[1].name} is missing"):
        verify_quantized(tmp_path)


def save_again_and_again(folder: str, ready: Any) -> None:
    torch.set_num_threads(1)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(mixed(bert(), [8, 4, seed], config_of(8)))
    # The first save takes the time of some imports.
    save_quantized(models[0], folder + "-first")
    ready.set()
    while True:
        for model in models:
            with files_of("20KB" if model is models[0] else "5GB"):
                save_quantized(model, folder)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=LONG)])
def test_a_killed_save_leaves_a_whole_model_or_none(kills: int, tmp_path: Path) -> None:
    whole = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        whole.append(first(mixed(bert(), [8, 4, seed], config_of(8)), IDS))
    context = programs.warm()
    generator = random.Random(0)
    outcomes = []
    for kill in range(kills):
        folder = tmp_path / ("packed" if kill % 2 else f"packed-{kill}")
        ready = context.Event()
        process = context.Process(target=save_again_and_again, args=(str(folder), ready), daemon=True)
        process.start()
        assert ready.wait(120)
        while kill == kills - 1 and not folder.exists():
            time.sleep(0.01)  # The last kill comes after a whole save, however busy the machine is.
        time.sleep(generator.uniform(0.0, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            logits = first(hf.BertForSequenceClassification.from_pretrained(folder).eval(), IDS)
        except (OSError, ValueError):
            outcomes.append("none")
            with pytest.raises(MoQError):
                verify_quantized(folder)
            continue
        assert any(torch.equal(logits, expected) for expected in whole)
        verify_quantized(folder)
        outcomes.append("whole")
    print(f"{outcomes.count('whole')} whole, {outcomes.count('none')} none")
    assert "whole" in outcomes and (kills < 10 or "none" in outcomes)
    torch.manual_seed(1)
    save_quantized(mixed(bert(), [8, 4, 1], config_of(8)), folder)
    assert not list(folder.rglob("*.writing"))
    verify_quantized(folder)


class Killed(BaseException):
    """What no handler of the code under test may catch."""


@pytest.mark.parametrize("sizes", [("5GB", "5GB"), ("20KB", "5GB"), ("5GB", "20KB")], ids=str)
def test_a_save_that_ends_at_any_step_leaves_a_whole_model_or_none(
    sizes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = mixed(bert(blocks=1), [8, 4], config_of(8)), mixed(bert(blocks=1), [3, 2], config_of(8))
    with files_of(sizes[0]):
        save_quantized(old, tmp_path / "old")
    real = {name: getattr(Path, name) for name in ("unlink", "replace")}
    left = 0

    def counted(name: str) -> Any:
        def act(self: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real[name](self, *args, **kwargs)

        return act

    for name in real:
        monkeypatch.setattr(Path, name, counted(name))
    outcomes = []
    for steps in range(100):
        folder = tmp_path / str(steps)
        shutil.copytree(tmp_path / "old", folder)
        left = steps
        with suppress(Killed), files_of(sizes[1]):
            save_quantized(new, folder)
        try:
            logits = first(hf.BertForSequenceClassification.from_pretrained(folder).eval(), IDS)
        except OSError:
            outcomes.append("none")
            continue
        outcomes.append("old" if torch.equal(logits, first(old, IDS)) else "new")
        assert torch.equal(logits, first(old if outcomes[-1] == "old" else new, IDS))
        if left >= 0:
            break
    # In this order, and the last step makes the new model.
    assert sorted(set(outcomes), key=outcomes.index) == ["old", "none", "new"] and outcomes.count("new") == 1


def test_embeddings(tmp_path: Path) -> None:
    model = quantize_model(bert(), config_of(4, quantize_embeddings=8))
    tables = quant_embeddings(model)
    parts = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert list(tables) == [f"bert.embeddings.{part}" for part in parts]
    table = tables["bert.embeddings.word_embeddings"]
    scale = table.float_weight.detach().abs().amax(1, keepdim=True) / 127
    expected = (table.float_weight.detach() / scale).round() * scale
    # The row of the padding token is zeros, which stay zeros.
    assert torch.equal(table.quantized_weight(), expected.nan_to_num(0.0))
    model(**IDS, labels=torch.tensor([0, 1, 0])).loss.backward()
    gradient = table.float_weight.grad
    assert bool(gradient[5].any()) and not bool(gradient[40].any())
    save_quantized(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert stored.dtype == torch.int8
    left = quantize_model(bert(), config_of(4, quantize_embeddings=8, modules_to_not_convert=["*word*", "classifier"]))
    assert len(quant_embeddings(left)) == 2


def test_tables_round_to_nearest_by_the_largest_weight_whatever_the_layers_do() -> None:
    drawn = MoQConfig(bits=4, embeddings=4, group_size=16, rounding="stochastic", scale="mse", scale_dtype="float16")
    model = quantize_model(bert(), drawn)
    found = quant_embeddings(model)["bert.embeddings.word_embeddings"]
    for _ in range(60):
        # Ratios of linear layers are searched at the fiftieth, which a table never has.
        model.train()
    grid = Grid(PerGroup(16), search="absmax", full=None, scale_dtype="float16")
    assert found.moq.grid == grid
    assert torch.equal(found.quantized_weight(), quantizer.fake_quantize(found.float_weight, 4, grid))


def test_a_weight_that_something_in_float_shares_is_refused(tmp_path: Path) -> None:
    model = quantize_model(hf.BertForMaskedLM(hf.BertConfig(**SMALL)), config_of(4)).eval()
    save_quantized(model, tmp_path / "packed")
    assert_loads(tmp_path / "packed", model)
    model.bert.encoder.again = model.bert.encoder.layer[0].output
    with pytest.raises(MoQError, match=r"is also bert.encoder.again.dense.weight: a shared weight cannot be packed"):
        save_quantized(model, tmp_path / "packed")


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_scales_of_half_precision_take_two_bytes_and_a_half_model_stays_one(half: str, tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.output.dense.weight_scale"
    algo = {"quantize_algo": {"scale_dtype": half}}
    for dtype in ("float32", half):
        model = quantize_model(bert().to(getattr(torch, dtype)), config_of(4, quantize_embeddings=8, **algo))
        folder = save_quantized(model, tmp_path / dtype)
        tensors = load_file(folder / "model.safetensors")
        scale = tensors[name]
        table = tensors["bert.embeddings.word_embeddings.weight_scale"]
        assert str(scale.dtype) == str(table.dtype) == f"torch.{half}"
        loaded = hf.BertForSequenceClassification.from_pretrained(folder).eval()
        assert loaded.dtype == getattr(torch, dtype) and torch.equal(first(loaded, IDS), first(model, IDS))
        assert verify_quantized(folder, model).layers.keys() == recorded(folder).layers.keys()
        stored = stored_weights(folder)[name.removesuffix(".weight_scale")]
        assert stored.scale.dtype == torch.float32 and torch.equal(stored.scale, scale.float())


def test_asymmetric_grids_have_packed_zero_points_unless_tables_are_quantized(tmp_path: Path) -> None:
    algo = {"quantize_algo": {"q_type": "asymmetric"}, "quantize_group_size": 16, "quantize_groups": "per_channel"}
    for tables, layout, dtype in ((None, "unpacked", torch.int32), (8, "packed", torch.int8)):
        model = quantize_model(bert(), config_of(4, quantize_embeddings=tables, **algo))
        found = verify_quantized(save_quantized(model, tmp_path / layout), model)
        zero = load_file(tmp_path / layout / "model.safetensors")["bert.encoder.layer.0.output.dense.weight_zero_point"]
        assert found.state["layout"] == layout and zero.dtype == dtype
        # 8 codes a word along the rows.
        assert list(zero.shape) == ([32 // 8, 4] if tables is None else [32, 4])


def test_names_are_those_of_the_hub(tmp_path: Path) -> None:
    config = hf.SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
    model = quantize_model(hf.SwinForImageClassification(config).eval(), config_of(4))
    found = verify_quantized(save_quantized(model, tmp_path), model)
    name = "swin.encoder.layers.0.blocks.0.attention"
    assert found.state["names"][f"{name}.q_proj"] == f"{name}.self.query"
    assert f"{name}.self.query.weight_packed" in load_file(tmp_path / "model.safetensors")
    assert set(stored_weights(tmp_path)) == set(quant_layers(model))
    assert recorded(tmp_path).float_bytes == found.float_bytes
    assert_loads(tmp_path, model, {"pixel_values": torch.randn(2, 3, 16, 16)})


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(MoQError, match="has no quantized layer"):
        save_quantized(bert(), tmp_path / "packed")
    with pytest.raises(MoQError, match="only models of transformers"):
        save_quantized(torch.nn.Sequential(torch.nn.Linear(4, 4)), tmp_path / "packed")
    model = quantize_model(bert(), config_of(4))
    (tmp_path / "file").touch()
    with pytest.raises(MoQError, match="is a file"):
        save_quantized(model, tmp_path / "file")
    with pytest.raises(MoQError, match="cannot write the packed model"):
        save_quantized(model, tmp_path / "file" / "inside")
    with torch.no_grad():
        model.bert.pooler.dense.weight[0, 0] = torch.nan
    with pytest.raises(MoQError, match=r"bert\.pooler\.dense\.weight cannot be quantized: weight holds NaN or Inf"):
        save_quantized(model, tmp_path / "packed")
    model = quantize_model(
        bert().half(), {**config_of(2), "quantize_algo": {"q_type": "asymmetric", "scale": "absmax"}}
    )
    with torch.no_grad():
        model.bert.pooler.dense.weight.fill_(65504)[:, 0] = -45000
    for layout in (None, "packed", "floats"):
        with pytest.raises(MoQError, match=r"^bert\.pooler\.dense\.weight has weights so large"):
            save_quantized(model, tmp_path / "packed", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_blend_is_saved_as_it_was_evaluated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantize_model(bert(), config_of(4))
    layer = model.bert.pooler.dense
    layer.moq.blend = 0.25
    save_quantized(model, tmp_path)
    assert "at full size: training ended before they were at their bits (bert.pooler.dense)" in caplog.text
    assert_loads(tmp_path, model)


def test_saving_and_the_proof_leave_the_model_and_the_random_numbers_alone(tmp_path: Path) -> None:
    model = mixed(bert(), [8, 4, 12], config_of(8)).train()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(3)
    for inputs in (None, IDS):
        torch.manual_seed(5)
        save_quantized(model, tmp_path, inputs=inputs)
        assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {k: v for k, v in model.config.to_dict().items() if k not in ("architectures", "dtype")} == {
        k: v for k, v in config.items() if k not in ("architectures", "dtype")
    }


def test_inspect_begins_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(mixed(bert(), [8], config_of(8)), tmp_path, inputs=IDS)
    capsys.readouterr()
    # Of the one that is installed, and of the one that saved.
    monkeypatch.setattr(serving, "installed", lambda library: "5.99.0")
    assert main(["inspect", str(tmp_path)]) == 0
    head, layers, servers = capsys.readouterr().out.split("\n\n")
    lines = head.splitlines()
    assert lines[0] == "Intact: every tensor is as it was saved, and every weight is one that its bits and scale allow."
    version = read_version("transformers")
    assert lines[1].startswith(f"Saved with transformers {version}. Verified: loaded with plain transformers, ")
    assert lines[2].startswith("13 quantized layers: ") and lines[3].startswith("all weights: ")
    assert re.fullmatch(r"quantized: \d\d\.\d % of the model's [\d,]+ parameters; mean \d+\.\d\d bits .*", lines[4])
    rows = layers.splitlines()
    assert rows[0].split() == ["module", "bits", "stored", "scales", "bytes", "before"]
    assert rows[1].split()[:4] == ["bert.encoder.layer.0.attention.self.query", "8", "packed", "4"]
    assert servers.split()[:5] == ["served", "by", "transformers", "5.99.0", "yes"]
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{head}\n"


def test_verify_fails_where_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_quantized(mixed(bert(), [8], config_of(8)), tmp_path)
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 0
    assert "Saved with transformers" in (told := capsys.readouterr().out)
    assert "Not verified: nothing was compared. 0." in told
    proof = {
        "agrees": False,
        "examples": 3,
        "largest_difference": 0.5,
        "tokens": None,
        "reason": "outputs differ by 0.5",
    }
    state = json.loads((tmp_path / STATE_NAME).read_text())
    write_state(tmp_path, state | {"proof": proof | {"inputs": None, "dtype": None}})
    assert main(["verify", str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.err.endswith(f"{tmp_path}: The saved model is NOT what was evaluated: outputs differ by 0.5\n")
    assert found.out == "" and main(["inspect", str(tmp_path)]) == 0
    assert "The saved model is NOT what was evaluated: outputs differ by 0.5." in capsys.readouterr().out
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "classifier.bias": tensors["classifier.bias"] + 1}, tmp_path / "model.safetensors")
    assert main(["verify", str(tmp_path)]) == 2
    assert "classifier.bias is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [12, 15])
def test_rounded_codes_of_a_half_model_are_on_their_grid(bits: int, tmp_path: Path) -> None:
    """The nearest code to a number that bfloat16 rounded may round to another number."""
    torch.manual_seed(bits)
    algo = {"range": "full", "rounding": "stochastic"}
    body = hf.BertModel(
        hf.BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4)
    )
    quantize_model(body.to(torch.bfloat16), config_of(bits, quantize_algo=algo))
    save_quantized(body, tmp_path)
    assert verify_quantized(tmp_path, body).layers["encoder.layer.0.output.dense"].bits == bits


@pytest.mark.parametrize("gated", [False, True])
def test_a_class_whose_weights_are_taken_apart_while_loading_is_saved_as_floats(
    gated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing is compared: DINOv2's files have two matrices in one, which both are quantized if gated."""
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8,
        use_swiglu_ffn=gated,
    )  # fmt: skip
    model = quantize_model(hf.Dinov2Model(config), config_of(4)).eval()
    assert ("encoder.layer.0.mlp.gate_proj" in quant_layers(model)) == gated
    save_quantized(model, tmp_path / "found")
    told = "every quantized layer is saved as rounded floats, at full size: transformers takes the weights of this "
    assert caplog.messages[-1].startswith(f"moq_hf: {told}")
    pictures = torch.randn(2, 3, 16, 16)
    loaded = hf.Dinov2Model.from_pretrained(tmp_path / "found")
    assert torch.equal(loaded(pictures).last_hidden_state, model(pictures).last_hidden_state)
    assert verify_quantized(tmp_path / "found", loaded).layers.keys() == quant_layers(model).keys()
    for layout in ("packed", "unpacked"):
        with pytest.raises(MoQError, match=f"in the layout {layout}: leave layout out"):
            save_quantized(model, tmp_path / layout, layout=layout)
