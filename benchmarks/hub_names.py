"""Who loads a folder of `moq-hf export --names hub`, and with what answers: the clients themselves.

    python benchmarks/hub_names.py make FOLDER --minilm DIR     # moq_hf's environment, with openvino
    python benchmarks/hub_names.py node FOLDER --node DIR       # DIR: npm i --ignore-scripts @huggingface/transformers
    ONNX/bin/python benchmarks/hub_names.py sentences FOLDER    # sentence-transformers<6, optimum-onnx, fastembed
    OPENVINO/bin/python benchmarks/hub_names.py sentences FOLDER    # sentence-transformers, optimum-intel
    python benchmarks/hub_names.py report FOLDER                # writes the committed result

`make` trains a classifier of MiniLM (`DIR` holds all-MiniLM-L6-v2) and a small Llama, each at 4 and at 2 bits with
activations rounded in blocks, and rounds MiniLM itself, a folder of Sentence Transformers, to 4 bits.
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from environment import environment, write

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "hub_names.json"
DEMO = ROOT / "examples" / "demo"
TEXTS = [
    "The soup looked tasty but turned out to be greasy.",
    "The room looked clean and it was.",
    "The film was good.",
    "The book seemed dull.",
]
# What a decoder goes on from.
BEGINNINGS = [" ".join(text.split()[:3]) for text in TEXTS]
TASKS = {f"{task}-{bits}": task for bits in (4, 2) for task in ("classify", "generate")}
EMBEDDER = "embed-4"
TOKENS = 16
# An epoch of them is 30 steps.
ROWS = 480
LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make(folder: Path, minilm: Path) -> None:
    """Train, pack and export what is not there yet; write what PyTorch answers."""
    import transformers as hf

    from moq_hf.export.onnx import export_onnx

    answers = {}
    for name in (*TASKS, EMBEDDER):
        packed = folder / f"run-{name}" / "quantized"
        if not (folder / name).exists():
            if name == EMBEDDER:
                pack_embedder(minilm, packed)
            else:
                train(name, minilm, packed.parent)
            export_onnx(packed, folder / name, names="hub")
        tokenizer = hf.AutoTokenizer.from_pretrained(packed)
        architecture = hf.AutoConfig.from_pretrained(packed).architectures[0]
        model = getattr(hf, architecture).from_pretrained(packed).eval()
        texts = BEGINNINGS if model.can_generate() else TEXTS
        answers[name] = [answer(model, tokenizer, text) for text in texts]
    write(environment("onnx", "onnxruntime", "openvino") | {"answers": answers}, folder / "PyTorch.json")


def train(name: str, minilm: Path, out: Path) -> None:
    """Train a classifier or a decoder on the demo's sentences, packed at the end."""
    import transformers as hf

    from moq_hf import MoQTrainer

    hf.set_seed(0)
    lines = (DEMO / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    rows = [json.loads(line) for line in lines]
    texts = [row["sentence"] for row in rows]
    is_classifier = TASKS[name] == "classify"
    if is_classifier:
        tokenizer = hf.AutoTokenizer.from_pretrained(minilm)
        model = hf.AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2)
        collate: Any = hf.DataCollatorWithPadding(tokenizer)
    else:
        tokenizer = word_pieces(texts)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
        collate = hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = [dict(tokenizer(text, truncation=True, max_length=32)) for text in texts]
    if is_classifier:
        for example, row in zip(data, rows, strict=True):
            example["labels"] = row["label"]
    arguments = hf.TrainingArguments(
        str(out),
        num_train_epochs=1,
        per_device_train_batch_size=16,
        learning_rate=2e-4 if is_classifier else 2e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    config = {
        "quantize_bits": {"target_bits": int(name[-1])},
        "quantize_embeddings": 8,
        "activation_quantization": {"enabled": True, "scale": "per_block", "start_step": 10},
    }
    MoQTrainer(model, arguments, collate, data, moq_config=config, processing_class=tokenizer).train()


def pack_embedder(minilm: Path, packed: Path) -> None:
    """Round a model of Sentence Transformers, and keep what it has beside the weights."""
    import transformers as hf

    from moq_hf import quantize_model, save_quantized

    model = hf.AutoModel.from_pretrained(minilm)
    quantize_model(model, {"quantize_bits": {"target_bits": 4}, "quantize_embeddings": 8})
    save_quantized(model, packed, processing_class=hf.AutoTokenizer.from_pretrained(minilm))
    for path in (*minilm.glob("modules.json"), *minilm.glob("*sentence*.json")):
        shutil.copy(path, packed)
    shutil.copytree(minilm / "1_Pooling", packed / "1_Pooling")


def word_pieces(sentences: list[str]) -> Any:
    """A tokenizer of bytes, as those of decoders are, trained on the sentences."""
    import transformers as hf
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(sentences, LLAMA["vocab_size"], special_tokens=["<pad>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, pad_token="<pad>", model_max_length=128)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, text: str) -> list[float]:
    """Logits of a classifier, the tokens that a decoder chooses, or an embedding of length 1."""
    inputs = tokenizer(text, return_tensors="pt")
    if model.can_generate():
        ids = inputs["input_ids"]
        tokens = model.generate(ids, attention_mask=inputs["attention_mask"], max_new_tokens=TOKENS, do_sample=False)
        return list(tokens[0, ids.shape[1] :].tolist())
    outputs = model(**inputs)
    if "logits" in outputs:
        return list(outputs.logits[0].tolist())
    mean = outputs.last_hidden_state[0].mean(0)
    return list((mean / mean.norm()).tolist())


def node(folder: Path, modules: Path) -> None:
    """Ask transformers.js, and the engine of browsers."""
    # A module of JavaScript looks for others beside itself.
    script = Path(shutil.copy(Path(__file__).with_suffix(".mjs"), modules))
    found: dict[str, Any] = {}
    for name, task in TASKS.items():
        texts = folder / "texts.json"
        texts.write_text(json.dumps(BEGINNINGS if task == "generate" else TEXTS), encoding="utf-8")
        words = ["node", script, folder / name, task, texts]
        said = subprocess.run(words, check=True, capture_output=True, text=True)
        found[name] = json.loads(said.stdout)
    packages = ("@huggingface/transformers", "onnxruntime-node", "onnxruntime-web")
    manifests = {name: modules / "node_modules" / name / "package.json" for name in packages}
    versions = {name: json.loads(path.read_text(encoding="utf-8"))["version"] for name, path in manifests.items()}
    write({"versions": versions, "models": found}, folder / "node.json")


def sentences(folder: Path) -> None:
    """Ask Sentence Transformers' two backends and fastembed, those that are installed."""
    path = folder / EMBEDDER
    reference = torch.tensor(json.loads((folder / "PyTorch.json").read_text())["answers"][EMBEDDER])
    libraries = ("sentence-transformers", "transformers", "optimum-onnx", "optimum-intel", "fastembed", "openvino")
    installed = {found.name for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in libraries if name in installed}
    clients = {"Sentence Transformers": by_sentence_transformers}
    if "fastembed" in installed:
        clients["fastembed"] = by_fastembed
    backend = "onnx" if "optimum-onnx" in installed else "openvino"
    found: dict[str, float | str] = {}
    for file in sorted(path.glob(f"{backend}/*.[ox][nm]*")):
        name = file.relative_to(path).as_posix()
        for client, embed in clients.items():
            try:
                vectors = embed(path, name)
                found[f"{client}, {name}"] = float((torch.as_tensor(vectors) - reference).abs().max())
            # What a client says is the result.
            except Exception as error:
                found[f"{client}, {name}"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    write({"versions": versions, "clients": found}, folder / f"{backend}.json")


def by_sentence_transformers(path: Path, file: str) -> Any:
    """Embeddings of the texts."""
    from sentence_transformers import SentenceTransformer

    backend: Any = file.partition("/")[0]
    model = SentenceTransformer(str(path), backend=backend, model_kwargs={"file_name": file}, device="cpu")
    return model.encode(TEXTS)


def by_fastembed(path: Path, file: str) -> Any:
    """Embeddings of the texts."""
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(file, PoolingType.MEAN, True, ModelSource(hf="moq/hf"), dim=384, model_file=file)
    return np.stack(list(TextEmbedding(file, specific_model_path=str(path)).embed(TEXTS)))


def report(folder: Path) -> None:
    """Write the committed result."""
    found, asked = (json.loads((folder / f"{name}.json").read_text()) for name in ("PyTorch", "node"))
    answers = found.pop("answers")
    found["texts"] = len(TEXTS)
    found["versions"]["node"] = asked["versions"]
    models = found["models"] = {}
    for name in answers:
        exported = json.loads((folder / name / "moq_export.json").read_text())
        sizes = {path: exported["bytes"][key] for key, path in exported["files"].items()}
        models[name] = {"bytes": {"float": exported["bytes"]["float checkpoint"], **sizes}}
        expected = torch.tensor(answers[name])
        for engine, dtypes in asked["models"].get(name, {}).items():
            for measured in dtypes.values():
                said = torch.tensor(measured.pop("answers"))
                if TASKS[name] == "generate":
                    measured["equal tokens"] = f"{int((said == expected).sum())} of {expected.numel()}"
                else:
                    measured["difference"] = float((said - expected).abs().max())
            models[name][engine] = dtypes
    found["clients"] = {}
    for backend in ("onnx", "openvino"):
        asked = json.loads((folder / f"{backend}.json").read_text())
        found["versions"][f"Sentence Transformers, {backend}"] = asked["versions"]
        found["clients"] |= asked["clients"]
    write(found, RESULT)


def main() -> None:
    """Run a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("make", "node", "sentences", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--node", type=Path)
    args = parser.parse_args()
    if args.step == "make":
        make(args.folder, args.minilm)
    elif args.step == "node":
        node(args.folder.resolve(), args.node.resolve())
    elif args.step == "sentences":
        sentences(args.folder)
    else:
        report(args.folder)


if __name__ == "__main__":
    sys.exit(main())
