"""The command line: `moq-hf COMMAND`, or `python -m moq_hf.cli COMMAND`."""

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from .config import LARGEST
from .errors import MoQError
from .export.bench import MAX_LOSS, benchmark, draw, write_json
from .export.bench_worker import CLOCKS
from .export.data import SENTENCES, read_data
from .export.floats import export_floats
from .export.gguf import export_gguf
from .export.onnx import EXTERNAL_DATA_ABOVE, export_onnx
from .export.onnx_integers import TARGETS
from .export.onnx_layers import FLAVORS
from .export.proof import TOLERANCE
from .grid import InputScale
from .packed.pack import pack_checkpoint
from .packed.served import served_by, table
from .packed.verify import verify_quantized
from .plan import plan
from .report.figures import draw_plan
from .report.page import write_report

# What a packed checkpoint is exported to, by the name of the format.
EXPORTS: dict[str, Callable[..., Any]] = {"onnx": export_onnx, "gguf": export_gguf, "float": export_floats}
# The argument of these functions that an option is for; an option is for the formats whose function has it.
_ARGUMENTS = {
    "base": "base",
    "flavors": "flavors",
    "activation_bits": "activation_bits",
    "activation_scale": "activation_scale",
    "cpu": "cpu",
    "validation_file": "data",
    "task_name": "data",
    "max_seq_length": "max_length",
    "tolerance": "tolerance",
    "external_data_above": "external_data_above",
}
_TASK_WITHOUT_FILE = "--task_name goes with --validation_file"


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: those of the process); give the exit status: 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="moq-hf", description="Mixture-of-Quantization for Hugging Face Trainer.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_plan, add_report, add_pack, add_inspect, add_export, add_bench):
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
        description="Show when each drop comes for the least and the most sensitive block, and what will not be "
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


def add_pack(subparsers: Any) -> None:
    """`moq-hf pack CHECKPOINT OUT`: the packed model of a run's checkpoint."""
    parser = subparsers.add_parser(
        "pack",
        help="the packed model of a run's checkpoint, in little memory",
        description="Write the packed model that MoQTrainer.save_model would have written at a checkpoint's step. The "
        "weights are read one at a time: from safetensors, from the shards of FSDP2, or from DeepSpeed's files.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder checkpoint-N of a run with moq_hf")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--model", metavar="MODEL", help="folder or Hub id with config and tokenizer, if the checkpoint has none"
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="the largest size of a weight file; default: 5GB"
    )
    parser.set_defaults(run=_pack)


def _pack(arguments: argparse.Namespace) -> None:
    print(
        pack_checkpoint(
            arguments.checkpoint, arguments.out, model=arguments.model, max_shard_size=arguments.max_shard_size
        )
    )


def add_inspect(subparsers: Any) -> None:
    """`moq-hf inspect DIRECTORY`: verify a packed checkpoint, print its layers and who can serve it."""
    parser = subparsers.add_parser(
        "inspect",
        help="verify a packed checkpoint, print its layers and who can serve it",
        description="Verify a packed checkpoint, and say which servers take it.",
    )
    parser.add_argument("directory", help="what save_quantized, MoQTrainer.save_model or a run's end wrote")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    print(verify_quantized(arguments.directory).table())
    print("\n" + table(served_by(arguments.directory)))


def add_export(subparsers: Any) -> None:
    """`moq-hf export DIR --to FORMAT OUT`: a packed checkpoint for other programs, proven to be the same."""
    parser = subparsers.add_parser(
        "export",
        help="write a packed checkpoint as ONNX models, as a GGUF file or as floats, and prove it",
        description="onnx: models with integer weights in the folder OUT, whose answers are compared with the "
        "checkpoint's; if weight-only differs by more than the tolerance, nothing is written and the exit status is 2. "
        "gguf: the checkpoint's integers in the file OUT, for llama.cpp. float: an ordinary folder OUT of floats on "
        "their grid.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("directory", metavar="DIR", help="a packed checkpoint; for onnx with its tokenizer")
    parser.add_argument("--to", required=True, choices=EXPORTS, help="the format")
    parser.add_argument("out", metavar="OUT", help="the folder to make; for gguf the file")
    gguf = parser.add_argument_group("gguf")
    gguf.add_argument(
        "--base", metavar="FILE.gguf", help="what llama.cpp's converter made of the checkpoint as floats (--to float)"
    )
    _add_onnx(parser.add_argument_group("onnx"))
    parser.set_defaults(run=lambda args: _export(parser, args))


def add_bench(subparsers: Any) -> None:
    """`moq-hf bench DIR`: how fast a packed checkpoint is on this CPU, and which file to deploy."""
    parser = subparsers.add_parser(
        "bench",
        help="latency, throughput, memory and accuracy of a packed checkpoint on this CPU, and which file to deploy",
        description="Measure a packed checkpoint on the CPU, in turn: PyTorch (float, bf16, packed), ONNX Runtime "
        "(float, its own quantize_dynamic, weight-only, int8) and, if it is installed, OpenVINO (float, weight-only, "
        "dequantize-linear, int8, qdq). Then say which file to deploy here.",
    )
    parser.add_argument("directory", metavar="DIR", help="a packed checkpoint with its tokenizer")
    parser.add_argument("--batch", type=_positive, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    parser.add_argument(
        "--sequence", type=_positive, nargs="+", default=[16, 64, 128], metavar="N", help="default: 16 64 128"
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="of each engine; default: PyTorch's number")
    parser.add_argument("--activation_bits", type=_positive, metavar="B", help="as for export")
    parser.add_argument("--repeats", type=_positive, default=20, metavar="N", help="rounds per shape; default: 20")
    _add_data(parser, "measure the accuracy on these rows")
    parser.add_argument(
        "--max_loss",
        type=_not_negative,
        default=MAX_LOSS,
        metavar="L",
        help=f"what a recommended file may lose of each metric; default: {MAX_LOSS:g}",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu is the process's own time, for one thread on a busy machine; default: wall",
    )
    parser.add_argument("--json", metavar="FILE.json", help="write the figures too")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the speeds too")
    parser.set_defaults(run=lambda args: _bench(parser, args))


def _add_onnx(onnx: Any) -> None:
    """The options of the export to ONNX."""
    onnx.add_argument(
        "--flavors",
        # The old spelling.
        "--flavours",
        nargs="+",
        choices=FLAVORS,
        metavar="FLAVOR",
        help=f"some of {', '.join(FLAVORS)}; default: weight-only int8",
    )
    onnx.add_argument(
        "--activation_bits",
        type=_positive,
        metavar="B",
        help="of int8: 2 to 8; default: as trained, or 8; 7 is faster on CPUs without VNNI",
    )
    onnx.add_argument(
        "--activation_scale",
        choices=get_args(InputScale),
        metavar="SCALE",
        help=f"of int8: {', '.join(get_args(InputScale))}; default: as trained, or per_tensor",
    )
    onnx.add_argument(
        "--cpu",
        choices=("auto", *TARGETS),
        metavar="CPU",
        help=f"what int8 is made for: {', '.join(TARGETS)}, or auto, which is what suits this machine",
    )
    _add_data(onnx, "compare on these rows")
    onnx.add_argument(
        "--tolerance",
        type=_positive_number,
        metavar="T",
        help=f"largest difference of weight-only's outputs; default: {TOLERANCE:g}",
    )
    onnx.add_argument(
        "--external_data_above",
        type=_positive,
        metavar="BYTES",
        help=f"put larger weights into a file beside the model; default: {EXTERNAL_DATA_ABOVE}",
    )


def _add_data(parser: Any, does: str) -> None:
    """The options that name evaluation data."""
    parser.add_argument(
        "--validation_file",
        metavar="FILE",
        help=f'{does}: JSON lines with one or two texts and "label"; default: sentences of our own',
    )
    parser.add_argument(
        "--task_name",
        metavar="TASK",
        help="GLUE's name of the task, for the metric; default: accuracy, or correlations for scores",
    )
    parser.add_argument("--max_seq_length", type=_positive, metavar="N", help="default: 128")


def _export(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    export, given = EXPORTS[args.to], {name: value for name, value in vars(args).items() if name in _ARGUMENTS}
    takes = inspect.signature(export).parameters
    foreign = [f"--{name}" for name in given if _ARGUMENTS[name] not in takes]
    if foreign:
        parser.error(f"--to {args.to} goes without {', '.join(foreign)}")
    if "task_name" in given and "validation_file" not in given:
        parser.error(_TASK_WITHOUT_FILE)
    if "base" in takes and "base" not in given:
        parser.error(f"--to {args.to} needs --base, what llama.cpp's converter made of the checkpoint as floats")
    task = given.pop("task_name", None)
    if "validation_file" in given:
        given["validation_file"] = read_data(given["validation_file"], task)
    arguments = {_ARGUMENTS[name]: value for name, value in given.items()}
    print(export(args.directory, args.out, **arguments).table())


def _bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.task_name is not None and args.validation_file is None:
        parser.error(_TASK_WITHOUT_FILE)
    result = benchmark(
        args.directory,
        batches=args.batch,
        sequences=args.sequence,
        threads=args.threads,
        activation_bits=args.activation_bits,
        repeats=args.repeats,
        data=SENTENCES if args.validation_file is None else read_data(args.validation_file, args.task_name),
        max_length=args.max_seq_length or 128,
        max_loss=args.max_loss,
        clock=args.clock,
    )
    print(result.table())
    if args.json is not None:
        write_json(result, args.json)
    if args.plot is not None:
        draw(result, args.plot)


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
        length = args.epochs * math.ceil(batches / args.gradient_accumulation)
        # What is too long for a plan; it may be infinite.
        steps = math.ceil(min(length, 2.0 * LARGEST))
    planned = plan(args.moq_config, steps)
    if args.plot is not None:
        draw_plan(planned, args.plot)
    print(json.dumps(planned.to_dict(), indent=2) if args.json else planned)


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= LARGEST:
        raise ValueError
    return value


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


# What argparse calls a wrong value.
_positive.__name__ = "whole number from 1 and below 2**63"
_positive_number.__name__ = "number above 0"
_not_negative.__name__ = "number from 0"

if __name__ == "__main__":
    sys.exit(main())
