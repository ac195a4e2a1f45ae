"""The squared error of narrow and full ranges of codes at 4, 3 and 2 bits, before any training.

    python benchmarks/ranges.py --model_name_or_path FOLDER

On normal random weights, and on the linear layers of a pretrained encoder if there is a folder. Each error is the sum
of squared errors over the sum of squared weights. Training moves weights to their grid, so a smaller error here
promises nothing there.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment, write
from torch import Tensor
from transformers import AutoModel

from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, ScaleDtype
from moq_hf.kernels.backend import choose
from moq_hf.model.inventory import Inventory, is_linear

GRIDS = {
    "narrow, absmax": Grid(search="absmax"),
    "narrow, mse": Grid(search="mse"),
    "full, absmax": Grid(search="absmax", full=True),
    "full, mse": Grid(search="mse", full=True),
    "asymmetric, mse": Grid(search="mse", symmetric=False),
}
DTYPES: tuple[ScaleDtype, ...] = ("float32", "bfloat16", "float16")
SHAPE, SEED = (768, 768), 0


def squared_error(weight: Tensor, bits: int, grid: Grid) -> float:
    """The sum of squared errors of a weight on its grid."""
    path = choose("search", weight, torch.float32)
    ratio = path.least_squares_ratio(weight, bits, grid) if grid.searches(bits) else None
    return float((path.fake_quantize(weight, bits, grid, ratio=ratio) - weight).double().square().sum())


def compare(weights: Mapping[str, Tensor], group_size: int) -> list[dict[str, Any]]:
    """A line for each grid: its error, and on how many of the weights a full range errs less than a narrow one."""
    whole = sum(float(weight.double().square().sum()) for weight in weights.values())
    layouts: dict[str, Grouping] = {"per channel": PerChannel(), f"groups of {group_size}": PerGroup(group_size)}
    lines = []
    for bits in (4, 3, 2):
        for layout, grouping in layouts.items():
            found: dict[str, dict[str, float]] = {}
            for name, grid in GRIDS.items():
                found[name] = {w: squared_error(t, bits, replace(grid, grouping=grouping)) for w, t in weights.items()}
                line = {"bits": bits, "layout": layout, "grid": name, "error": sum(found[name].values()) / whole}
                if name.startswith("full"):
                    narrow = found[name.replace("full", "narrow")]
                    line["weights_better"] = sum(found[name][w] < narrow[w] for w in weights)
                lines.append(line)
    return lines


def scale_dtypes(weights: Mapping[str, Tensor], group_size: int) -> list[dict[str, Any]]:
    """The errors of scales of each dtype, full range, in groups."""
    whole = sum(float(weight.double().square().sum()) for weight in weights.values())
    grid = Grid(PerGroup(group_size), search="mse", full=True)
    return [
        {"bits": bits, "scale_dtype": dtype, "error": sum(errors) / whole}
        for bits in (8, 4)
        for dtype in DTYPES
        for errors in [[squared_error(w, bits, replace(grid, scale_dtype=dtype)) for w in weights.values()]]
    ]


def encoder_weights(folder: str) -> dict[str, Tensor]:
    """The weights of the linear layers in the blocks of a model, float32."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    linears = {name: module for name, module in Inventory.of(model).modules.items() if is_linear(module)}
    return {name: module.weight.detach() for name, module in linears.items() if "pooler" not in name}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="of a pretrained encoder")
    parser.add_argument("--group_size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ranges.json")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    sources = {"normal": {"weight": torch.randn(SHAPE) * 0.02}}
    if args.model_name_or_path:
        sources["pretrained"] = encoder_weights(args.model_name_or_path)
    result: dict[str, Any] = {}
    for name, weights in sources.items():
        count = sum(weight.numel() for weight in weights.values())
        result[name] = {
            "weights": len(weights),
            "parameters": count,
            "ranges": compare(weights, args.group_size),
            "scales": scale_dtypes(weights, args.group_size),
        }
        for line in result[name]["ranges"]:
            better = f", better on {line['weights_better']} of {len(weights)}" if "weights_better" in line else ""
            print(f"{name}: {line['bits']} bits {line['layout']}, {line['grid']}: {line['error']:.5f}{better}")
        for line in result[name]["scales"]:
            print(f"{name}: {line['bits']} bits, {line['scale_dtype']} scales: {line['error']:.7f}")
    write({**environment(), **result}, args.out)


if __name__ == "__main__":
    main()
