"""Exports a delivered folder to ExecuTorch, and compares the file's answers with those of plain transformers.

The folder is that of a run with the preset `executorch`. Its integers and scales go into the file as they are. It needs
an environment of its own, without moq_hf; executorch 1.5.1 names no torch, and imports with 2.13:

    python -m venv executorch
    executorch/bin/pip install torch==2.13.0 torchao==0.18.0 executorch==1.5.1 \
        transformers==5.23.0 compressed-tensors==0.20.0
    executorch/bin/python examples/executorch/export.py runs/llama/quantized model.pte --text "The cat sat on"

The file takes `input_ids`, and of an encoder `attention_mask`, both int64 `[1, length]`, and gives logits, or the last
hidden states of a base model. A decoder has no cache: it reads a text from its beginning for each token.
"""

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from safetensors.torch import load_file
from torch import Tensor, nn
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    IntxUnpackedToInt8Tensor,
)

# XNNPACK's kernel has groups of a multiple of this.
GROUP = 32
INPUTS = {"num_bits": 8, "symmetric": False, "strategy": "token", "dynamic": True}
LIBRARIES = ("torch", "torchao", "executorch", "transformers", "compressed-tensors")


class Answers(nn.Module):
    """A model of which only the first tensor of the answer is left."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        """Logits, or the last hidden states."""
        inputs = dict(zip(self.names, tensors, strict=True))
        more = {"use_cache": False} if "attention_mask" not in inputs else {}
        return self.model(**inputs, **more, return_dict=True)[0]


def integers(folder: Path, model: nn.Module) -> dict[str, IntxUnpackedToInt8Tensor]:
    """The packed weights of a folder by the names of their layers, for torchao.

    Args:
        folder: The delivered folder.
        model: What plain transformers loads from it, for the scheme of each layer.

    Raises:
        SystemExit: XNNPACK would compute something else with them.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    found, faults = {}, []
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or f"{name}.weight_packed" not in tensors:
            continue
        bits = scheme.weights.num_bits
        shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{name}.weight_packed"], bits, shape)
        scale = tensors[f"{name}.weight_scale"].float()
        size = shape[1] // scale.shape[1]
        inputs = scheme.input_activations
        wrong = {
            f"its codes have {bits} bits, more than 4": bits > 4,
            f"its groups are {size} wide, no multiple of {GROUP}": bool(size % GROUP),
            "its grid has zero points": f"{name}.weight_zero_point" in tensors,
            "it has scales that are not positive": bool((scale <= 0).any()),
            "its scales are no numbers of bfloat16": not torch.equal(scale, scale.bfloat16().float()),
            "its inputs are not rounded to 8 bits per token, asymmetric": inputs is None
            or any(getattr(inputs, key) != value for key, value in INPUTS.items()),
        }
        faults += [f"{name}: {why}" for why, holds in wrong.items() if holds]
        if not any(wrong.values()):
            found[name] = IntxUnpackedToInt8Tensor(
                codes.to(torch.int8),
                scale,
                torch.zeros(scale.shape, dtype=torch.int8),
                torch.int4,
                (1, size),
                torch.float32,
                "int8_asym_per_token",
            )
    if faults or not found:
        advice = 'the preset "executorch" trains what XNNPACK computes'
        raise SystemExit("\n".join([f"{folder}: no file for ExecuTorch; {advice}", *(faults or ["no packed weights"])]))
    return found


def portable(reference: Any, weights: dict[str, IntxUnpackedToInt8Tensor]) -> Any:
    """The model as plain PyTorch, with torchao's weights in its quantized layers.

    Args:
        reference: The model from plain transformers, which has answered once.
        weights: Of the quantized layers, by name.

    Raises:
        SystemExit: A weight is not the reference's, or one is missing.
    """
    config = type(reference.config).from_pretrained(reference.name_or_path)
    del config.quantization_config
    model = type(reference)._from_config(config, dtype=torch.float32)
    missing = model.load_state_dict(reference.state_dict(), strict=False).missing_keys
    if missing:
        raise SystemExit(f"{reference.name_or_path}: these weights are not in the folder: {', '.join(missing)}")
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if not torch.equal(weight.dequantize(), layer.weight):
            raise SystemExit(f"{name}: torchao's weight is not the one that transformers loads")
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model.eval()


def main() -> None:
    """Write the file, and print how far its answers are from those of transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", help="what both answer; by default random tokens")
    parser.add_argument("--length", type=int, default=32, help="tokens that the file takes")
    parser.add_argument("--new_tokens", type=int, default=8, help="tokens that a decoder adds to the text")
    parser.add_argument("--json", type=Path, help="where the results go, too")
    args = parser.parse_args()

    config = transformers.AutoConfig.from_pretrained(args.folder)
    family = getattr(transformers, config.architectures[0])
    reference = family.from_pretrained(args.folder, dtype=torch.float32).eval()
    is_decoder = "CausalLM" in family.__name__
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, args.length // 2))
    if args.text is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
        ids = tokenizer(args.text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    if not 0 < start <= args.length - is_decoder * args.new_tokens:
        parser.error(f"--length {args.length} has no place for {start} tokens and those to come")
    names = ["input_ids"] if is_decoder else ["input_ids", "attention_mask"]
    padded = nn.functional.pad(ids, (0, args.length - start))
    mask = (torch.arange(args.length) < start).long()[None]
    inputs = (padded, mask)[: len(names)]
    expected = Answers(reference, names)

    with torch.no_grad():
        expected(*inputs)
        weights = integers(args.folder, reference)
        model = Answers(portable(reference, weights), names).eval()
        program = torch.export.export(model, inputs, strict=False)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    graph = lowered.exported_program().graph
    outside = sum("dequantize" in str(node.target) for node in graph.nodes)
    lowered = lowered.to_executorch()
    args.out.write_bytes(lowered.buffer)
    method = Runtime.get().load_program(args.out).load_method("forward")

    def run(*tensors: Tensor) -> Tensor:
        return method.execute(list(tensors))[0].clone()

    def generated(answer: Any) -> list[int]:
        text = padded.clone()
        for place in range(start, start + args.new_tokens):
            text[0, place] = answer(text)[0, place - 1].argmax()
        return text[0, start : start + args.new_tokens].tolist()

    with torch.no_grad():
        ours, theirs, eager = run(*inputs), expected(*inputs), model(*inputs)
        if ours.dim() == 3:
            # What follows the text does not count.
            ours, theirs, eager = ours[:, :start], theirs[:, :start], eager[:, :start]
        found = {
            "model": family.__name__,
            "layers": len(weights),
            "layers_outside_xnnpack": outside,
            "bytes": args.out.stat().st_size,
            "largest_output": float(theirs.abs().max()),
            "largest_difference": float((ours - theirs).abs().max()),
            "mean_difference": float((ours - theirs).abs().mean()),
            "largest_difference_of_torchao": float((eager - theirs).abs().max()),
            "same_largest": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        }
        if is_decoder:
            pairs = zip(generated(run), generated(expected), strict=True)
            found["same_tokens"] = sum(one == other for one, other in pairs)
            found["tokens"] = args.new_tokens
    found["versions"] = {name: importlib.metadata.version(name) for name in LIBRARIES}
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
