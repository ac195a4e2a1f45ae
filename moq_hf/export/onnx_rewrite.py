"""Rewriting the traced graph of a float model: each flavor puts the checkpoint's integers where it finds their floats.

| flavor | linear layer | rows of a table |
| --- | --- | --- |
| weight-only | x times Cast(codes) * scale, which a runtime folds into a float weight when it loads | Gather, Cast, Mul |
| int8, static inputs | QuantizeLinear, MatMulIntegerToFloat | the same |
| int8, per_tensor | DynamicQuantizeLinear, MatMulIntegerToFloat | the same |
| int8, per_token | x / s, QuantizeLinear, MatMulIntegerToFloat, Mul | the same |
| nbits | MatMulNBits, which rounds its input in blocks | the same |
| qdq, static | QuantizeLinear, DequantizeLinear, MatMul with DequantizeLinear(codes), Add | the same |

Wherever else the graph uses a weight, in convolutions for instance, Cast(codes) * scale takes its place in every flavor.

ONNX Runtime turns DequantizeLinear before MatMul into MatMulNBits with accuracy level 4, which rounds activations to 8
bits: for the same answers as PyTorch the weight-only flavor spells the same formula as Cast and Mul.

MatMulNBits keeps weights of 2, 4 or 8 bits packed in memory, and with accuracy level 4 multiplies them with activations
that it rounds to 8 bits, with a scale for each block of a row. Its kernel for 2 bits has blocks of 32, 64 and 128.

MatMulIntegerToFloat is ONNX Runtime's own operator: the integer product, both scales and the bias in one pass. The
inputs of int8 are unsigned, since its fast kernels take unsigned activations and signed weights. Those of qdq are
signed if they are symmetric, as OpenVINO wants them, and all its operators are ONNX's. QuantizeLinear rounds before it
adds a zero point, and training after that, so that the code of a tie may differ by one.

Instructions of x86 CPUs without VNNI add two products of unsigned activations and signed weights in 16 bits,
saturating. A file for them has unsigned weights wherever two such products do not fit, which is exact, and slower. A
file for CPUs with VNNI has signed weights, and `GUARD` at its output, which refuses to run where products saturate.
"""  # noqa: E501 - a table row cannot be broken

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MoQError
from ..grid import LEAST_INPUT_BLOCK, InputGrid, InputScale
from ..inputs import range_in, static_parameters
from ..quantizer import Quantized, per_weight
from ..text import counted
from .compare import Checkpoint

Flavor = Literal["float", "weight-only", "int8", "nbits", "qdq"]
# The scales that inputs of the int8 flavor may have.
INT8_SCALES: tuple[InputScale, ...] = ("per_token", "per_tensor", "static")
# The CPUs that a file is made for.
Target = Literal["vnni", "avx2"]
TARGETS: tuple[Target, ...] = ("vnni", "avx2")
OPSET = 21
# The name of the operator that fails where products saturate.
GUARD = "made for CPUs with VNNI; export again with --cpu avx2"
_INT16_MAX = 2**15 - 1
# The domain of formulas, until they become nodes.
_DOMAIN = "moq_hf"
# Sizes of the blocks of MatMulNBits.
_BLOCKS = (16, 32, 64, 128, 256)
# Formulas in the text format of ONNX, whose number of float32 is 1.
_CAST = "numbers = Cast <to = 1> (codes)"
# A zero is added to the answers. It is element 0 of one, or where the sum is wrong
# element 1, which fails.
_GUARD = """
  activations = Constant <value = uint8[1, 4] {255, 255, 255, 255}> ()
  weights = Constant <value = int8[4, 1] {127, 127, 127, 127}> ()
  expected = Constant <value = int32[1, 1] {129540}> ()
  zero = Constant <value = float[1] {0.0}> ()
  sum = MatMulInteger (activations, weights)
  right = Equal (sum, expected)
  wrong = Not (right)
  index = Cast <to = 7> (wrong)
  nothing = Gather (zero, index)
  result = Add (answers, nothing)
"""
# The codes of 4 bits in the two halves of bytes: OpenVINO computes something else with
# BitShift.
_HALVES = """
  bytes = Cast <to = 1> (codes)
  sixteen = Constant <value_float = 16.0> ()
  sixteenths = Div (bytes, sixteen)
  high = Floor (sixteenths)
  upper = Mul (high, sixteen)
  low = Sub (bytes, upper)
  last = Constant <value_ints = [-1]> ()
  evens = Unsqueeze (low, last)
  odds = Unsqueeze (high, last)
  pairs = Concat <axis = -1> (evens, odds)
  eight = Constant <value_float = 8.0> ()
  numbers = Sub (pairs, eight)
"""
# `inputs.token_parameters`, with which the input is divided, and `inputs.tensor_scale`.
_TOKEN_SCALE = """
  magnitudes = Abs (x)
  features = Constant <value_ints = $features> ()
  largest = ReduceMax (magnitudes, features)
  steps = Constant <value_float = $steps.0> ()
  two = Constant <value_float = 2.0> ()
  half_steps = Div (steps, two)
  exact = Div (largest, half_steps)
  zero = Constant <value_float = 0.0> ()
  is_zero = Equal (exact, zero)
  epsilon = Constant <value_float = 1.1920928955078125e-07> ()
  token_scale = Where (is_zero, epsilon, exact)
  scaled = Div (x, token_scale)
"""
_TENSOR_SCALE = """
  scaled = Identity (x)
  zero = Constant <value_float = 0.0> ()
  steps = Constant <value_float = $steps.0> ()
  least = ReduceMin <keepdims = 0> (x)
  low = Min (least, zero)
  largest = ReduceMax <keepdims = 0> (x)
  high = Max (largest, zero)
  range = Sub (high, low)
  exact = Div (range, steps)
  tiny = Constant <value_float = 1.1754943508222875e-38> ()
  step = Max (exact, tiny)
  magnitude = Neg (low)
  middle = QuantizeLinear (magnitude, step)
"""


@dataclass(frozen=True)
class Rounding:
    """How the inputs of linear layers are rounded.

    Attributes:
        grid: Their grid.
        ranges: For a static scale, the range of each layer's inputs by the layer's
            name, as `inputs.ranges_of` gives it.
        source: Where the ranges come from: "trained" in a run, "as saved" without one,
            "measured", "partly trained", "partly as saved", or "" where there are none.
        target: The CPUs that the file is made for.
        own: The grids of layers that differ, by name; None for inputs that stay floats.
        dtypes: The dtype to which the static scale of a layer's inputs is rounded, by
            name; float32 for others.
    """

    grid: InputGrid
    ranges: Mapping[str, float | list[float]]
    source: str
    target: Target
    own: Mapping[str, InputGrid | None] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __str__(self) -> str:
        ranges = f", ranges {self.source}" if self.source else ""
        # MatMulNBits chooses its products by itself.
        cpus = "" if self.grid.scale == "per_block" else f", for {self.target}"
        others = f", {counted(len(self.own), 'layer')} otherwise" if self.own else ""
        return f"{self.grid.in_words}, {self.grid.bits} bits{others}{ranges}{cpus}"


def target_of(cpu: str, architecture: str) -> Target:
    """The target that suits a machine: "vnni" where products of 8 bits are exact, as they are on ARM too.

    Args:
        cpu: The content of Linux' /proc/cpuinfo, which lists the processor's
            instructions.
        architecture: As `platform.machine` gives it.
    """
    exact = {"avx_vnni", "avx512_vnni", "amx_int8"}.intersection(cpu.split())
    return "vnni" if exact or architecture in ("aarch64", "arm64") else "avx2"


def target_here() -> Target:
    """The target that suits this machine."""
    path = Path("/proc/cpuinfo")
    cpu = path.read_text(encoding="utf-8") if path.exists() else ""
    return target_of(cpu, platform.machine())


def is_exact_signed(codes: Tensor, bits: int) -> bool:
    """True if two products of these codes with unsigned activations of `bits` fit into 16 bits."""
    return 2 * ((1 << bits) - 1) * int(codes.abs().max()) <= _INT16_MAX


class Traced(NamedTuple):
    """The graph of a float model.

    Attributes:
        model: The model of onnx_ir.
        unused: The weights that no answer depends on, which the graph does not have.
        called: The layers that the model calls. Training rounds their inputs alone, and
            not those of one whose weight the model reads.
    """

    model: Any
    unused: Collection[str]
    called: Collection[str]


@dataclass(frozen=True)
class Rewritten:
    """A graph with integers in it.

    Attributes:
        model: The model of onnx_ir.
        stored: What each quantized layer that is used is stored as: "int2", "int4",
            "int8", "uint8" or "float". Nothing where the graph stays in float.
        rounded: How the inputs of the layers that multiply integers are rounded.
    """

    model: Any
    stored: Mapping[str, str]
    rounded: Mapping[str, InputGrid]


def unused_weights(program: torch.export.ExportedProgram) -> list[str]:
    """The names of the weights that no answer of a program depends on."""
    weights = program.graph_signature.inputs_to_parameters
    used = {
        weights[node.name]
        for node in program.graph.nodes
        if node.users and node.name in weights
    }
    # If layers share a weight, the program uses it under one name.
    shared = {program.state_dict[name].data_ptr() for name in used}
    return [
        name
        for name in weights.values()
        if program.state_dict[name].data_ptr() not in shared
    ]


def rewrite(
    traced: Traced,
    checkpoint: Checkpoint,
    flavor: Flavor,
    rounding: Rounding | None = None,
) -> Rewritten:
    """Put a checkpoint's integers into a copy of the graph of its float model.

    Args:
        traced: The graph, which stays as it is.
        checkpoint: Its weights.
        flavor: How the graph is to compute.
        rounding: How inputs are rounded: for int8, nbits and qdq.

    Raises:
        MoQError: The graph does not have a quantized weight; names it.
    """
    model = traced.model.clone()
    if flavor == "float":
        # It is left as PyTorch exports it.
        _optimize(model)
        return Rewritten(model, {}, {})
    graph = _Graph(model)
    layers = checkpoint.verified.layers
    forms = {
        name: _replace(
            graph,
            name,
            layers[name],
            weight,
            flavor,
            rounding if name in traced.called else None,
        )
        for name, weight in checkpoint.weights.items()
        if f"{name}.weight" not in traced.unused
    }
    model.graph.sort()
    _optimize(model)
    _keep_sums(model.graph)
    if any(form.saturates for form in forms.values()):
        _guard(model)
    used = [name for name in layers if f"{name}.weight" not in traced.unused]
    stored = dict.fromkeys(used, "float")
    stored.update({name: form.stored for name, form in forms.items()})
    rounded = {name: form.grid for name, form in forms.items() if form.grid}
    return Rewritten(model, stored, rounded)


class _Graph:
    """A graph that is rewritten: new nodes stand behind the others until they are sorted."""

    def __init__(self, model: Any) -> None:
        import onnx_ir as ir

        self._model = model
        self._tape = ir.tape.Tape(model.graph)
        self.initializers = model.graph.initializers
        model.opset_imports.update({_DOMAIN: 1, "com.microsoft": 1})

    def add(self, formula: str, **values: Any) -> Any:
        """Add what computes `result` from values, in the text format of ONNX; gives the result."""
        import onnx.parser
        import onnx_ir as ir

        functions = self._model.functions
        name = f"formula_{len(functions)}"
        opsets = f'["" : {OPSET}, "com.microsoft" : 1]'
        text = f'<domain: "{_DOMAIN}", opset_import: {opsets}> {name} ({", ".join(values)}) => (result) {{{formula}}}'
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        # The optimizer puts the function's nodes in the place of its call.
        functions[function.identifier()] = function
        return self._tape.op(name, list(values.values()), domain=_DOMAIN, version=1)

    def constant(self, name: str, array: Any) -> Any:
        """The initializer of a name, made of an array; None of None."""
        import onnx_ir as ir

        if array is None:
            return None
        if name not in self.initializers:
            array = np.asarray(array, order="C")
            self._tape.initializer(ir.tensor(array, name=name))
        return self.initializers[name]

    def rows(self, table: Any, ids: Any) -> Any:
        """The rows of a table; None of None."""
        return table and self._tape.op("Gather", [table, ids])

    def replace(self, old: Any, new: Any) -> None:
        """Let a new value take the place of an old one."""
        new.name, old.name = old.name, new.name
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def _is_lookup(node: Any, index: int) -> bool:
    """True if a node looks up rows in its input of that index."""
    is_gather = node.op_type == "Gather" and index == 0
    return is_gather and node.attributes.get_int("axis", 0) == 0


class _Product(NamedTuple):
    """A place where a graph multiplies an input `[..., in_features]` with a weight and adds a bias, or None."""

    input: Any
    result: Any
    bias: Any


def _products(uses: Sequence[Any]) -> list[_Product]:
    """The products with a linear layer's weight; none where the graph uses it for something else too."""
    found = []
    for node, index in uses:
        if node.op_type == "Gemm" and index == 1 and node.attributes.get_int("transB"):
            input, _, *bias = node.inputs
            found.append(_Product(input, node.outputs[0], *bias or [None]))
        elif node.op_type == "Transpose":
            for product, place in node.outputs[0].uses():
                if product.op_type != "MatMul" or place != 1:
                    return []
                found.append(_with_bias(product))
        else:
            return []
    return found


def _with_bias(product: Any) -> _Product:
    result = product.outputs[0]
    uses = result.uses()
    is_output = result.is_graph_output()
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not is_output:
        add, index = uses[0]
        bias = add.inputs[1 - index]
        if bias.is_initializer() and len(bias.shape) == 1:
            return _Product(product.inputs[0], add.outputs[0], bias)
    return _Product(product.inputs[0], result, None)


class _Form(NamedTuple):
    """How a weight is stored in a graph, and used.

    Attributes:
        stored: "int2", "int4", "int8" or "uint8".
        parts: Its codes, scales and so on; None are left out.
        formula: What computes `product` from them and the input `x`.
        grid: How the formula rounds the input; None where it multiplies floats.
        adds_bias: Whether the product has the bias in it.
        saturates: Whether it needs a CPU with VNNI.
    """

    stored: str
    parts: Mapping[str, Any]
    formula: str = ""
    grid: InputGrid | None = None
    adds_bias: bool = False
    saturates: bool = False


def _replace(
    graph: _Graph,
    name: str,
    layer: Any,
    weight: Quantized,
    flavor: Flavor,
    rounding: Rounding | None,
) -> _Form:
    """Put a weight's integers wherever the graph uses its floats.

    Raises:
        MoQError: The graph does not have them.
    """
    names = [f"{each}.weight" for each in (name, *layer.tied)]
    places = [graph.initializers[n] for n in names if n in graph.initializers]
    if not places:
        raise MoQError(
            f"torch.onnx.export wrote no {names[0]}, which integers would replace: keep {name} in float "
            "(modules_to_not_convert)"
        )
    uses = [use for place in places for use in place.uses()]
    lookups = [node for node, index in uses if _is_lookup(node, index)]
    products = _products([use for use in uses if use.node not in lookups])
    # Twice the numbers of E2M1 are integers of up to 12.
    bits = layer.bits if layer.format == "int" else 8
    shape = list(map(int, places[0].shape[1:]))
    groups = weight.scale.shape[1]
    form = floats = _floats(weight, bits, shape, bool(lookups))
    if products and lookups and flavor == "nbits":
        form = _tied(weight, floats) or floats
    elif products and not lookups and rounding is not None and layer.kind == "linear":
        form = _integers(name, weight, bits, flavor, rounding) or floats
    parts = {
        part: graph.constant(f"{name}.{part}", array)
        for part, array in form.parts.items()
    }
    for node in lookups:
        ids = node.inputs[1]
        rows = {part: graph.rows(table, ids) for part, table in parts.items()}
        formula = _dequantized(floats, groups, [0] * len(ids.shape), shape)
        graph.replace(node.outputs[0], graph.add(formula, **rows))
    if form is not floats:
        for input, result, bias in products:
            has_bias = bias is not None and not form.adds_bias
            end = "Add (product, bias)" if has_bias else "Identity (product)"
            # A token is what follows the first two dimensions.
            dimensions = list(range(len(input.shape)))
            features = str(dimensions[2:] or dimensions)
            formula = f"{form.formula} result = {end}".replace("$features", features)
            graph.replace(result, graph.add(formula, x=input, bias=bias, **parts))
    elif len(lookups) < len(uses):
        whole = graph.add(_dequantized(floats, groups, [0], shape), **parts)
        for place in places:
            place.replace_all_uses_with(whole)
    return form


def _floats(
    weight: Quantized, bits: int, shape: Sequence[int], is_table: bool
) -> _Form:
    """Integers of rows of a shape, which become floats before anything is computed with them."""
    import ml_dtypes

    codes, scale, zero_point = weight
    rows, groups = scale.shape
    of_group = [rows, groups, 1] if groups > 1 else [rows, *[1] * len(shape)]
    if zero_point is not None:
        zero_point = zero_point.to(torch.int8).view(of_group)
    parts: dict[str, Any] = {
        "codes": codes,
        "scale": scale.view(of_group),
        "zero_point": zero_point,
    }
    # Gather takes no INT4.
    if is_table and bits <= 4 and codes.shape[1] % 2 == 0:
        return _Form("int4", parts | {"codes": _packed(codes + 8, 4)}, _HALVES)
    parts["codes"] = codes.to(torch.int8).view(rows, *shape)
    if is_table or bits > 4:
        return _Form("int8", parts, _CAST)
    parts["codes"] = parts["codes"].numpy().astype(ml_dtypes.int4)
    return _Form("int4", parts, _CAST)


def _dequantized(
    form: _Form, groups: int, lead: Sequence[int], shape: Sequence[int]
) -> str:
    """The formula of the floats of rows of a shape along leading dimensions, where 0 keeps a size."""
    grouped = "grouped = Identity (numbers)"
    result = "result = Identity (floats)"
    if groups > 1:
        grouped = _reshaped("grouped", "numbers", [*lead, groups, -1])
        result = _reshaped("result", "floats", [*lead, *shape])
    elif form.formula is _HALVES:
        grouped = _reshaped("grouped", "numbers", [*lead, -1])
    shifted = "shifted = Identity (grouped)"
    if form.parts["zero_point"] is not None:
        shifted = "shift = Cast <to = 1> (zero_point) shifted = Sub (grouped, shift)"
    return f"""
      {form.formula}
      {grouped}
      {shifted}
      floats = Mul (shifted, scale)
      {result}
    """


def _reshaped(name: str, value: str, shape: Sequence[int]) -> str:
    return f"""
      {name}_shape = Constant <value_ints = {list(shape)}> ()
      {name} = Reshape ({value}, {name}_shape)
    """


def _tied(weight: Quantized, floats: _Form) -> _Form | None:
    """An output head that multiplies floats with the halved codes of its table; None where its groups do not fit.

    MatMulNBits multiplies floats with codes of 4 bits two to three times as fast as
    MatMul does for one token, and with those of 8 bits ten times as slowly (onnxruntime
    1.31), which therefore become floats at loading.
    """
    rows, columns = weight.codes.shape
    groups = weight.scale.shape[1]
    fitting = [size for size in _BLOCKS if columns // groups % size == 0]
    is_halved = floats.formula is _HALVES
    if not is_halved or not fitting or weight.zero_point is not None:
        return None
    block = max(fitting)
    blocks = columns // block
    return floats._replace(
        formula=f"""
          {_reshaped("packed", "codes", [rows, blocks, block // 2])}
          {_reshaped("column", "scale", [rows, groups, 1])}
          repeats = Constant <value_ints = {[rows, groups, blocks // groups]}> ()
          repeated = Expand (column, repeats)
          {_reshaped("block_scale", "repeated", [-1])}
          product = {_matmul_nbits(weight, 4, block, 0)} (x, packed, block_scale)
        """
    )


def _matmul_nbits(weight: Quantized, bits: int, block: int, level: int) -> str:
    rows, columns = weight.codes.shape
    sizes = f"K = {columns}, N = {rows}, bits = {bits}, block_size = {block}"
    return f"com.microsoft.MatMulNBits <{sizes}, accuracy_level = {level}>"


def _in_blocks(weight: Quantized, bits: int, grid: InputGrid) -> _Form | None:
    """Codes of 2, 4 or 8 bits that stay packed in memory, times inputs that MatMulNBits rounds in blocks."""
    if grid.block < LEAST_INPUT_BLOCK:
        return None
    codes, scale, zero_point = weight
    rows, columns = codes.shape
    bits = next(each for each in (2, 4, 8) if each >= bits)
    middle = 1 << bits - 1
    # Each block has what its group has.
    blocks = (rows, -(-columns // grid.block))
    padded = F.pad(codes, (0, blocks[1] * grid.block - columns))
    if zero_point is not None:
        zero_point = per_weight(zero_point, blocks) + middle
        zero_point = _packed(zero_point, bits).flatten()
    parts = {
        "codes": _packed(padded + middle, bits).view(*blocks, -1),
        "scale": per_weight(scale, blocks).flatten(),
        "zero_point": zero_point,
    }
    # Level 4 is that of inputs of 8 bits.
    operator = _matmul_nbits(weight, bits, grid.block, 4)
    formula = f"product = {operator} (x, codes, scale, zero_point)"
    return _Form(f"int{bits}", parts, formula, grid)


def _integers(
    name: str, weight: Quantized, bits: int, flavor: Flavor, rounding: Rounding
) -> _Form | None:
    """Integers that are multiplied with those of rounded inputs; None where the flavor cannot."""
    codes, scale, _ = weight
    groups = scale.shape[1]
    own = rounding.own.get(name, rounding.grid)
    if own is None:
        return None
    grid = own.beside(codes.shape[1], groups)
    if flavor == "nbits":
        return _in_blocks(weight, bits, grid)
    if groups > 1 or (grid.scale == "static" and name not in rounding.ranges):
        return None
    # The value of one step of the input's codes; a token's scale is multiplied in later.
    step = torch.ones(())
    zero = torch.zeros(())
    if grid.scale == "static":
        ends = range_in(rounding.ranges[name], grid)
        dtype = rounding.dtypes.get(name, torch.float32)
        step, shifted = static_parameters(ends, grid, dtype)
        step = step.float()
        zero = zero if shifted is None else shifted
    # The code of 0, where codes have no sign.
    middle = (zero + (1 << grid.bits - 1)).to(torch.uint8)
    if flavor == "qdq":
        is_signed = grid.symmetric
        middle = torch.zeros((), dtype=torch.int8) if is_signed else middle
        return _in_pairs(weight, step, middle, grid)
    return _int8(weight, step, middle, grid, rounding.target)


def _in_pairs(
    weight: Quantized, step: Tensor, middle: Tensor, grid: InputGrid
) -> _Form:
    """Inputs and weight go through pairs of QuantizeLinear and DequantizeLinear."""
    codes, scale, zero_point = weight
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    parts = {
        "codes": codes.T.to(torch.int8),
        "scale": scale.flatten(),
        "zero_point": zero_point.flatten().to(torch.int8),
        "step": step,
        "middle": middle,
    }
    formula = """
      rounded = QuantizeLinear (x, step, middle)
      input = DequantizeLinear (rounded, step, middle)
      weight = DequantizeLinear <axis = 1> (codes, scale, zero_point)
      product = MatMul (input, weight)
    """
    return _Form("int8", parts, formula, grid)


def _int8(
    weight: Quantized, step: Tensor, middle: Tensor, grid: InputGrid, target: Target
) -> _Form:
    """Inputs are rounded to unsigned integers."""
    codes, scale, zero_point = weight
    is_exact = is_exact_signed(codes, grid.bits)
    is_signed = is_exact or target == "vnni"
    dtype = torch.int8 if is_signed else torch.uint8
    shift = 0 if is_signed else 128
    zero_point = torch.zeros(()) if zero_point is None else zero_point.flatten()
    parts = {
        "codes": (codes.T + shift).to(dtype),
        "scale": scale.flatten(),
        "zero_point": (zero_point + shift).to(dtype),
    }
    if grid.scale != "per_tensor":
        parts |= {"step": step, "middle": middle}
    product = "com.microsoft.MatMulIntegerToFloat (rounded, codes, step, scale, middle, zero_point"
    is_per_token = grid.scale == "per_token"
    if is_per_token:
        product = f"unscaled = {product}) product = Mul (unscaled, token_scale)"
    else:
        product = f"product = {product}, bias)"
    return _Form(
        "int8" if is_signed else "uint8",
        parts,
        f"{_rounded(grid)} {product}",
        grid,
        adds_bias=not is_per_token,
        saturates=is_signed and not is_exact,
    )


def _rounded(grid: InputGrid) -> str:
    """The formula of an input's unsigned codes, and of what one of them is worth and which one is 0."""
    steps = (1 << grid.bits) - 1
    if grid.scale == "per_tensor" and steps == 255:
        return "rounded, step, middle = DynamicQuantizeLinear (x)"
    scaled = {
        "per_tensor": _TENSOR_SCALE,
        "per_token": _TOKEN_SCALE,
        "static": "scaled = Identity (x)",
    }
    formula = scaled[grid.scale].replace("$steps", str(steps))
    if steps == 255:
        # The operator itself clips where a byte ends.
        return f"{formula} rounded = QuantizeLinear (scaled, step, middle)"
    return f"""
      {formula}
      unclipped = QuantizeLinear (scaled, step, middle)
      fewest = Constant <value = uint8 {{0}}> ()
      most = Constant <value = uint8 {{{steps}}}> ()
      rounded = Clip (unclipped, fewest, most)
    """


def multiplies_integers(layer: Any, weight: Quantized) -> bool:
    """True if a layer can multiply integers of 8 bits: a linear one with one scale in a row."""
    return bool(layer.kind == "linear" and weight.scale.shape[1] == 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Put unsigned codes `[rows, columns]` into bytes, the first ones into the lowest bits."""
    count = 8 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % count)).int()
    shifts = torch.arange(count, dtype=torch.int32) * bits
    parts = padded.reshape(len(padded), -1, count) << shifts
    return parts.sum(-1).to(torch.uint8)


def _optimize(model: Any) -> None:
    from onnx_ir.passes.common import (
        ClearMetadataAndDocStringPass,
        CommonSubexpressionEliminationPass,
    )
    from onnxscript.optimizer import optimize_ir

    def should_fold(node: Any) -> bool | None:
        names = [value.name for value in node.inputs if value]
        # The default would fold small integer weights into float ones.
        has_integers = any(n.endswith((".codes", ".zero_point")) for n in names)
        return False if has_integers else None

    optimize_ir(model, should_fold=should_fold)
    CommonSubexpressionEliminationPass()(model)
    # Stack traces, with the paths of this machine.
    ClearMetadataAndDocStringPass()(model)


def _keep_sums(graph: Any) -> None:
    """Write the sum before a LayerNormalization as Sum.

    ONNX Runtime (1.31) fuses Add with it to SkipLayerNormalization, which takes longer
    on a CPU than both.
    """
    for node in graph:
        if node.op_type == "LayerNormalization":
            before = node.inputs[0].producer()
            if (
                before is not None
                and before.op_type == "Add"
                and not any(value.is_initializer() for value in before.inputs)
            ):
                before.op_type = "Sum"


def _guard(model: Any) -> None:
    """Let the model fail where four products 255 * 127 do not sum to 129,540, which is where pairs saturate.

    ONNX Runtime computes it once, when the model is loaded, with the kernel that
    multiplies the layers.
    """
    from onnx_ir.passes.common import InlinePass

    unguarded = set(model.graph)
    graph = _Graph(model)
    answers = model.graph.outputs[0]
    checked = graph.add(_GUARD, answers=answers)
    graph.replace(answers, checked)
    checked.producer().replace_input_with(0, answers)
    InlinePass()(model)
    del model.opset_imports[_DOMAIN]
    *nodes, _ = [node for node in model.graph if node not in unguarded]
    for node in nodes:
        node.name = f"{GUARD} ({node.op_type})"
        node.outputs[0].name = f"guard.{node.outputs[0].name}"
