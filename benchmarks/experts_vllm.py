"""Runs in an environment with vLLM and without moq_hf: loads a folder on the CPU and generates 8 tokens.

    python benchmarks/experts_vllm.py FOLDER "[1, 5, 17]" [--stand_in]

Prints a line of JSON. With `--stand_in` experts are unpacked after loading and multiplied by PyTorch, in the place of
the kernel that needs AMX.
"""

import argparse
import json
import os
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DO_NOT_TRACK": "1",
}  # fmt: skip

import torch


def unpacked(words: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Weights `[experts, rows, columns]` of packed codes and the scales of groups or rows."""
    shifts = torch.arange(0, 32, bits)
    codes = (words[..., None] >> shifts) & (2**bits - 1)
    codes = codes.flatten(-2).float() - 2 ** (bits - 1)
    return codes * scale.float().repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)


def put_stand_in() -> None:
    """Exchange the kernel of packed experts."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as room,
    )

    method: Any = room.CompressedTensorsWNA16MoEMethod
    room.select_wna16_moe_backend = lambda **_: (room.WNA16MoEBackend.CPU, None)
    room.convert_to_wna16_moe_kernel_format = None

    def process(self: Any, layer: Any) -> None:
        layer.whole = [
            unpacked(getattr(layer, f"{name}_weight_packed").data, getattr(layer, f"{name}_weight_scale").data, 4)
            for name in ("w13", "w2")
        ]

    def apply(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> Any:
        both, down = (weight.to(x.dtype) for weight in layer.whole)
        out = torch.zeros_like(x)
        for row, (weights, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
            for weight, expert in zip(weights, ids.tolist(), strict=True):
                gate, up = (both[expert] @ x[row]).chunk(2)
                out[row] += weight.to(x.dtype) * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        return out

    method.process_weights_after_loading = process
    method.apply = apply
    method.is_monolithic = property(lambda self: False)


def main() -> None:
    """Load, generate and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompt", type=json.loads)
    parser.add_argument("--stand_in", action="store_true")
    args = parser.parse_args()
    import vllm

    answer: dict[str, Any] = {"version": vllm.__version__}
    try:
        if args.stand_in:
            put_stand_in()
        llm = vllm.LLM(
            args.folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
            max_num_seqs=2, block_size=32,
        )  # fmt: skip
        settings = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": args.prompt}], settings, use_tqdm=False)[0].outputs[0]
        answer |= {"served": True, "tokens": list(out.token_ids)}
    except Exception as error:
        answer |= {"served": False, "why": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
