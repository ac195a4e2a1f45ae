"""The command line: `moq-hf COMMAND`, or `python -m moq_hf.cli COMMAND`."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from .checkpoint import verify_quantized
from .config import MoQError
from .report import draw_plan, write_report
from .schedule import plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: those of the process); give the exit status: 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="moq-hf", description="Mixture-of-Quantization for Hugging Face Trainer.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_plan, add_report, add_inspect):
        add(subparsers)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (MoQError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add_plan(subparsers: Any) -> None:
    """`moq-hf plan`: the schedule of a run, ahead of time."""
    parser = subparsers.add_parser(
        "plan",
        help="which precision a run will have when",
        description="Tell when each drop comes for the least and the most sensitive block, and what will not be "
        "reached. The length of the run is --max_steps, or follows from --num_examples, --batch_size and --epochs.",
    )
    parser.add_argument("--moq_config", required=True, metavar="FILE", help="the MoQ configuration, JSON")
    parser.add_argument("--max_steps", type=_positive, metavar="S", help="optimizer steps of the run")
    parser.add_argument("--num_examples", type=_positive, metavar="N", help="size of the training set")
    parser.add_argument("--batch_size", type=_positive, metavar="B", help="examples per process and forward pass")
    parser.add_argument("--epochs", type=_positive_number, metavar="E", help="passes over the training set")
    parser.add_argument("--gradient_accumulation", type=_positive, default=1, metavar="G", help="default: 1")
    parser.add_argument("--num_processes", type=_positive, default=1, metavar="P", help="default: 1")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of the table")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the plan too")
    parser.set_defaults(run=lambda args: _run_plan(parser, args))


def add_report(subparsers: Any) -> None:
    """`moq-hf report`: what a finished run did, as a page."""
    parser = subparsers.add_parser(
        "report",
        help="what a finished run did, as one HTML page and PNG figures",
        description="Write moq_report.html and its figures from the folder of a finished run.",
    )
    parser.add_argument("directory", metavar="DIR", help="the run's output_dir, or one of its checkpoints")
    parser.add_argument(
        "--float", metavar="DIR", help="a float run to compare with; default: DIR/float, if it is there"
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write to; default: the run's")
    parser.set_defaults(run=lambda args: print(write_report(args.directory, args.out, args.float)))


def add_inspect(subparsers: Any) -> None:
    """`moq-hf inspect DIRECTORY`: verify a packed checkpoint and print its layers."""
    parser = subparsers.add_parser(
        "inspect", help="verify a packed checkpoint and print its layers", description="Verify a packed checkpoint."
    )
    parser.add_argument("directory", help="what save_quantized, MoQTrainer.save_model or a run's end wrote")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    print(verify_quantized(arguments.directory).table())


def _run_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    sizes = {name: getattr(args, name) for name in ("num_examples", "batch_size", "epochs")}
    given = [f"--{name}" for name, value in sizes.items() if value is not None]
    if args.max_steps is not None and given:
        parser.error(f"--max_steps is the length of the run: it goes without {', '.join(given)}")
    if args.max_steps is None and len(given) < len(sizes):
        lacking = [f"--{name}" for name, value in sizes.items() if value is None]
        parser.error(f"the length of the run is unknown: give {', '.join(lacking)}, or --max_steps")
    steps = args.max_steps
    if steps is None:
        # As the Trainer counts: an epoch's last batch and its last accumulation may be short.
        batches = math.ceil(args.num_examples / (args.batch_size * args.num_processes))
        steps = math.ceil(args.epochs * math.ceil(batches / args.gradient_accumulation))
    planned = plan(args.moq_config, steps)
    if args.plot is not None:
        draw_plan(planned, args.plot)
    print(json.dumps(planned.to_dict(), indent=2) if args.json else planned)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


# What argparse calls a wrong value.
_positive.__name__ = "whole number from 1"
_positive_number.__name__ = "number above 0"

if __name__ == "__main__":
    sys.exit(main())
