"""The command line: `moq-hf`, also `python -m moq_hf.cli`. One function per subcommand."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .checkpoint import verify_quantized
from .config import MoQError


def add_inspect(subparsers: Any) -> None:
    """`moq-hf inspect DIRECTORY`: verify a packed checkpoint and print its layers."""
    parser = subparsers.add_parser(
        "inspect", help="verify a packed checkpoint and print its layers", description="Verify a packed checkpoint."
    )
    parser.add_argument("directory", help="what save_quantized, MoQTrainer.save_model or a run's end wrote")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    print(verify_quantized(arguments.directory).table())


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: those of the process); give the exit status: 0, or 2 for a fault."""
    parser = argparse.ArgumentParser(prog="moq-hf", description="Mixture-of-Quantization for Hugging Face models.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_inspect(subparsers)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except MoQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
