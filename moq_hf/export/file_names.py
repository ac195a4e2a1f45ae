"""The names of exported files, moq_hf's own or those that other libraries look for, and what these read beside them."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCard

from ..errors import MoQError, require
from .onnx_rewrite import Flavor, Target, target_here

# The suffix of a large model's second file, which transformers.js, optimum and
# text-embeddings-inference look for.
DATA_SUFFIX = "_data"


class NamedFile(NamedTuple):
    """A file of an export.

    Attributes:
        flavor: What it computes.
        path: Below the folder; `{bits}` are those of its widest layer.
        readers: Who looks for that name.
        target: The CPUs it is made for; None: those that were asked for.
    """

    flavor: Flavor
    path: str
    readers: str = ""
    target: Target | None = None


_OPENVINO = 'Sentence Transformers with backend="openvino"'
# By the file's name in the report: its flavor, and what distinguishes two files of one
# flavor.
NAMED: dict[str, dict[str, NamedFile]] = {
    "own": {
        "float": NamedFile("float", "model_float.onnx"),
        "weight-only": NamedFile("weight-only", "model.onnx"),
        "int8": NamedFile("int8", "model_int8.onnx"),
        "nbits": NamedFile("nbits", "model_nbits.onnx"),
        "qdq": NamedFile("qdq", "model_qdq.onnx"),
    },
    "hub": {
        "weight-only": NamedFile(
            "weight-only",
            "onnx/model.onnx",
            "transformers.js (fp32), Sentence Transformers, text-embeddings-inference, fastembed",
        ),
        "int8": NamedFile(
            "int8",
            "onnx/model_quantized.onnx",
            "transformers.js (q8), fastembed",
            "avx2",
        ),
        "int8 for VNNI": NamedFile(
            "int8",
            "onnx/model_qint8_avx512_vnni.onnx",
            "Sentence Transformers, on CPUs with VNNI and on ARM",
            "vnni",
        ),
        "nbits": NamedFile(
            "nbits", "onnx/model_q{bits}.onnx", "transformers.js, by the number of bits"
        ),
        "OpenVINO": NamedFile("weight-only", "openvino/openvino_model.xml", _OPENVINO),
        "OpenVINO int8": NamedFile(
            "qdq", "openvino/openvino_model_qint8_quantized.xml", _OPENVINO, "vnni"
        ),
    },
}


def check_possible(file: NamedFile, name: str, has_cache: bool) -> None:
    """Check that a file can be made and proven here.

    Args:
        file: The file.
        name: Its path, with the bits.
        has_cache: Whether the model is a decoder with its key-value cache.

    Raises:
        MoQError: Why not.
    """
    if file.target == "vnni" and target_here() != "vnni":
        raise MoQError("it is proven where it is made, and this CPU has no VNNI")
    if name.endswith("_q8.onnx"):
        raise MoQError("nobody looks for 8 bits in blocks")
    if name.endswith(".xml"):
        require("openvino", "openvino")
        if has_cache:
            raise MoQError("those who load it want a cache inside the model")


def write_beside(source: Path, folder: Path, files: str) -> None:
    """Copy what Sentence Transformers keeps beside a model, and write the card.

    Args:
        source: The packed checkpoint. Its card, if there is one, gets a section on the
            files, in the place of how to load it.
        folder: The export.
        files: The section's text.
    """
    for pattern in ("modules.json", "*sentence*.json", "[1-9]_*/*"):
        for path in source.glob(pattern):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    modules = folder / "modules.json"
    if modules.exists():
        # Names that Sentence Transformers 5 has too, whose ONNX backend needs
        # transformers 4.
        text = modules.read_text(encoding="utf-8")
        text = re.sub(r"(sentence_transformers\.)[\w.]+\.(\w+)", r"\1models.\2", text)
        modules.write_text(text, encoding="utf-8")
    path = source / "README.md"
    empty = ModelCard("---\nlibrary_name: transformers.js\n---\n")
    card = ModelCard.load(path) if path.exists() else empty
    card.data["library_name"] = "transformers.js"
    section = f"## Files\n\n{files}\n"
    use = r"## Use\n.*?(?=\n## |\Z)"
    text, found = re.subn(use, lambda _: section, card.text, flags=re.DOTALL)
    card.text = text if found else f"{text}\n{section}"
    card.save(folder / "README.md")
