"""The rules, one function each: from the description of a model to the reasons why a server does not take it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from .description import Description, Reason, Server, Verdict, Weight

# Layers that vLLM and SGLang make one layer of.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
# Modules that they make plain `nn.Linear` of, whatever the checkpoint holds.
PLAIN = re.compile(
    r"(^|\.)(pooler\.dense|classifier|classifier\.(dense|out_proj)|head\.dense|lm_head\.dense|"
    r"predictions\.transform\.dense|pre_classifier)$"
)
_LINEAR = "models of nn.Linear are served"
_SAVE_AGAIN = "save it again with this version of moq_hf"
# Their checkpoints always had all experts in one tensor.
_FUSED_EXPERTS = ("GptOss", "Llama4")


def verdict(model: Description, server: Server) -> Verdict:
    """What a server makes of a model.

    >>> from moq_hf.serving.servers import SGLANG
    >>> model = Description("LlamaForCausalLM", {"model.layers.0.mlp.down_proj": Weight("linear", 64, 128, 3, 32)})
    >>> print(verdict(model, SGLANG).reasons[0])
    its kernels take 4 or 8 bits, not 3 (model.layers.0.mlp.down_proj); 4 or 8 bits are served
    """
    reasons = [reason for rule in (*_GRID, *server.rules) for reason in rule(model, server)]
    known = not server.architectures or bool(server.architectures & _other_names(model.architecture))
    notes = [server.note] if server.note else []
    if not known:
        notes.append(f"it has no model of its own for {model.architecture}, so nothing is known")
    if server.half_scales and model.scales == "float32" and model.integers:
        notes.append("scales are rounded to half precision there")
    return Verdict(server, tuple(reasons), tuple(notes), known)


def _other_names(architecture: str) -> set[str]:
    """A class, and the causal model that vLLM and SGLang make it of."""
    stem = re.sub(r"(ForSequenceClassification|ForTokenClassification|TextModel|Model)$", "", architecture)
    return {architecture, f"{stem}ForCausalLM"}


def _bits(model: Description, server: Server) -> Iterator[Reason]:
    for symmetric, legal in ((True, server.symmetric), (False, server.asymmetric)):
        weights = {n: weight for n, weight in model.packed().items() if weight.symmetric == symmetric}
        wrong = {n: weight for n, weight in weights.items() if weight.bits not in legal}
        if not wrong:
            continue
        found, kind = _or({weight.bits for weight in wrong.values()}), "" if symmetric else " with zero points"
        taken = f"{_or(legal)} bits{kind}"
        yield Reason(f"its kernels take {taken}, not {found}", f"{taken} are served", tuple(wrong))


def _group_sizes(model: Description, server: Server) -> Iterator[Reason]:
    def fits(size: int) -> bool:
        return (not server.groups or size in server.groups) and size % server.multiple == 0

    packed = model.packed()
    wrong = [name for name, weight in packed.items() if weight.group_size is not None and not fits(weight.group_size)]
    legal = _or(server.groups) if server.groups else f"a multiple of {server.multiple}"
    rows = ", or per channel," if server.by_rows else ""
    if wrong:
        sizes = _or({size for name in wrong if (size := packed[name].group_size)})
        yield Reason(
            f"its groups are {legal}, not {sizes}", f"quantize_group_size {legal}{rows} is served", tuple(wrong)
        )
    by_rows = [name for name, weight in packed.items() if weight.group_size is None]
    if by_rows and not server.by_rows:
        yield Reason(
            "it takes groups alone, not one scale per channel", "quantize_group_size is served", tuple(by_rows)
        )


def _sizes(model: Description, server: Server) -> Iterator[Reason]:
    packed = model.packed()
    columns = [name for name, weight in packed.items() if weight.columns % server.columns]
    if columns:
        sizes = _or({packed[name].columns for name in columns})
        yield Reason(
            f"its kernels take a multiple of {server.columns} columns (in_features), not {sizes}",
            "name these in modules_to_not_convert",
            tuple(columns),
        )
    short = [names for names, rows in _layers_as_served(packed, server) if rows % server.rows]
    if short:
        yield Reason(
            f"its kernels take a multiple of {server.rows} rows (out_features)",
            "name these in modules_to_not_convert",
            tuple(name for names in short for name in names),
        )


def _layers_as_served(packed: Mapping[str, Weight], server: Server) -> Iterator[tuple[list[str], int]]:
    """The layers, each with its rows; those that become one layer together."""
    groups: dict[str, list[str]] = {}
    for name in packed:
        parent, _, own = name.rpartition(".")
        fused = next((group for group in FUSED if own in group), None) if fused_layers in server.rules else None
        groups.setdefault(name if fused is None else f"{parent}.{fused}", []).append(name)
    for names in groups.values():
        yield names, sum(packed[name].rows for name in names)


_GRID = (_bits, _group_sizes, _sizes)


def fused_layers(model: Description, server: Server) -> Iterator[Reason]:
    """Members of a fused layer have one grid, or are all floats."""
    mixed: dict[str, list[str]] = {}
    for names in FUSED:
        for members in model.siblings(names):
            grids = {weight.grid() if weight else "floats" for weight in members.values()}
            if len(grids) > 1:
                mixed.setdefault(f"{', '.join(names)} ({' and '.join(sorted(grids))})", []).extend(members)
    for what, layers in mixed.items():
        yield Reason(
            f"it makes one layer of {what}",
            "all of them on the same grid, or all of them in float, are served",
            tuple(layers),
        )


def zeros_fill_words(model: Description, server: Server) -> Iterator[Reason]:
    """Zero points are packed along the rows, and those of a fused layer's members are put one after the other."""
    wrong = [
        name
        for names in FUSED
        for members in model.siblings(names)
        for name, weight in members.items()
        if weight is not None and not weight.symmetric and weight.rows * weight.bits % 32
    ]
    if wrong:
        yield Reason(
            "the zero points of a part of a fused layer must fill whole words of 32 bits",
            "symmetric grids are served, or rows (out_features) that are a multiple of 32",
            tuple(wrong),
        )


def experts_alike(model: Description, server: Server) -> Iterator[Reason]:
    """All experts of a block have one grid, or are all floats."""
    blocks: dict[str, list[str]] = {}
    for name in (*model.weights, *model.floats):
        parent, found, _ = name.partition(".experts.")
        if found:
            blocks.setdefault(parent, []).append(name)
    integers = model.integers
    for names in blocks.values():
        if len({integers[name].grid() if name in integers else "floats" for name in names}) > 1:
            yield Reason("all experts of a block must have one grid", "experts alike are served", tuple(names))


def no_tables(model: Description, server: Server) -> Iterator[Reason]:
    """Embedding tables are floats."""
    tables = tuple(name for name, weight in model.integers.items() if weight.kind == "embedding")
    if tables:
        yield Reason("embedding tables must be floats", "quantize_embeddings: null is served", tables)


def no_experts_on_cpu(model: Description, server: Server) -> Iterator[Reason]:
    """Packed experts on a CPU: vLLM 0.32, `fused_moe/experts/cpu_moe.py`."""
    layers = tuple(name for name in model.packed() if ".experts." in name)
    if layers:
        yield Reason("its kernel for packed experts needs AMX and was not tried", "experts in float are served", layers)


def no_plain_layers(model: Description, server: Server) -> Iterator[Reason]:
    """Poolers and classifiers are floats; the pooler of a base model, which gives embeddings, is not loaded at all."""
    is_base = model.architecture.endswith("Model")
    layers = tuple(
        name for name in model.packed() if PLAIN.search(name) and not (is_base and name.endswith("pooler.dense"))
    )
    if layers:
        yield Reason(
            "it makes these layers in float, whatever the checkpoint holds",
            "name them in modules_to_not_convert, beside the output heads",
            layers,
        )


def no_conv1d(model: Description, server: Server) -> Iterator[Reason]:
    """`Conv1D` weights lie across, and a packed one cannot be turned."""
    layers = tuple(name for name, weight in model.packed().items() if weight.kind == "conv1d")
    if layers:
        yield Reason("it turns Conv1D weights while loading, and cannot turn packed ones", _LINEAR, layers)


def no_dense_grids(model: Description, server: Server) -> Iterator[Reason]:
    """Grids of more than 8 bits are floats in a folder, and GGUF has no block for them."""
    layers = tuple(name for name, weight in model.weights.items() if 8 < weight.bits <= 16)
    if layers:
        yield Reason("no block holds more than 8 bits", "target_bits of up to 8 are served", layers)


def blocks_fill_rows(model: Description, server: Server) -> Iterator[Reason]:
    """GGUF's blocks hold what a folder has as floats on the grid and as bytes too: convolutions and tables."""
    others = {name: weight for name, weight in model.weights.items() if name not in model.packed()}
    wrong = [name for name, weight in others.items() if weight.bits <= 8 and weight.columns % server.columns]
    if wrong:
        yield Reason(
            f"a block has {server.columns} columns, which do not divide those of these tables and convolutions",
            "name them in modules_to_not_convert",
            tuple(wrong),
        )


def rows_as_converted(model: Description, server: Server) -> Iterator[Reason]:
    """llama.cpp's converter sorts the rows of q, k and v, which these models have head by head in one layer."""
    if model.architecture.startswith(("Bloom", "GPTNeoX")):
        layers = tuple(name for name in model.packed() if name.endswith(".query_key_value"))
        if layers:
            yield Reason(
                "llama.cpp's converter has the rows of this layer in another order",
                "name query_key_value in modules_to_not_convert",
                layers,
            )


def no_pooler(model: Description, server: Server) -> Iterator[Reason]:
    """llama.cpp's converter drops BERT's pooler."""
    layers = tuple(name for name in model.packed() if re.search(r"(^|\.)pooler\.dense$", name))
    if layers:
        yield Reason("llama.cpp's converter drops the pooler", "name it in modules_to_not_convert", layers)
    if model.architecture == "BertForSequenceClassification":
        yield Reason(
            "llama.cpp's converter drops the pooler, which this classifier needs",
            "embeddings of a BertModel are served",
        )


def one_scheme(model: Description, server: Server) -> Iterator[Reason]:
    """One config group."""
    grids = {weight.grid() for weight in model.integers.values()}
    if len(grids) > 1:
        found = " and ".join(sorted(grids))
        yield Reason(f"it takes one grid for all layers, not {found}", "a GGUF file by moq-hf export is served")


def onnx_kinds(model: Description, server: Server) -> Iterator[Reason]:
    """What `moq-hf export --to onnx` takes."""
    name = model.architecture
    if not name.endswith(("ForSequenceClassification", "ForTokenClassification", "Model")) or "Head" in name:
        yield Reason(f"{name} is not exported", "classifiers of sequences and tokens and base models are served")
    elif model.is_encoder_decoder:
        yield Reason("a decoder beside an encoder is not exported", "models of one stack are served")
    layers = tuple(name for name, weight in model.packed().items() if weight.kind == "conv1d")
    if layers:
        yield Reason("Conv1D layers are not exported", _LINEAR, layers)
    experts = tuple(name for name in model.weights if ".experts." in name)
    if experts:
        yield Reason("experts are not exported", "name them in modules_to_not_convert", experts)


def as_evaluated(model: Description, server: Server) -> Iterator[Reason]:
    """What was proven when it was saved."""
    if model.unserved is not None:
        yield Reason(f"it does not answer as the model did: {model.unserved}", "see the proof in moq_state.json")


def known_layout(model: Description, server: Server) -> Iterator[Reason]:
    """Strategies and formats of a folder's `quantization_config`."""
    groups = _groups_of(model)
    odd = {group["weights"]["strategy"] for group in groups if group["weights"]["strategy"] not in ("channel", "group")}
    if odd:
        yield Reason(f"it takes the strategies channel and group, not {_or(odd)}", _SAVE_AGAIN)
    formats = {str(group.get("format") or (model.quantization or {}).get("format")) for group in groups}
    if formats - {"pack-quantized"} and not any(weight.kind == "embedding" for weight in model.integers.values()):
        yield Reason(f"it takes the format pack-quantized, not {_or(formats - {'pack-quantized'})}", _SAVE_AGAIN)


def known_tensors(model: Description, server: Server) -> Iterator[Reason]:
    """Experts by the names that they had before transformers put all of a block into one tensor."""
    fused = tuple(name for name in model.tensors if re.search(r"\.experts\.(gate_up_proj|down_proj)$", name))
    if fused and not model.architecture.startswith(_FUSED_EXPERTS):
        yield Reason(
            "it looks for each expert by its own name",
            "experts on symmetric grids of up to 8 bits are served, as this version of moq_hf saves them",
            fused,
        )


def targets_found(names: Callable[[str, str], str]) -> Callable[[Description, Server], Iterator[Reason]]:
    """A rule: the config groups match a layer by the name that a server has for it.

    Args:
        names: Gives that name for the model's class and the layer's name in the model.
    """

    def rule(model: Description, server: Server) -> Iterator[Reason]:
        if model.quantization is None:
            return
        targets = [target for group in _groups_of(model) for target in group["targets"]]
        ignored = list(model.quantization.get("ignore") or ())
        lost, dropped = [], []
        for name in model.packed():
            there = names(model.architecture, name)
            if not any(_matches(there, target) or target == "Linear" for target in targets):
                lost.append(name)
            elif any(_matches(there, pattern) for pattern in ignored):
                dropped.append(name)
        if lost:
            there = names(model.architecture, lost[0])
            # Patterns of today match whatever stands before a block.
            is_old = not any(target.startswith("re:(?:.*") for target in targets)
            instead = _SAVE_AGAIN if is_old else "models whose layers it calls as transformers does are served"
            yield Reason(f"no target matches its names, such as {there}", instead, tuple(lost))
        if dropped:
            yield Reason("ignore matches packed layers", _SAVE_AGAIN, tuple(dropped))

    return rule


def _matches(name: str, target: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def _groups_of(model: Description) -> Sequence[Mapping[str, Mapping[str, object]]]:
    return list((model.quantization or {}).get("config_groups", {}).values())


def _or(values: object) -> str:
    words = [str(value) for value in sorted(values)]  # type: ignore[call-overload]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
