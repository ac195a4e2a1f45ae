"""Sections of `gpu.py`: the search for clipping ratios, and rounded inputs."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Report


def search(report: "Report") -> None:
    """The ratios of all weights of a language model of 1.24 billion, over a copy of as many bytes, and over PyTorch."""
    import torch
    from gpu_kernels import Timer, device_of
    from timing import interleaved

    from moq_hf import quantizer, triton_search
    from moq_hf.grid import Grid, PerChannel, PerGroup

    device = device_of(report)
    hidden, middle, layers, keys = (32, 64, 1, 16) if report.small else (2048, 8192, 16, 512)
    shapes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    shapes += [(middle, hidden), (middle, hidden), (hidden, middle)]
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=device) * 0.02 for shape in shapes * layers]
    targets = [torch.empty_like(weight) for weight in weights]
    timer, repeats = Timer(device), 1 if report.small else 10
    cases = {
        "4 bits, groups of 32": (4, Grid(PerGroup(32))),
        "4 bits, groups of 32, asymmetric": (4, Grid(PerGroup(32), symmetric=False)),
        "4 bits per channel": (4, Grid(PerChannel())),
        "NVFP4": (4, Grid(PerGroup(16), format="nvfp4")),
    }
    for name, (bits, grid) in cases.items():

        def all_by(least_squares_ratio: Callable[..., Any], bits: int = bits, grid: Grid = grid) -> None:
            for weight in weights:
                least_squares_ratio(weight, bits, grid)

        weight = weights[-1]
        ratios = [each.least_squares_ratio(weight, bits, grid) for each in (triton_search, quantizer)]
        report.figure(f"{name}: ratios are those of the definition", torch.equal(*ratios), equal=True)
        runs = {
            "copy": lambda: torch._foreach_copy_(targets, weights),
            "kernel": lambda all_by=all_by: all_by(triton_search.least_squares_ratio),
        }
        # What PyTorch alone needs takes long, and is much the same each time.
        plain = interleaved({"plain": lambda all_by=all_by: all_by(quantizer.least_squares_ratio)}, 1, timer)["plain"]
        medians = interleaved(runs, repeats, timer)
        report.detail(name, medians | {"plain": plain})
        count = sum(weight.numel() for weight in weights) / 1e6
        report.figure(f"{name}, {count:.0f} M weights: search", 1000 * medians["kernel"], "ms", timed=True)
        report.figure(f"{name}: over a copy", medians["kernel"] / medians["copy"], timed=True)
        report.figure(f"{name}: plain PyTorch over it", plain / medians["kernel"], timed=True)


def inputs(report: "Report") -> None:
    """A forward and a backward pass of linear layers whose inputs are rounded, over float and over rounded weights."""
    import torch
    from gpu_kernels import Timer, device_of
    from timing import interleaved
    from torch import nn

    from moq_hf import quantize_model
    from moq_hf.grid import InputScale
    from moq_hf.model.convert import quant_layers

    device = device_of(report)
    hidden, layers, shape = (32, 2, (2, 4)) if report.small else (768, 24, (32, 128))
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers))).to(device)
    x = torch.randn(*shape, hidden, device=device)
    arms: dict[str, Any] = {"float": plain}
    scales: list[InputScale | None] = [None, "static", "per_token", "per_tensor", "per_block"]
    for scale in scales:
        config: dict[str, Any] = {"quantize_bits": {"start_bits": 8, "target_bits": 8}, "quantize_heads": True}
        if scale:
            config["activation_quantization"] = {"enabled": True, "scale": scale}
        arms[scale or "weights alone"] = quantize_model(copy.deepcopy(plain), config)

    def passed(model: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()

    for model in arms.values():
        passed(model.train())
        # With the first step a static scale has its range.
        for layer in quant_layers(model).values():
            if layer.moq.inputs is not None:
                layer.moq.inputs.step(layer.moq.inputs.observed)
    timer = Timer(device)
    runs = {name: lambda model=model: passed(model) for name, model in arms.items()}
    medians = interleaved(runs, 2 if report.small else 30, timer.host)
    report.detail("seconds of a pass", medians)
    for name in list(medians)[1:]:
        report.figure(f"8 bits, {name}: over float", medians[name] / medians["float"], timed=True)
    for name in list(medians)[2:]:
        goal = 1.1 if name in ("static", "per_token") else None
        over = medians[name] / medians["weights alone"]
        report.figure(f"inputs {name}: over weights alone", over, at_most=goal, timed=True)
