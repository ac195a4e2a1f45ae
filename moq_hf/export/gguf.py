"""`export_gguf`: a packed checkpoint's integers as a GGUF file, which llama.cpp runs.

Everything but the quantized weights comes from a base: the GGUF file that llama.cpp's converter made of the same
weights as floats. So vocabulary, hyperparameters and norms are what that converter made of them. The base also shows in
which order a tensor has its rows: llama.cpp wants the rows of q and k of some architectures in another order than
transformers.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MoQError, listed, one_line
from ..packed.state import StoredLayer
from ..packed.verify import by_matrix, recorded, split, stored_weights
from ..quantizer import Quantized, dequantize
from .gguf_blocks import Blocks, Rounding, blocks_of, kind_of, rounding

_FLOATS = ("F32", "F16", "BF16", "F64")
_COPIED = (*_FLOATS, "I8", "I16", "I32", "I64")
# llama.cpp does not take these tables in blocks.
_NEVER_IN_BLOCKS = ("position_embd.weight", "token_types.weight")
_BY_WORD = ("token_embd.weight", "output.weight")
# One tensor holds the experts of a block.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Keys whose values follow from the types of the tensors.
_OURS = ("general.file_type", "general.quantization_version")
# A float of the base may have been rounded to bfloat16 (2^-8) and float16; the second is float16's smallest number.
_RELATIVE, _ABSOLUTE = 2.0**-7, 2.0**-24


@dataclass(frozen=True)
class GgufExport:
    """What `export_gguf` wrote.

    Attributes:
        path: Where.
        bytes: Size of the file.
        base_bytes: Size of the base.
        types: How many tensors of the file are of each type.
        layers: The type that each quantized layer has; that of the base, if llama.cpp takes no blocks there.
        scale_error: Largest relative error of a scale, by its rounding to float16.
        weight_error: The largest error of a weight that follows, in quantization steps.
    """

    path: Path
    bytes: int
    base_bytes: int
    types: Mapping[str, int]
    layers: Mapping[str, str]
    scale_error: float
    weight_error: float

    def table(self) -> str:
        """Sizes, types and errors, for a terminal."""
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.types.items()))
        left = [name for name, kind in self.layers.items() if kind in _FLOATS]
        lines = [
            f"{self.path}: {self.bytes:,} bytes, the base {self.base_bytes:,} ({self.bytes / self.base_bytes:.3f})",
            f"tensors: {counts}",
            "read back: every code is that of the checkpoint",
            f"scales in float16: errors up to {self.scale_error:.2g}, of weights up to {self.weight_error:.2g} steps",
        ]
        return "\n".join([*lines, *([f"left as floats, as llama.cpp needs them: {', '.join(left)}"] if left else [])])


def export_gguf(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], base: str | os.PathLike[str]
) -> GgufExport:
    """Write a packed checkpoint as a GGUF file with the checkpoint's own integers.

    Symmetric layers of up to 4 bits become Q4_0, of 5 to 8 bits Q8_0; asymmetric ones of up to 4 bits Q4_1. Scales
    become float16. The file is read back and compared before it appears.

    Args:
        directory: What `save_quantized` wrote.
        out: The file to make; one that is there is replaced.
        base: What llama.cpp's converter made of the same checkpoint as floats, in float32, float16 or bfloat16.

    Returns:
        Sizes, types, and what the scales lost in float16.

    Raises:
        MoQError: The checkpoint is damaged, a grid does not fit any block, the base is of another model or quantized,
            a scale does not fit float16, or gguf is not installed.
    """
    _check_installed()
    target, source = Path(out), Path(base)
    found = recorded(directory)
    # The converter reads the files, so its names of layers are those in the files.
    names = {name: (found.state.get("names") or {}).get(name, name) for name in found.layers}
    layers = by_matrix({names[name]: layer for name, layer in found.layers.items() if layer.stored != "float"})
    _check_grids(directory, layers)
    _check_paths(directory, target, source)
    read = _Base(source)
    places = {name: read.place_of(name) for name in layers}
    read.check_places(places)
    weights = {names.get(name, name): own for name, own in split(stored_weights(directory), found.layers).items()}
    lost = ", ".join(name for name in layers if name not in weights)
    if lost:
        raise MoQError(f"{directory}: floats of half precision have no codes any more: {lost}; leave them out")
    errors = [Rounding(0.0, 0.0)]
    parts: dict[str, dict[int, Blocks]] = {}
    for name, layer in layers.items():
        blocks, error = read.fitted(places[name], weights.pop(name), layer, name)
        if places[name].endswith(_NEVER_IN_BLOCKS):
            continue
        known = parts.setdefault(places[name], {}).setdefault(_expert_of(name), blocks)
        if known is not blocks and not _same(known, blocks):
            raise MoQError(f"{source}: {places[name]} is one tensor, and the checkpoint has other codes for {name}")
        errors.append(error)
    placed = {place: read.whole(place, experts) for place, experts in parts.items()}
    with _staged(target) as staging:
        read.write(staging, placed)
        _prove(staging, read, placed)
    kinds = {name: placed[name].kind if name in placed else read.kind(name) for name in read.tensors}
    return GgufExport(
        path=target,
        bytes=target.stat().st_size,
        base_bytes=source.stat().st_size,
        types={kind: list(kinds.values()).count(kind) for kind in set(kinds.values())},
        layers={name: kinds[place] for name, place in places.items()},
        scale_error=max(error.scale for error in errors),
        weight_error=max(error.weight for error in errors),
    )


class _Base:
    """A GGUF file of llama.cpp's converter.

    Args:
        path: The file.

    Attributes:
        tensors: As gguf's reader gives them, by name.

    Raises:
        MoQError: It cannot be read, is one of several parts, or holds quantized tensors.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
            architecture = self._value("general.architecture")
            blocks = self._value(f"{architecture}.block_count")
            known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
            self._names = gguf.get_tensor_name_map(known[architecture], blocks)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise MoQError(f"the base {path} cannot be read as a GGUF file of a model: {one_line(error)}") from error
        if self._value("split.count", 0) > 1:
            raise MoQError(f"the base {path} is a part of a file: give the whole one")
        quantized = sorted({self.kind(name) for name in self.tensors} - set(_COPIED))
        if quantized:
            raise MoQError(
                f"the base {path} holds {', '.join(quantized)}: it must be in floats, as convert_hf_to_gguf.py makes "
                "it with --outtype f16"
            )
        counts = [self._value(f"{architecture}.attention.{key}", []) for key in ("head_count", "head_count_kv")]
        self._heads = sorted({heads for count in counts for heads in (count if isinstance(count, list) else [count])})

    def kind(self, name: str) -> str:
        """The type of a tensor."""
        return str(self.tensors[name].tensor_type.name)

    def place_of(self, layer: str) -> str:
        """The name of the tensor that holds a layer, by gguf's own map; empty if there is none."""
        # The converter leaves out what goes before the names that the map knows.
        layer = _EXPERT.sub(".experts.", layer)
        for name in (layer, layer.replace("language_model.", ""), layer.partition(".")[2]):
            found = self._names.get_name(name)
            if found is not None:
                place = f"{found}.weight"
                # A tied head is the table of words.
                return _BY_WORD[0] if place == _BY_WORD[1] and place not in self.tensors else place
        return ""

    def check_places(self, places: Mapping[str, str]) -> None:
        """Whether there is a tensor for each layer.

        Raises:
            MoQError: There is none; names the layers.
        """
        lost = [name for name, place in places.items() if place not in self.tensors]
        if lost:
            raise MoQError(
                f"the base {self._path} has no tensor for {listed(lost)}: it is of another model, or llama.cpp's "
                "converter leaves these layers out; then keep them in full precision (modules_to_not_convert)"
            )

    def fitted(self, place: str, stored: Quantized, layer: StoredLayer, name: str) -> tuple[Blocks, Rounding]:
        """A layer's blocks with the rows in the base's order, and what float16 costs.

        Raises:
            MoQError: The base's tensor is not this layer's weight.
        """
        from gguf.quants import dequantize as floats_of

        tensor = self.tensors[place]
        data = tensor.data[_expert_of(name)] if tensor.data.ndim == 3 else tensor.data
        floats, exact = floats_of(data, tensor.tensor_type), dequantize(*stored).numpy()
        hint = "make the base of this checkpoint (moq-hf export DIR --to float)"
        # Of a table the converter cuts off rows that no word has.
        cut = len(floats) if place in _BY_WORD else len(exact)
        if floats.shape != exact[:cut].shape:
            raise MoQError(
                f"the base {self._path} is of another model: {place} is {list(floats.shape)}, and {name} is "
                f"{list(exact.shape)}; {hint}"
            )
        blocks = blocks_of(stored, layer, name)
        for order in self._orders(len(floats)):
            if np.allclose(floats, exact[order], rtol=_RELATIVE, atol=_ABSOLUTE):
                return blocks.reordered(order), rounding(stored, layer, blocks)
        raise MoQError(
            f"the base {self._path} is of other weights: {place} differs from {name} by "
            f"{np.abs(floats - exact[:cut]).max():.3g}, and no order of rows that llama.cpp knows agrees; {hint}"
        )

    def _orders(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """The rows as they are; then as llama.cpp's converter turns the two halves of each head into pairs."""
        order = np.arange(rows)
        yield order
        for heads in self._heads:
            if heads and rows % (2 * heads) == 0:
                yield order.reshape(heads, 2, -1).swapaxes(1, 2).ravel()

    def whole(self, place: str, parts: Mapping[int, Blocks]) -> Blocks:
        """The blocks of a tensor: one layer's, or those of all experts in turn.

        Raises:
            MoQError: Some experts are not quantized, or have another type.
        """
        data, kinds = self.tensors[place].data, sorted({blocks.kind for blocks in parts.values()})
        experts = len(data) if data.ndim == 3 else 1
        if len(parts) != experts or len(kinds) > 1:
            raise MoQError(
                f"{place} is one tensor of one type for {experts} experts, of which {len(parts)} are quantized, as "
                f"{', '.join(kinds)}"
            )
        return Blocks.joined([parts[expert] for expert in sorted(parts)])

    def write(self, path: Path, placed: Mapping[str, Blocks]) -> None:
        """Write the file with these blocks in the place of floats."""
        import gguf

        writer = gguf.GGUFWriter(path, self._value("general.architecture"))
        for name, field in self.fields.items():
            if name == "general.alignment":
                writer.add_custom_alignment(field.contents())
            elif name not in _OURS:
                kinds = field.types
                writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        writer.add_file_type(_file_type(placed))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, tensor in self.tensors.items():
            if name in placed:
                raw = placed[name].raw().reshape(*tensor.data.shape[:-1], -1)
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[placed[name].kind])
            else:
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @property
    def fields(self) -> dict[str, Any]:
        """What the file says of the model, as gguf's reader gives it, by key."""
        return _fields(self._reader)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None and default is None:
            raise KeyError(key)
        return default if field is None else field.contents()


def _check_installed() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MoQError("gguf is not installed: pip install 'moq_hf[gguf]'") from None


def _check_grids(directory: str | os.PathLike[str], layers: Mapping[str, StoredLayer]) -> None:
    """Whether a block fits each grid.

    Raises:
        MoQError: Some do not, or there is nothing to write; names all layers by what does not fit.
    """
    if not layers:
        raise MoQError(f"{os.fspath(directory)}: no layer is quantized yet, so there are no integers to write")
    misfits: dict[str, list[str]] = {}
    for name, layer in layers.items():
        try:
            kind_of(layer)
        except MoQError as error:
            misfits.setdefault(str(error), []).append(name)
    if misfits:
        found = "; ".join(f"{what}: {listed(names)}" for what, names in misfits.items())
        raise MoQError(
            f"{os.fspath(directory)}: GGUF has blocks of 32 columns of up to 8 bits, asymmetric up to 4; they do not "
            f"fit {found}"
        )


def _check_paths(directory: str | os.PathLike[str], target: Path, base: Path) -> None:
    if target.is_dir():
        raise MoQError(f"{target} is a folder: give the name of a file")
    if target.exists() and base.exists() and target.samefile(base):
        raise MoQError(f"{target} is the base: give another file")
    if target.exists():
        with target.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise MoQError(f"{target} is no GGUF file, so it may not be ours to replace; give another name")


def _fields(reader: Any) -> dict[str, Any]:
    # An empty list cannot be written, and says what no list says.
    own = ("GGUF.", "general.architecture")
    found = {name: field for name, field in reader.fields.items() if not name.startswith(own)}
    return {name: field for name, field in found.items() if field.contents() != []}


def _expert_of(layer: str) -> int:
    """The number of the expert that a layer belongs to; 0 for other layers."""
    found = _EXPERT.search(layer)
    return int(found[1]) if found else 0


def _same(one: Blocks, other: Blocks) -> bool:
    return one.kind == other.kind and np.array_equal(one.raw(), other.raw())


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return key in one and key in other and bool(one[key].contents() == other[key].contents())


def _file_type(placed: Mapping[str, Blocks]) -> int:
    """What the header says of the file: the type that most weights have."""
    import gguf

    sizes: dict[str, int] = {}
    for blocks in placed.values():
        sizes[blocks.kind] = sizes.get(blocks.kind, 0) + blocks.codes.size
    return int(gguf.LlamaFileType[f"MOSTLY_{max(sizes, key=lambda kind: sizes[kind])}"])


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A file beside `target` to write to, which becomes `target` if nothing is raised.

    Raises:
        MoQError: It cannot be written.
    """
    staging = target.parent / f".{target.name}.exporting"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        staging.replace(target)
    except OSError as error:
        raise MoQError(f"cannot write {target}: {one_line(error)}") from error
    finally:
        staging.unlink(missing_ok=True)


def _prove(path: Path, base: _Base, placed: Mapping[str, Blocks]) -> None:
    """Read a written file back and compare all of it.

    Raises:
        MoQError: It holds something else than it should; names the tensor.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize as floats_of

    reader = GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    wrong = found.keys() ^ base.tensors.keys()
    for name in found.keys() - wrong:
        tensor = found[name]
        if name in placed:
            values = floats_of(tensor.data, tensor.tensor_type)
            same = np.array_equal(values.reshape(-1, values.shape[-1]), placed[name].values())
        else:
            same = np.array_equal(tensor.data.view(np.uint8), base.tensors[name].data.view(np.uint8))
        if not same:
            wrong.add(name)
    said, expected = _fields(reader), base.fields
    wrong |= {key for key in said.keys() | expected.keys() if key not in _OURS and not _agree(said, expected, key)}
    if wrong:
        raise MoQError(f"{path}: {', '.join(sorted(wrong))} was not read back as it was written")
