"""The command line: `moq-hf COMMAND`, or `python -m moq_hf COMMAND`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from .config_fields import Positive, Size
from .errors import MoQError, show, write_json
from .version import __version__


def _number(kind: Any, wanted: str) -> Callable[[str], Any]:
    """Make a parser for options that are numbers of a kind; `wanted` describes the kind in errors."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError:
            error = f"must be {wanted}, got {show(text)}"
            raise argparse.ArgumentTypeError(error) from None

    return read


_positive = _number(Positive, "a whole number from 1 and below 2**63")
_size = _number(Size, "a number above 0")


def _keyword(text: str) -> tuple[str, Any]:
    """A keyword of `MoQConfig` from `KEY=VALUE`, where the value is JSON or else a string.

    Raises:
        ArgumentTypeError: There is no `=` in it.
    """
    name, mark, value = text.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(
            f"must be KEY=VALUE, such as start_bits=4, got {show(text)}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class _Parser(argparse.ArgumentParser):
    """Ends with an error in one line, without argparse's list of all options above it."""

    def error(self, message: str) -> NoReturn:
        """End the program with one line on stderr."""
        self.exit(2, f"error: {message}; {self.prog} --help shows the options\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the arguments of the process.

    Returns:
        The exit status: 0, or 2 for wrong input.
    """
    parser = _Parser(
        prog="moq-hf",
        description="Quantization-aware fine-tuning of Hugging Face models: before, beside and after a run.",
    )
    parser.add_argument("--version", action="version", version=f"moq_hf {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, (add, run, does, description) in _COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=does,
            description=description,
            argument_default=argparse.SUPPRESS,
        )
        add(command)
        command.set_defaults(run=run)
    parsed, rest = parser.parse_known_args(argv)
    options = vars(parsed)
    # argparse of Python 3.11 does not find an optional argument after an option.
    is_export = options.get("run") is _export and "out" not in options
    if is_export and len(rest) == 1 and not rest[0].startswith("-"):
        options["out"] = rest.pop()
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not options:
        parser.print_help(sys.stderr)
        return 2
    try:
        options.pop("run")(**options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough. Python will flush once more
        # as it exits, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MoQError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max_steps", type=_positive, required=True, help="optimizer steps of the run"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="a preset's name or a JSON file"
    )
    _add_steps(parser)
    parser.add_argument(
        "--model",
        help="folder or Hub id of the model, to show what is quantized, the size of the result, and the memory needed",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=_keyword,
        default=[],
        metavar="KEY=VALUE",
        dest="keywords",
        help="keywords of MoQCallback, such as start_bits=4 offset=0.9",
    )


def _plan(
    config: str,
    max_steps: int,
    model: str | None = None,
    keywords: Sequence[tuple[str, Any]] = (),
) -> None:
    from .config import MoQConfig
    from .forecast import plan

    loaded = MoQConfig(config, **dict(keywords))
    if loaded.grid is not None:
        raise MoQError(
            f'{config}: grid "found" takes bits and groups from the weights of a model: moq-hf inspect MODEL shows them'
        )
    planned = plan(loaded, max_steps)
    print(planned)
    if model is not None:
        from .memory import plan_of_model

        print(f"\n{plan_of_model(model, planned.config, max_steps)}")


def _add_migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="DS.JSON", help="a DeepSpeed config, or its section alone"
    )
    _add_steps(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="the file to write; default: print it"
    )


def _migrate(config: str, max_steps: int, out: str | None = None) -> None:
    from .config import read_document
    from .migrate import migrate

    if not os.path.exists(config):
        raise MoQError(f"{config} does not exist: give the file of a DeepSpeed config")
    migrated = migrate(read_document(config), max_steps)
    if out is None:
        print(json.dumps(migrated, indent=2))
        return
    if os.path.exists(out):
        raise MoQError(f"{out} exists already: give a new name")
    write_json(Path(out), migrated)
    print(f"{out}: moq-hf plan {out} --max_steps {max_steps} shows it")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="the run's output_dir, or one of its checkpoints",
    )
    parser.add_argument("--out", help="folder to write to; default: the run's")


def _report(directory: str, out: str | None = None) -> None:
    from .report import write_report

    print(write_report(directory, out))


def _layout(text: str) -> str:
    from .formats.table import LAYOUTS

    if text not in LAYOUTS:
        error = f"must be one of {', '.join(LAYOUTS)}, got {show(text)}"
        raise argparse.ArgumentTypeError(error)
    return text


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder checkpoint-N of a run with moq_hf",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--layout",
        type=_layout,
        help="how the files hold the weights: packed, unpacked, floats, gemma (transformers' own 2, 4 and 8 bits, "
        "which stay packed in memory, only for transformers >= 5.23) or mxfp4; default: the first that loads",
    )


def _pack(**options: Any) -> None:
    from .packed.pack import pack_checkpoint

    print(pack_checkpoint(**options))


def _add_packed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a folder that save_quantized, MoQTrainer.save_model or the end of a run wrote",
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a packed checkpoint, or an ordinary folder of floats or a GGUF file, whose grids are found",
    )


def _inspect(directory: str) -> None:
    from .packed.found_grids import found_grids, found_table, has_floats
    from .packed.state import served_by
    from .packed.verify import verify_quantized
    from .serving import served_table
    from .text import table

    folder = Path(directory)
    if has_floats(folder):
        print(found_table(found_grids(folder)))
        return
    found = verify_quantized(directory)
    print("\n".join([found.verdict(), *found.totals()]))
    print(f"\n{table(found.rows(), left=(0, 2))}")
    print("\n" + served_table(served_by(directory)))


def _verify(directory: str) -> None:
    from .packed.load_check import has_failed
    from .packed.verify import verify_quantized

    found = verify_quantized(directory)
    if has_failed(found.proof):
        raise MoQError(f"{directory}: {found.proof}")
    print("\n".join([found.verdict(), *found.totals()]))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a packed checkpoint; for onnx with its tokenizer",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("onnx", "gguf", "mlx", "float"),
        help="the format",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        help="the folder to make; for gguf the file; default: beside DIR, as DIR-onnx, DIR-mlx, DIR-float or DIR.gguf",
    )
    gguf = parser.add_argument_group("gguf")
    gguf.add_argument(
        "--base",
        help="the file that llama.cpp's converter made of the checkpoint as floats (--to float)",
    )
    gguf.add_argument(
        "--converter",
        metavar="PATH",
        help="instead: llama.cpp's convert_hf_to_gguf.py, or its folder, to make the base with",
    )
    parser.add_argument_group("mlx").add_argument(
        "--half",
        action="store_true",
        help="scales and biases in half precision: a smaller folder, whose weights may differ",
    )
    onnx = parser.add_argument_group("onnx")
    add = onnx.add_argument
    add(
        "--flavors",
        # The old spelling.
        "--flavours",
        nargs="+",
        choices=("float", "weight-only", "int8", "nbits", "qdq"),
        help="default: weight-only int8; with --names hub all that have a name there",
    )
    add(
        "--names",
        choices=("own", "hub"),
        help="hub: a folder that transformers.js, Sentence Transformers, text-embeddings-inference and fastembed load",
    )
    add(
        "--activation_bits",
        type=_positive,
        help="of int8: 2 to 8; default: as trained, or 8; 7 is faster on CPUs without VNNI",
    )
    add(
        "--activation_scale",
        choices=("per_token", "per_tensor", "static"),
        help="of int8; default: as trained, or per_tensor",
    )
    add(
        "--cpu",
        choices=("auto", "vnni", "avx2"),
        help="the CPUs that int8 is made for; default: auto, those like this machine's",
    )
    add(
        "--tolerance",
        type=_size,
        help="largest difference of weight-only's outputs; default: 0.0001",
    )
    _add_data(onnx, "compare on these rows")


def _export(directory: str, to: str, out: str | None = None, **options: Any) -> None:
    own = {"gguf": {"base", "converter"}, "mlx": {"half"}, "float": set()}
    taken = {"onnx": options.keys() - set().union(*own.values()), **own}
    foreign = options.keys() - taken[to]
    if foreign:
        raise MoQError(f"--to {to} takes no --{', --'.join(sorted(foreign))}")
    out = out or _beside(directory, "." if to == "gguf" else "-", to)
    if to == "gguf":
        from .export.gguf import NoBaseError, export_gguf, no_base

        try:
            print(export_gguf(directory, out, **options).table())
        except NoBaseError:
            raise MoQError(no_base("--converter", "--base")) from None
    elif to == "mlx":
        from .export.mlx import export_mlx

        print(export_mlx(directory, out, **options).table())
    elif to == "float":
        from .export.floats import export_floats

        print(
            f"{export_floats(directory, out)}: plain floats with the quantized values"
        )
    else:
        from .export.onnx import export_onnx

        _read_data(options)
        print(export_onnx(directory, out, **options).table())


def _beside(directory: str, *ending: str) -> str:
    """A path beside a folder; inside it, the file would outlive the next delivery."""
    folder = Path(directory)
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return str(folder.with_name("".join([folder.name, *ending])))


def _add_data(parser: Any, does: str) -> None:
    """Add the options that name evaluation data."""
    parser.add_argument(
        "--validation_file",
        help=f'{does}: JSON lines with one or two texts and "label"; default: built-in sentences',
    )
    parser.add_argument(
        "--task_name",
        help="GLUE's name of the task, for the metric; default: accuracy, or correlations for scores",
    )
    parser.add_argument("--max_seq_length", type=_positive, help="default: 128")


def _read_data(options: dict[str, Any]) -> None:
    """Replace the options that name evaluation data with the data.

    Raises:
        MoQError: There is no such data, or a task without a file.
    """
    from .export.compare import read_data

    file, task = options.pop("validation_file", None), options.pop("task_name", None)
    if "max_seq_length" in options:
        options["max_length"] = options.pop("max_seq_length")
    if file is not None:
        options["data"] = read_data(file, task)
    elif task is not None:
        raise MoQError("--task_name goes with --validation_file")


# Each command with the functions that add its arguments and run it, its line in the list of commands, and its help.
_COMMANDS: dict[str, tuple[Callable[[Any], None], Callable[..., None], str, str]] = {
    "plan": (
        _add_plan,
        _plan,
        "show which precision a run will have when, and how much memory it takes",
        "Show when each drop comes for the least and the most sensitive block, and what will not be reached.",
    ),
    "migrate": (
        _add_migrate,
        _migrate,
        "turn a DeepSpeed file into a moq_hf config that fits a run",
        "Write a config with the settings in the section quantize_training of a DeepSpeed config, and every default "
        "that DeepSpeed assumes, changed so that a run of --max_steps reaches its target.",
    ),
    "report": (
        _add_report,
        _report,
        "show a finished run on one HTML page",
        "Write moq_report.html from the folder of a finished run, beside a float run in its folder float.",
    ),
    "pack": (
        _add_pack,
        _pack,
        "pack the model of a run's checkpoint, in little memory",
        "Write the packed model that MoQTrainer.save_model would have written at a checkpoint's step. The weights are "
        "read one at a time: from safetensors, from the shards of FSDP2, or from DeepSpeed's files.",
    ),
    "verify": (
        _add_packed,
        _verify,
        "check that a packed checkpoint is whole, and say whether it was proven",
        "Compare every tensor with the digest that was taken when it was saved, and every weight with the values that "
        "its bits and scale allow. The exit status is 2 if something is damaged, or the model does not compute what "
        "was evaluated.",
    ),
    "inspect": (
        _add_inspect,
        _inspect,
        "verify a packed checkpoint, print its layers and who can serve it; or find the grids of float weights",
        "Verify a packed checkpoint, print its layers, and say which servers take it. For a folder of floats or a "
        "GGUF file, say on which grid each weight matrix lies, and how much of it.",
    ),
    "export": (
        _add_export,
        _export,
        "write a packed checkpoint as ONNX models, a GGUF file, a folder for MLX or floats, and prove it",
        "onnx: models with integer weights in the folder OUT, whose answers are compared with the checkpoint's; if "
        "weight-only differs by more than the tolerance, nothing is written and the exit status is 2. gguf: the "
        "checkpoint's integers in the file OUT, for llama.cpp. mlx: the same in the folder OUT, for mlx-lm. float: "
        "an ordinary folder OUT of floats with the quantized values.",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
