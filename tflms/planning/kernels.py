"""What is known of kernels beyond their effects: buffers they take over, workspace, arithmetic.

Workspaces are estimates for TensorFlow's CPU kernels (oneDNN), read off ``temp_memory_size`` of
traced steps; a measured cost model replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tflms.graph import effects
from tflms.graph.ir import Graph, Op, OpId, ValueId

# Kernels that write over an input of the same size when nobody else needs it. Fused batch
# normalization is none of them: oneDNN's writes into a buffer of its own.
_FORWARDING = """
Abs Add AddN AddV2 BiasAdd Cast ClipByValue Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor
Inv LeakyRelu LeakyReluGrad Log Log1p LogSoftmax LogicalNot Maximum Minimum Mul MulNoNan Neg Pow
RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Select SelectV2 Selu
SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax Softplus SoftplusGrad Softsign SoftsignGrad Sqrt
SqrtGrad Square SquaredDifference Sub Tanh TanhGrad Xdivy _FusedBatchNormEx
"""
FORWARDING = frozenset(_FORWARDING.split())
# Shapes that are known are folded into constants before the step runs: nothing reads the value.
SHAPE_ONLY = frozenset(["Shape", "ShapeN", "Size", "Rank"])
_CONVOLUTION_TYPES = """
Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2
Conv3DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNative
DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput _FusedConv2D
"""
_CONVOLUTIONS = frozenset(_CONVOLUTION_TYPES.split())
_MATRIX_PRODUCTS = frozenset(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"])
_CONVOLUTION_SCRATCH_NBYTES = 16 * 1024
_POOL_GRADIENTS = frozenset(["MaxPoolGrad", "MaxPoolGradV2"])
SCRATCH_FIRST = _POOL_GRADIENTS  # these ask for scratch memory before they ask for their result


_BIASES = frozenset(["BiasAdd", "Add", "AddV2", "Mul", "AddN"])
_LONGEST_GROUP = 4
SUMS = frozenset(["Add", "AddN", "AddV2"])
_FACTORS = frozenset(["Mul", "Div", "RealDiv"])
REGROUPED = SUMS | _FACTORS | {"Sub"}  # Grappler makes others of these, on all devices
_LONGEST_ROW = 16  # operations looked at
HEADS = (
    _CONVOLUTIONS | _MATRIX_PRODUCTS | frozenset(["MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"])
)


def reads_shape_only(graph: Graph, op: Op) -> bool:
    """Tell whether an operation only asks for a shape that is known before the step runs."""
    return op.type in SHAPE_ONLY and all(
        (shape := graph.value(v).shape) is not None and None not in shape for v in op.inputs
    )


def shows_input(op: Op) -> bool:
    """Tell whether an operation's results lie in the buffer of its first input."""
    return bool(op.inputs) and (effects.of(op.type).view or "moves_nothing" in op.attrs)


def in_fusible_group(graph: Graph, op_id: OpId) -> bool:
    """Tell whether an operation is a product, or follows one with a bias and an activation.

    Only where nothing else reads what lies between.
    """
    op = graph.op(op_id)
    for _ in range(_LONGEST_GROUP):
        if op.type in HEADS:
            if "Backprop" in op.type:
                return False  # gradients of convolutions are kernels of their own
            uses = graph.uses(op.outputs[0])
            return len(uses) == 1 and graph.op(uses[0].op).type in _BIASES
        if not op.inputs or op.type not in _BIASES | FORWARDING:
            return False
        first = op.inputs[0]
        if len(graph.uses(first)) != 1:
            return False
        op = graph.producer(first)
    return False


def in_sum_of_sums(graph: Graph, op_id: OpId) -> bool:
    """Tell whether Grappler may join an addition with one that it reads or that reads it.

    It also draws a common factor out of a sum of products, and regroups products of products, so
    that constants meet and broadcasts come last. In each case another order of rounding.
    """
    op = graph.op(op_id)
    if op.type not in SUMS and op.type not in _FACTORS:
        return False
    readers = [graph.op(use.op) for value in op.outputs for use in graph.uses(value)]
    if op.type in _FACTORS:
        summed = op.type == "Mul" and any(reader.type in SUMS for reader in readers)
        return summed or in_uneven_row(graph, op_id)
    makers = [graph.producer(v) for v in op.inputs]
    return any(other.type in SUMS for other in (*readers, *makers)) or all(
        maker.type == "Mul" for maker in makers
    )


def takes_in_constants(graph: Graph, op_id: OpId) -> bool:
    """Tell whether an operation is one of several products in a row that have a constant factor.

    Grappler moves the constant to another factor and regroups the rest; what it reads through a
    copy it regroups otherwise, and the product rounds otherwise.
    """
    return constant_factors(graph, op_id) > 0


def constant_factors(graph: Graph, op_id: OpId) -> int:
    """Return how many constants are factors of several products in a row that one belongs to."""
    row = _row(graph, op_id)
    makers = (graph.producer(v) for op in row for v in graph.op(op).inputs)
    constants = (maker.type == "Const" and maker.attrs.get("scalar") != 1.0 for maker in makers)
    return sum(constants) if len(row) > 1 else 0  # a factor of one vanishes


def in_uneven_row(graph: Graph, op_id: OpId) -> bool:
    """Tell whether an operation is one of several products in a row that Grappler may regroup.

    That is to bring factors of one shape together, or constants.
    """
    row = _row(graph, op_id)
    shapes = {graph.value(v).shape for op in row for v in graph.op(op).inputs}
    return len(row) > 1 and (len(shapes) > 1 or takes_in_constants(graph, op_id))


def _row(graph: Graph, op_id: OpId) -> set[OpId]:
    """Products that are factors of one another, where nobody else reads what lies between."""
    if graph.op(op_id).type not in _FACTORS:
        return set()
    found, stack = {op_id}, [op_id]
    while stack and len(found) <= _LONGEST_ROW:
        op = graph.op(stack.pop())
        near = [graph.producer(v) for v in op.inputs if len(live_readers(graph, v)) == 1]
        readers = live_readers(graph, op.outputs[0])
        near += readers if len(readers) == 1 else []
        for other in near:
            if other.type in _FACTORS and other.id not in found:
                found.add(other.id)
                stack.append(other.id)
    return found


def live_readers(graph: Graph, value: ValueId) -> list[Op]:
    """What reads a value once Grappler has taken out what nobody asks for."""
    readers = [graph.op(use.op) for use in graph.uses(value)]
    return [op for op in readers if not reads_shape_only(graph, op) and not _unread(graph, op.id)]


def _unread(graph: Graph, op_id: OpId) -> bool:
    """Tell whether nothing reads what an operation leads to: the gradient of a constant, say.

    Those that only wait for it do not count; it becomes a NoOp.
    """
    found, stack = {op_id}, [op_id]
    while stack:
        op = graph.op(stack.pop())
        if op.stateful or len(found) > _LONGEST_ROW:
            return False
        following = {use.op for value in op.outputs for use in graph.uses(value)} - found
        found |= following
        stack += following
    return True


def folded(graph: Graph, order: Sequence[OpId]) -> set[OpId]:
    """Return the operations that Grappler replaces by constants, which stay for good.

    They are computed from constants and known shapes alone. Zeros and ones of any size are among
    them, for they are short to write down.
    """
    found: set[OpId] = set()
    for op_id in order:
        op = graph.op(op_id)
        if op.stateful or op.frame:
            continue
        if reads_shape_only(graph, op):
            found.add(op_id)
        elif op.role:
            continue
        elif op.type == "Const":
            found.add(op_id)
        elif op.type in ("ZerosLike", "OnesLike"):
            if (shape := graph.value(op.outputs[0]).shape) is not None and None not in shape:
                found.add(op_id)
        elif (
            op.inputs
            and effects.of(op.type).pure
            and all(graph.value(v).op in found for v in op.inputs)
        ):
            found.add(op_id)
    return found


def reserve_nbytes(graph: Graph, value: ValueId, nbytes: Sequence[int]) -> int | None:
    """Return the size of a fused batch normalization's last output, or None for other values.

    Where ReLU follows, the two are fused and the output holds a mask of an eighth of the result;
    not so where a control edge touches one of them.
    """
    v = graph.value(value)
    op = graph.op(v.op)
    if op.type != "FusedBatchNormV3" or v.index != 5:
        return None
    uses = graph.uses(op.outputs[0])
    fused = len(uses) == 1 and graph.op(uses[0].op).type == "Relu"
    if fused:
        pair = (op, graph.op(uses[0].op))
        fused = not any(one.controls or graph.control_users(one.id) for one in pair)
    return nbytes[op.outputs[0]] // 8 if fused else 4


def workspace_nbytes(op: Op, nbytes: Sequence[int]) -> int:
    """Estimate the scratch memory of an operation on the device."""
    if op.type in _POOL_GRADIENTS and len(op.inputs) > 1:
        return 2 * nbytes[op.inputs[1]]  # where each maximum was, as 64-bit indices
    if op.type in _CONVOLUTIONS:
        touched = sum(nbytes[v] for v in (*op.inputs, *op.outputs))
        return min(_CONVOLUTION_SCRATCH_NBYTES, touched // 4)
    return 0


def flops(graph: Graph, op: Op) -> float:
    """Return the multiplications and additions of an operation, from its shapes."""
    if op.type in _MATRIX_PRODUCTS:
        sizes = [_elements(graph, v) for v in (*op.inputs[:2], op.outputs[0])]
        batch = max(1.0, _batch(graph, op))
        return 2.0 * math.sqrt(math.prod(sizes) / batch)
    if op.type in _CONVOLUTIONS:
        if "Filter" in op.type:
            kernel, result = op.outputs[0], op.inputs[-1]
        elif "Input" in op.type:
            kernel, result = op.inputs[1], op.inputs[-1]
        else:
            kernel, result = op.inputs[1], op.outputs[0]
        shape = graph.value(kernel).shape or (1,)
        depth = 1 if "Depthwise" in op.type else (shape[-2] or 1) if len(shape) > 1 else 1
        window = math.prod(d or 1 for d in shape[:-2])
        return 2.0 * _elements(graph, result) * window * depth
    return sum(_elements(graph, v) for v in op.outputs)


def _elements(graph: Graph, value: ValueId) -> float:
    return float(math.prod(d or 1 for d in graph.value(value).shape or ()))


def _batch(graph: Graph, op: Op) -> float:
    """Number of independent products: all dimensions of the result but the last two."""
    return float(math.prod(d or 1 for d in (graph.value(op.outputs[0]).shape or ())[:-2]))
