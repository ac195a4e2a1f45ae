"""`export_gguf`: writes a packed checkpoint's integers into a GGUF file, which llama.cpp runs.

Everything but the quantized weights comes from a base: the GGUF file that llama.cpp's
converter made from the same weights as floats. So vocabulary, hyperparameters and norms
are as that converter writes them. The base also shows the order of a tensor's rows: for
some architectures llama.cpp wants the rows of q and k in another order than transformers.

A quantized weight is stored in blocks: 32 weights of a row that share a scale in float16.

| type | bits of the grid | codes | value | bytes of a block |
| --- | --- | --- | --- | --- |
| Q4_0 | 1 to 4, symmetric | -8 to 7 | d * code | 18 |
| Q4_1 | 2 to 4, asymmetric | 0 to 15 | d * code + m | 20 |
| Q8_0 | 5 to 8, symmetric | -128 to 127 | d * code | 34 |
| MXFP4 | `mxfp4` | those of E2M1 | 2^e * code | 17 |
| NVFP4 | `nvfp4` | those of E2M1, 16 with a scale in E4M3 | d * code | 36, of 64 weights |

The scale of a whole tensor in NVFP4 is a separate tensor, whose name ends with `.scale`.

A scale that more than 32 weights share is repeated. ggml's own quantizer never produces
the code -128, but its kernels handle it: they multiply the code's magnitude as an
unsigned byte, or the code itself (ggml of llama.cpp 0.3.36).
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import MoQError, explained, listed, require
from ..grid import FP4
from ..model.sizes import percent
from ..packed.differences import differences
from ..packed.files import new_path, staged
from ..packed.reading import read_parts
from ..packed.state import check_taken
from ..packed.verify import recorded
from ..quantizer import Quantized, dequantize, per_weight
from ..servers import GGUF
from ..text import progress
from ..weight_spec import WeightSpec
from .floats import write_floats

_FLOATS = ("F32", "F16", "BF16", "F64")
_COPIED = (*_FLOATS, "I8", "I16", "I32", "I64")
# llama.cpp does not take these tables in blocks.
_NEVER_IN_BLOCKS = ("position_embd.weight", "token_types.weight")
_BY_WORD = ("token_embd.weight", "output.weight")
# One tensor holds all experts of a block.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Keys of a file that are not copied: gguf writes them itself, or they follow from the
# types of the tensors.
_NOT_COPIED = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
)
# The base may have floats rounded to bfloat16, by up to 2^-8 of their values.
_RELATIVE = 2.0**-7
# It may have floats rounded to float16, whose smallest number this is.
_ABSOLUTE = 2.0**-24
# The name of llama.cpp's converter, and the repository that has it at its top.
_CONVERTER = "convert_hf_to_gguf.py"
_REPOSITORY = "https://github.com/ggml-org/llama.cpp"
# Weights of a row that share a scale.
_SIZE = 32
# Twice the numbers of E2M1, in the order of their codes.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)
# The dtypes of scales.
_FP4_SCALES = {"MXFP4": torch.float8_e8m0fnu, "NVFP4": torch.float8_e4m3fn}


@dataclass(frozen=True)
class GgufExport:
    """A GGUF file that `export_gguf` wrote.

    Attributes:
        path: The file.
        bytes: Size of the file.
        base_bytes: Size of the base.
        types: The number of tensors of each type.
        layers: The type of each quantized layer; the base's type if llama.cpp takes no
            blocks there.
        weight_error: The largest error of a weight from rounding scales to float16, in
            quantization steps.
    """

    path: Path
    bytes: int
    base_bytes: int
    types: Mapping[str, int]
    layers: Mapping[str, str]
    weight_error: float

    def table(self) -> str:
        """Sizes, types and errors, for a terminal."""
        counts = ", ".join(
            f"{count} {kind}" for kind, count in sorted(self.types.items())
        )
        lines = [
            f"{self.path}: {self.bytes:,} bytes, {percent(self.bytes / self.base_bytes)} of the base's "
            f"{self.base_bytes:,}",
            f"tensors: {counts}",
            "read back: every code is that of the checkpoint",
            f"scales in float16: errors of weights up to {self.weight_error:.2g} steps",
        ]
        floats = [name for name, kind in self.layers.items() if kind in _FLOATS]
        if floats:
            lines.append(
                f"left as floats, as llama.cpp needs them: {', '.join(floats)}"
            )
        return "\n".join(lines)


def export_gguf(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    converter: str | os.PathLike[str] | None = None,
) -> GgufExport:
    """Write a packed checkpoint as a GGUF file with the checkpoint's own integers.

    Symmetric layers of up to 4 bits become Q4_0, of 5 to 8 bits Q8_0; asymmetric ones
    of up to 4 bits Q4_1. Scales become float16. Layers in the formats `mxfp4` and
    `nvfp4` become MXFP4 and NVFP4, with their own scales. The file is read back and compared
    before it appears.

    Args:
        directory: What `save_quantized` wrote.
        out: The file to make.
        base: The file that llama.cpp's converter made from the same checkpoint as
            floats, in float32, float16 or bfloat16.
        converter: Instead of `base`, llama.cpp's `convert_hf_to_gguf.py` or its folder,
            to make a base that is deleted afterwards.

    Returns:
        Sizes, types, and the error from scales in float16.

    Raises:
        MoQError: The checkpoint is damaged, a grid does not fit any block, the base is
            another model's or quantized, a scale does not fit float16, `out` exists,
            the converter fails, or a library of the extra gguf is not installed.
        NoBaseError: Neither `base` nor `converter` is given, or both are.
    """
    folder = Path(directory)
    new_path(out)
    check_taken(folder, GGUF)
    require("gguf", "gguf")
    if (base is None) == (converter is None):
        raise NoBaseError(no_base("converter", "base"))
    script = None if converter is None else _script_in(Path(converter))
    layers, weights = _codes_in(folder)
    with tempfile.TemporaryDirectory(prefix="moq-hf-") as place:
        if script is not None:
            base = _convert(folder, Path(place), script)
        return _export(folder, Path(out), Path(cast(str, base)), layers, weights)


class NoBaseError(MoQError):
    """Neither llama.cpp's converter nor the file that it made was given, or both were."""


def no_base(converter: str, base: str) -> str:
    """The text of `NoBaseError`, with the names of the two arguments as the caller spells them."""
    return (
        f"GGUF needs one of {converter} and {base}: the path of llama.cpp's {_CONVERTER}, which is in a clone of "
        f"{_REPOSITORY}, or the file that it made from the checkpoint as floats"
    )


def _script_in(converter: Path) -> Path:
    """Find llama.cpp's converter, given as the file or its folder.

    Raises:
        MoQError: It is not there, or sentencepiece is not installed, without which most
            models' converters end in a traceback.
    """
    script = converter / _CONVERTER if converter.is_dir() else converter
    if not script.is_file():
        raise MoQError(
            f"{script} is not there: {_CONVERTER} is in a clone of {_REPOSITORY}"
        )
    require("gguf", "sentencepiece")
    return script


def _convert(directory: Path, place: Path, script: Path) -> Path:
    """Make the base in `place`, with llama.cpp's converter in a separate process.

    Raises:
        MoQError: It fails; the text has the end of its output.
    """
    floats = write_floats(directory, place / "floats")
    base = place / "base.gguf"
    arguments = [floats, "--outtype", "f16", "--outfile", base]
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not base.is_file():
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise MoQError(f"{script} failed on the checkpoint as floats:\n{said}")
    return base


def _codes_in(
    directory: Path,
) -> tuple[dict[str, WeightSpec], dict[str, Quantized]]:
    """Verify a packed checkpoint, and return its layers and their codes by their names in the files.

    Raises:
        MoQError: It is damaged, or a layer has no codes.
    """
    # The converter reads the files too.
    names = recorded(directory).state["names"] or {}
    layers: dict[str, WeightSpec] = {}
    weights: dict[str, Quantized] = {}
    for part in progress(read_parts(directory), "GGUF"):
        if part.layer is None or part.layer.stored == "float":
            continue
        name = names.get(part.name, part.name)
        layers[name] = part.layer
        if part.codes is not None:
            codes = part.codes.codes.to(torch.int8)
            weights[name] = part.codes._replace(codes=codes)
    if not layers:
        raise MoQError(
            f"{directory}: no layer is quantized yet, so there are no integers to write"
        )
    lost = sorted(layers.keys() - weights.keys())
    if lost:
        raise MoQError(
            f"{directory}: floats in half precision have lost their codes: {listed(lost)}; leave them out"
        )
    return layers, weights


def _export(
    directory: Path,
    out: Path,
    source: Path,
    layers: Mapping[str, WeightSpec],
    weights: Mapping[str, Quantized],
) -> GgufExport:
    read = _Base(source)
    places = read.places_of(list(layers))
    # Each tensor of the file with its blocks: those of a layer, or of all experts in turn.
    parts: dict[str, list[Blocks]] = {}
    for name, layer in layers.items():
        blocks = read.fitted(places[name], weights[name], layer, name)
        if not places[name].endswith(_NEVER_IN_BLOCKS):
            parts.setdefault(places[name], []).append(blocks)
    if not parts:
        raise MoQError(
            f"{directory}: llama.cpp keeps {listed(list(layers))} in float, and no other layer is quantized"
        )
    read.replace(parts)
    with staged(out.resolve()) as staging:
        read.write(staging)
        read.prove(staging)
    kinds = {name: read.kind(name) for name in read.tensors}
    errors = [blocks.error for tensor in parts.values() for blocks in tensor]
    return GgufExport(
        path=out,
        bytes=out.stat().st_size,
        base_bytes=source.stat().st_size,
        types=dict(Counter(kinds.values())),
        layers={name: kinds[place] for name, place in places.items()},
        weight_error=max(errors, default=0.0),
    )


class Blocks(NamedTuple):
    """A weight in blocks.

    Attributes:
        kind: "Q4_0", "Q4_1", "Q8_0", "MXFP4" or "NVFP4".
        raw: The bytes of the blocks, `[rows, bytes]`.
        error: The largest error of a weight from rounding scales to float16, in
            quantization steps.
    """

    kind: str
    raw: NDArray[np.uint8]
    error: float


def blocks_of(stored: Quantized, layer: WeightSpec, where: str) -> Blocks:
    """Put a layer's integers in blocks.

    Args:
        stored: The integers, as from `stored_weights`.
        layer: The layer they belong to.
        where: Names the layer in an error.

    Raises:
        MoQError: A scale, or the value of code 0, is too large or too small for
            float16.

    >>> import torch
    >>> layer = WeightSpec("linear", (1, 32), 4, stored="packed")
    >>> stored = Quantized(torch.ones(1, 32, dtype=torch.int32), torch.tensor([[0.5]]), None)
    >>> blocks_of(stored, layer, "example").error
    0.0
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as floats_of

    rows, columns = stored.codes.shape
    fp4 = FP4.get(layer.format)
    size = (fp4 and fp4.group_size) or _SIZE
    blocks = columns // size

    def per_block(values: Tensor) -> NDArray[np.float32]:
        return per_weight(values.float(), (rows, blocks))[..., None].numpy()

    codes = stored.codes.numpy().astype(np.int16).reshape(rows, blocks, size)
    exact = dequantize(*stored).numpy().reshape(codes.shape)
    scale = per_block(stored.scale)
    # The scale of a block of zeros does not matter.
    used = exact.any(-1, keepdims=True)
    whole = np.float32(1.0)
    if fp4:
        kind = layer.format.upper()
        # gguf does not multiply by the scale of the whole tensor.
        whole = np.float32(2 / fp4.unit)
        codes = np.searchsorted(_E2M1, np.abs(codes)) + 8 * (codes < 0)
        scales = torch.from_numpy(scale * fp4.unit).to(_FP4_SCALES[kind])
        parts = [scales.view(torch.uint8).numpy()]
    else:
        kind = "Q8_0" if layer.bits > 4 else "Q4_0" if layer.symmetric else "Q4_1"
        with np.errstate(over="ignore"):
            halves = [scale.astype(np.float16)]
            if stored.zero_point is not None:
                # `stored_weights` subtracts half of the range from codes and zero points.
                shift = 2 ** (layer.bits - 1)
                codes = codes + np.int16(shift)
                lowest = -(per_block(stored.zero_point) + shift) * scale
                halves.append(lowest.astype(np.float16))
        misfits = used & (halves[0] == 0)
        for half in halves:
            misfits |= ~np.isfinite(half)
        if misfits.any():
            raise MoQError(
                f"{where}: a scale of {np.abs(scale[misfits]).max():.3g} does not fit GGUF's float16"
            )
        parts = [half.view(np.uint8) for half in halves]
    raw = _bytes_of(kind, codes, parts)
    values = floats_of(raw, GGMLQuantizationType[kind]).reshape(codes.shape)
    steps = (values * whole - exact) / np.where(used, scale, np.float32(np.inf))
    return Blocks(kind, raw, float(np.abs(steps).max()))


def _bytes_of(
    kind: str, codes: NDArray[Any], parts: list[NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Pack codes `[rows, blocks, size]` after the other parts of each block, into `[rows, bytes]`."""
    if kind == "Q8_0":
        packed = codes.astype(np.int8).view(np.uint8)
    else:
        if kind == "Q4_0":
            codes = codes + 8
        # The lower nibbles hold the first half of the block.
        low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
        packed = low | high << np.uint8(4)
    parts = [*parts, packed]
    rows = len(codes)
    if kind == "NVFP4":
        # The scales of four groups come before their codes.
        parts = [part.reshape(rows, -1, 4 * part.shape[-1]) for part in parts]
    return np.concatenate(parts, -1).reshape(rows, -1)


class _Base:
    """A GGUF file from llama.cpp's converter.

    Args:
        path: The file.

    Attributes:
        tensors: The tensors of gguf's reader, by name.

    Raises:
        MoQError: It cannot be read, is one of several parts, or holds quantized
            tensors.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self._path = path
        with explained(f"the base {path} cannot be read as a GGUF file of a model"):
            # Copy on write, since PyTorch warns of arrays that cannot be written.
            reader = gguf.GGUFReader(path, "c")
            self.tensors: dict[str, Any] = {
                tensor.name: tensor for tensor in reader.tensors
            }
            self._keys = {
                name: field.contents() for name, field in reader.fields.items()
            }
            self._architecture = self._keys["general.architecture"]
            known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
            blocks = self._keys[f"{self._architecture}.block_count"]
            self._names = gguf.get_tensor_name_map(known[self._architecture], blocks)
        self._fields = _copied(reader)
        if self._keys.get("split.count", 0) > 1:
            raise MoQError(f"the base {path} is a part of a file: give the whole one")
        quantized = sorted({self.kind(name) for name in self.tensors} - set(_COPIED))
        if quantized:
            raise MoQError(
                f"the base {path} holds {', '.join(quantized)}: it must be in floats, as convert_hf_to_gguf.py writes "
                "with --outtype f16"
            )

    def kind(self, name: str) -> str:
        """The type of a tensor."""
        return str(self.tensors[name].tensor_type.name)

    def place_of(self, layer: str) -> str:
        """The name of the tensor that holds a layer, from gguf's own map; empty if there is none."""
        # The converter leaves out prefixes that the map does not know.
        layer = _EXPERT.sub(".experts.", layer)
        for name in (
            layer,
            layer.replace("language_model.", ""),
            layer.partition(".")[2],
        ):
            tensor = self._names.get_name(name)
            if tensor is not None:
                place = f"{tensor}.weight"
                # A tied head is stored as the table of tokens.
                is_tied = place == _BY_WORD[1] and place not in self.tensors
                return _BY_WORD[0] if is_tied else place
        return ""

    def places_of(self, layers: Sequence[str]) -> dict[str, str]:
        """The tensor of each layer.

        Raises:
            MoQError: There is none; names the layers.
        """
        places = {name: self.place_of(name) for name in layers}
        lost = [name for name, place in places.items() if place not in self.tensors]
        if lost:
            raise MoQError(
                f"the base {self._path} has no tensor for {listed(lost)}: it is another model's, or llama.cpp's "
                "converter leaves these layers out; then keep them in full precision (modules_to_not_convert)"
            )
        return places

    def fitted(
        self, place: str, stored: Quantized, layer: WeightSpec, name: str
    ) -> Blocks:
        """A layer's blocks with the rows in the base's order.

        Raises:
            MoQError: The base's tensor is not this layer's weight.
        """
        from gguf.quants import dequantize as floats_of

        tensor = self.tensors[place]
        data = tensor.data
        expert = _EXPERT.search(name)
        if expert and data.ndim == 3:
            data = data[int(expert[1])]
        floats = floats_of(data, tensor.tensor_type)
        exact = dequantize(*stored).numpy()
        # The converter drops the rows of a table that belong to no token.
        rows = len(floats) if place in _BY_WORD else len(exact)
        orders = self._orders(rows) if floats.shape == exact[:rows].shape else ()
        for order in orders:
            if np.allclose(floats, exact[order], rtol=_RELATIVE, atol=_ABSOLUTE):
                ordered: list[Any] = [
                    None if part is None else part[order] for part in stored
                ]
                return blocks_of(Quantized(*ordered), layer, name)
        raise MoQError(
            f"the base {self._path} is another model's, or has other weights: {place} is not {name} in any order of "
            "rows that llama.cpp knows; make the base from this checkpoint (moq-hf export DIR --to float)"
        )

    def _orders(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows in order, then as llama.cpp's converter interleaves the two halves of each head."""
        order = np.arange(rows)
        yield order
        heads: set[int] = set()
        for key in ("head_count", "head_count_kv"):
            counts = self._keys.get(f"{self._architecture}.attention.{key}", 0)
            heads.update(np.atleast_1d(counts).tolist())
        for number in sorted(heads):
            if number and rows % (2 * number) == 0:
                yield order.reshape(number, 2, -1).swapaxes(1, 2).ravel()

    def replace(self, parts: Mapping[str, Sequence[Blocks]]) -> None:
        """Replace floats with blocks; a tensor of experts gets the blocks of each, all of one type.

        In NVFP4 the scales of whole tensors are added, one for each expert.

        Raises:
            MoQError: Some experts are not quantized, or have another type.
        """
        from gguf import GGMLQuantizationType, LlamaFileType

        scale = np.float32(2 / FP4["nvfp4"].unit)
        sizes: Counter[str] = Counter()
        for name, blocks in parts.items():
            floats = self.tensors[name]
            kind, *others = sorted({part.kind for part in blocks})
            count = len(floats.data) if floats.data.ndim == 3 else 1
            if len(blocks) != count or others:
                raise MoQError(
                    f"{name} is one tensor of one type for {count} experts, of which {len(blocks)} are quantized, "
                    f"as {', '.join([kind, *others])}"
                )
            sizes[kind] += floats.n_elements
            raw = np.concatenate([part.raw for part in blocks])
            self.tensors[name] = SimpleNamespace(
                data=raw.reshape(*floats.data.shape[:-1], -1),
                tensor_type=GGMLQuantizationType[kind],
            )
            if kind == "NVFP4":
                # llama.cpp looks for it by this name.
                self.tensors[f"{name.removesuffix('weight')}scale"] = SimpleNamespace(
                    data=np.full(len(blocks), scale),
                    tensor_type=GGMLQuantizationType.F32,
                )
        # The type of the file is the one that most weights have.
        most = sizes.most_common(1)[0][0].replace("MXFP4", "MXFP4_MOE")
        self._file_type = LlamaFileType[f"MOSTLY_{most}"]

    def write(self, path: Path) -> None:
        """Write the file with the blocks from `replace`."""
        import gguf

        writer = gguf.GGUFWriter(path, self._architecture)
        for name, field in self._fields.items():
            if name == "general.alignment":
                writer.add_custom_alignment(field.contents())
            else:
                # For a list, the type of its items follows its own.
                kind, *items = field.types
                item = items[-1] if items else None
                writer.add_key_value(name, field.contents(), kind, item)
        writer.add_file_type(self._file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def prove(self, path: Path) -> None:
        """Read a written file back and compare all of it.

        Raises:
            MoQError: It does not hold what was written; names the tensor.
        """
        from gguf import GGUFReader

        reader = GGUFReader(path, "c")
        found = ((tensor.name, _bytes(tensor)) for tensor in reader.tensors)
        expected = {name: _bytes(tensor) for name, tensor in self.tensors.items()}
        wrong = {difference.name for difference in differences(found, expected)}
        keys = {name: field.contents() for name, field in _copied(reader).items()}
        names = keys.keys() | self._fields.keys()
        wrong |= {name for name in names if keys.get(name) != self._keys.get(name)}
        if wrong:
            raise MoQError(
                f"{path}: {', '.join(sorted(wrong))} was not read back as it was written"
            )


def _bytes(tensor: Any) -> Tensor:
    return torch.from_numpy(tensor.data.view(np.uint8))


def _copied(reader: Any) -> dict[str, Any]:
    """Return the keys of a file that describe the model, which the export copies."""
    # An empty list cannot be written, and means the same as no list.
    return {
        name: field
        for name, field in reader.fields.items()
        if not name.startswith(_NOT_COPIED) and field.contents() != []
    }
