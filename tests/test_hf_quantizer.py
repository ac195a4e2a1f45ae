"""`from_pretrained(..., quantization_config=)`: the model of `quantize_model`, or one error while it is loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_runs import new_model
from torch import nn

from moq_hf import MoQConfig, MoQConfigError, MoQError, QuantLinear, quantize_model, save_quantized
from moq_hf.hf_quantizer import MoQHfQuantizer
from moq_hf.model.convert import quantized_layers

BERT = hf.BertForSequenceClassification
INPUTS = {"input_ids": torch.arange(5, 25).view(2, 10)}
# As a user gives it, and as `quantize_model` takes it.
CONFIGS: dict[str, tuple[Any, Any]] = {
    "a preset": (MoQConfig("w4"), "w4"),  # type: ignore[call-arg]
    "keywords": (
        MoQConfig(bits=3, group_size=8, q_type="asymmetric"),
        {"bits": 3, "group_size": 8, "q_type": "asymmetric"},
    ),
    "a mapping": ({"quant_method": "moq", "bits": 2}, {"bits": 2}),
    "inputs too": (MoQConfig(bits=8, activations={"enabled": True}), {"bits": 8, "activations": {"enabled": True}}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    new_model().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_model_of_quantize_model(name: str, base: str) -> None:
    given, config = CONFIGS[name]
    before = copy.deepcopy(given)
    model = hf.AutoModelForSequenceClassification.from_pretrained(base, quantization_config=given)
    expected = quantize_model(BERT.from_pretrained(base), config).eval()
    assert torch.equal(model(**INPUTS).logits, expected(**INPUTS).logits)
    assert repr(model) == repr(expected) and given == before
    assert model.state_dict().keys() == expected.state_dict().keys()
    # What is left is a float model for whoever asks.
    assert model.config.to_dict() == expected.config.to_dict()
    assert not hasattr(model, "hf_quantizer") and not model.is_quantized


def test_what_the_folder_does_not_have_is_drawn_as_ever(base: str) -> None:
    found = []
    for more in ({}, {"quantization_config": MoQConfig(bits=4)}):
        hf.set_seed(1)
        found.append(hf.BertForMaskedLM.from_pretrained(base, **more))
    plain, quantized = (model.cls.predictions.transform.dense.weight for model in found)
    assert torch.equal(quantized, plain)
    assert isinstance(found[1].bert.encoder.layer[0].output.dense, QuantLinear)


def test_dtypes_and_devices(base: str) -> None:
    model = BERT.from_pretrained(base, quantization_config=MoQConfig(bits=4), dtype=torch.bfloat16, device_map="cpu")
    expected = quantize_model(BERT.from_pretrained(base, dtype=torch.bfloat16), bits=4)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model(**INPUTS).logits, expected.eval()(**INPUTS).logits)
    assert model.float().dtype == torch.float32
    assert model.half().dtype == torch.float16
    assert model.to(torch.float64).dtype == torch.float64
    with pytest.raises(MoQError, match="device_map has left some weights on the CPU or on disk"):
        where = {"bert": "cpu", "classifier": "disk"}
        BERT.from_pretrained(
            base, quantization_config=MoQConfig(bits=4), device_map=where, offload_folder=base + "/off"
        )


def test_switched_off_it_is_a_float_model(base: str) -> None:
    model = BERT.from_pretrained(base, quantization_config=MoQConfig(bits=4, enabled=False))
    assert quantized_layers(model) == {} and "save_pretrained" not in vars(model)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"start_bits": 8}, r"falling bits \(8 to 4 bits; none fall with start_bits=4\)"),
        (
            {"overrides": {"*.layer.0.*": {"start_bits": 8}}},
            r"falling bits \(4 bits \(\*\.layer\.0\.\*: 8 to 4 bits\)\)",
        ),
        ({"bits": {"mean": 3.0}}, "bits under a budget"),
        ({"offset": 3}, "offset 3"),
        ({"offset": 0.5}, "offset 0.5"),
        ({"activations": {"enabled": True, "start_step": 2}}, "activations from step 2"),
        ({"blend": {"enabled": True}}, "blend"),
        ({"gptq": 8}, "gptq"),
        ({"distillation": {"teacher": "some/model"}}, r"a teacher \(MoQTrainer\)"),
        ({"gptq": 8, "offset": 3}, "offset 3, gptq"),
    ],
)
def test_what_only_a_run_can_do_is_one_error(asked: dict[str, Any], text: str, tmp_path: Path) -> None:
    # Before anything of a large model is read.
    new_model().config.save_pretrained(tmp_path)
    with pytest.raises(MoQError, match=f"a run is needed for {text}: load the model without .* to MoQCallback"):
        BERT.from_pretrained(tmp_path, quantization_config=MoQConfig(**{"bits": 4, **asked}))


def test_wrong_configs_are_one_error(base: str) -> None:
    with pytest.raises(MoQConfigError, match="bitz: unknown key"):
        BERT.from_pretrained(base, quantization_config={"quant_method": "moq", "bitz": 4})
    with pytest.raises(MoQError, match=r"modules_to_not_convert: 'nothing_like_it' matches no module"):
        BERT.from_pretrained(base, quantization_config=MoQConfig(bits=4, modules_to_not_convert=["nothing_like_it"]))


def test_a_folder_that_is_quantized_already_is_one_error(tmp_path: Path) -> None:
    save_quantized(quantize_model(new_model(), "w4"), tmp_path)
    with pytest.raises(ValueError, match="is quantized with CompressedTensorsConfig but you are passing a MoQConfig"):
        BERT.from_pretrained(tmp_path, quantization_config=MoQConfig(bits=4))


def test_what_transformers_may_ask_of_it() -> None:
    quantizer = MoQHfQuantizer(MoQConfig(bits=4), pre_quantized=False)
    assert quantizer.is_trainable and quantizer.is_qat_trainable and quantizer.is_serializable()
    assert isinstance(hf.AutoModel.from_config(new_model().config).pooler.dense, nn.Linear)
