"""What is known of each op type: pure, random, stateful, view, movable; unknown means unsafe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effects:
    """Facts about an op type.

    Attributes:
        known: the table knows the type; everything else is the safe answer where it does not.
        pure: same inputs, same outputs, and nothing else happens: it may be computed again.
        random: draws from a generator: never computed again.
        view: an output may share the buffer of an input, so parking it frees nothing by itself.
        movable: an output is an activation of its own that may leave the device.
        reads: input slots whose variable it reads; writes: those whose variable it overwrites.
    """

    known: bool = False
    pure: bool = False
    random: bool = False
    view: bool = False
    movable: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


UNKNOWN = Effects()


def _names(text: str) -> list[str]:
    return text.split()


# Elementwise, linear-algebra and neural-network ops, their gradients among them: pure kernels
# whose outputs are tensors of their own.
_COMPUTE = _names(
    """
    Abs Acos Acosh Add AddN AddV2 All Angle Any ApproximateEqual ArgMax ArgMin Asin Asinh Atan
    Atan2 Atanh AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BatchMatMul BatchMatMulV2
    BatchMatMulV3 BatchNormWithGlobalNormalization BatchNormWithGlobalNormalizationGrad
    BatchToSpace BatchToSpaceND Betainc BiasAdd BiasAddGrad Bincount BitwiseAnd BitwiseOr
    BitwiseXor BroadcastTo Bucketize Cast Ceil Cholesky CholeskyGrad ClipByValue
    Complex ComplexAbs Concat ConcatV2 Conj Conv Conv2D Conv2DBackpropFilter
    Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilter
    Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 Cos Cosh CropAndResize
    CropAndResizeGradBoxes CropAndResizeGradImage Cross Cumprod Cumsum CumulativeLogsumexp
    DataFormatVecPermute DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
    DepthwiseConv2dNativeBackpropInput Diag DiagPart Digamma Dilation2D Dilation2DBackpropFilter
    Dilation2DBackpropInput Div DivNoNan DynamicPartition DynamicStitch Einsum Elu EluGrad Equal
    Erf Erfc Erfinv Exp Expm1 ExtractImagePatches FFT FFT2D FFT3D FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxVars Fill Floor FloorDiv FloorMod FractionalAvgPoolGrad FusedBatchNorm
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2
    FusedBatchNormV3 Gather GatherNd GatherV2 Greater GreaterEqual IFFT IFFT2D IFFT3D IRFFT
    IRFFT2D IRFFT3D Igamma IgammaGradA Igammac Imag InTopK InTopKV2 Inv InvGrad
    InvertPermutation IsFinite IsInf IsNan L2Loss LRN LRNGrad LeakyRelu LeakyReluGrad Less
    LessEqual Lgamma Log Log1p LogMatrixDeterminant LogSoftmax LogicalAnd LogicalNot LogicalOr
    MatMul MatrixBandPart MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2
    MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixInverse MatrixSetDiag MatrixSetDiagV2
    MatrixSetDiagV3 MatrixSolve MatrixTriangularSolve Max MaxPool MaxPool3D MaxPool3DGrad
    MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradV2
    MaxPoolGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Maximum Mean Min Minimum MirrorPad
    MirrorPadGrad Mod Mul MulNoNan Ndtri Neg NextAfter NonMaxSuppressionV3 NotEqual OneHot
    OnesLike Pack Pad PadV2 ParallelDynamicStitch Polygamma Pow Prod Qr RFFT RFFT2D RFFT3D Range
    Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad ResizeArea
    ResizeBicubic ResizeBicubicGrad ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor
    ResizeNearestNeighborGrad Reverse ReverseSequence ReverseV2 RightShift Rint Roll Round Rsqrt
    RsqrtGrad ScaleAndTranslate ScaleAndTranslateGrad ScatterNd SegmentMax SegmentMean
    SegmentMin SegmentProd SegmentSum Select SelectV2 SelfAdjointEigV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Slice Snapshot Softmax SoftmaxCrossEntropyWithLogits Softplus
    SoftplusGrad Softsign SoftsignGrad SpaceToBatch SpaceToBatchND SpaceToDepth
    SparseSegmentMean SparseSegmentMeanGrad SparseSegmentSqrtN SparseSegmentSqrtNGrad
    SparseSegmentSum SparseSoftmaxCrossEntropyWithLogits SparseTensorDenseMatMul SparseToDense
    Split SplitV Sqrt SqrtGrad Square SquaredDifference StridedSlice StridedSliceGrad Sub Sum
    Svd Tan Tanh TanhGrad TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub
    TensorScatterUpdate Tile TopK TopKV2 Transpose ConjugateTranspose TruncateDiv TruncateMod
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum Where Xdivy
    Xlog1py Xlogy ZerosLike Zeta _FusedBatchNormEx _FusedConv2D _FusedMatMul
    """
)
# Pure, but their outputs are shapes, indices or other small host-side numbers.
_SHAPE = _names(
    """
    BroadcastArgs BroadcastGradientArgs ConcatOffset Const LinSpace Rank Shape
    ShapeN Size HostConst UnravelIndex Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2
    ListDiff
    """
)
_VIEW = _names(
    """
    Bitcast EnsureShape ExpandDims Identity IdentityN PlaceholderWithDefault PreventGradient
    Reshape Squeeze StopGradient Unpack
    """
)
_RANDOM = _names(
    """
    Multinomial ParameterizedTruncatedNormal RandomGamma RandomGammaGrad RandomPoisson
    RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt
    StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
    TruncatedNormal RngReadAndSkip FractionalMaxPool FractionalAvgPool
    """
)
# Counter-based generators: pure functions of their seed, though what they draw is cheap to keep.
_STATELESS_RANDOM = _names(
    """
    StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomUniformInt
    StatelessRandomUniformIntV2 StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
    StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal
    StatelessTruncatedNormalV2 StatelessRandomBinomial
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessMultinomial
    """
)
_READ: dict[str, tuple[int, ...]] = {
    "ReadVariableOp": (0,),
    "ResourceGather": (0,),
    "ResourceGatherNd": (0,),
}
_OWNERS = {"VarHandleOp", "VariableV2", "Variable", "TemporaryVariable"}
_WRITE: dict[str, tuple[int, ...]] = {
    "AssignVariableOp": (0,), "AssignAddVariableOp": (0,), "AssignSubVariableOp": (0,),
    "Assign": (0,), "AssignAdd": (0,), "AssignSub": (0,),
    "ResourceScatterAdd": (0,), "ResourceScatterSub": (0,), "ResourceScatterUpdate": (0,),
    "ResourceScatterMul": (0,), "ResourceScatterDiv": (0,), "ResourceScatterMin": (0,),
    "ResourceScatterMax": (0,), "ResourceScatterNdUpdate": (0,), "ResourceScatterNdAdd": (0,),
    "ResourceScatterNdSub": (0,), "ResourceStridedSliceAssign": (0,),
    "ScatterAdd": (0,), "ScatterSub": (0,), "ScatterUpdate": (0,), "ScatterMul": (0,),
    "ScatterDiv": (0,), "ScatterNdUpdate": (0,), "ScatterNdAdd": (0,), "ScatterNdSub": (0,),
    "ScatterMin": (0,), "ScatterMax": (0,),
}  # fmt: skip
# Optimizer kernels: how many of the first inputs are variables that they overwrite.
_APPLY = {
    "GradientDescent": 1, "ProximalGradientDescent": 1, "Momentum": 2, "KerasMomentum": 2,
    "Adagrad": 2, "AdagradV2": 2, "AdagradDA": 3, "ProximalAdagrad": 2, "Adadelta": 3, "Adam": 3,
    "AdamWithAmsgrad": 4, "AdaMax": 3, "RMSProp": 3, "CenteredRMSProp": 4, "Ftrl": 3, "FtrlV2": 3,
    "AddSign": 2, "PowerSign": 2,
}  # fmt: skip
_WRITE |= {
    f"{prefix}{name}": tuple(range(count))
    for name, count in _APPLY.items()
    for prefix in ("Apply", "ResourceApply", "SparseApply", "ResourceSparseApply")
}
CONTROL_FLOW = frozenset(
    f"{ref}{name}"
    for ref in ("", "Ref")
    for name in ("Enter", "Exit", "Switch", "Merge", "NextIteration")
) | {"LoopCond", "NoOp", "ControlTrigger", "Abort"}
FUNCTIONAL = frozenset(
    _names(
        """
    PartitionedCall StatefulPartitionedCall If StatelessIf While StatelessWhile Case
    StatelessCase SymbolicGradient RemoteCall For
    """
    )
)  # their bodies stay closed: one opaque vertex each

_TABLE: dict[str, Effects] = {name: Effects(True, pure=True, movable=True) for name in _COMPUTE}
_TABLE |= {name: Effects(True, pure=True) for name in _SHAPE}
_TABLE |= {name: Effects(True, pure=True, view=True, movable=True) for name in _VIEW}
_TABLE |= {name: Effects(True, random=True) for name in _RANDOM}
_TABLE |= {name: Effects(True, pure=True) for name in _STATELESS_RANDOM}
_TABLE |= {name: Effects(True, reads=slots, view=True) for name, slots in _READ.items()}
_TABLE |= {name: Effects(True, reads=slots, writes=slots) for name, slots in _WRITE.items()}
_TABLE |= {name: Effects(True) for name in (*_OWNERS, *CONTROL_FLOW, *FUNCTIONAL)}
_TABLE |= {
    name: Effects(True)
    for name in _names(
        """
    Placeholder _Arg _Retval Assert CheckNumerics Print PrintV2 VarIsInitializedOp DeepCopy
    StatelessRandomGetAlg
    """
    )
}
# Kernels that TensorFlow neither merges with a neighbour nor replaces: a control edge
# from one of them changes nothing but the order. (The remapper would give up the fusion of, say, a
# BiasAdd that something waits for, and the numbers would change in their last bits. Sums over no
# axis, slices of a whole and the like are replaced by what they read, which then is waited for.)
_SIGNALS = frozenset(
    _names(
        """
    ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad TanhGrad SigmoidGrad SoftplusGrad
    SoftsignGrad FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
    Conv2DBackpropInput Conv2DBackpropInputV2 Conv2DBackpropFilter Conv2DBackpropFilterV2
    Conv3DBackpropInput Conv3DBackpropInputV2 Conv3DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter MaxPool MaxPoolV2
    MaxPool3D MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad AvgPool AvgPool3D AvgPoolGrad
    AvgPool3DGrad Concat ConcatV2 StridedSliceGrad Softmax LogSoftmax
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits ResizeBilinear
    ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad ResizeBicubic
    ResizeBicubicGrad Gather GatherV2 GatherNd ScatterNd UnsortedSegmentSum DynamicStitch LRN
    LRNGrad Cumsum Einsum MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D
    DepthwiseConv2dNative SqrtGrad RsqrtGrad
    """
    )
)
# What the remapper may pull into the kernel of a product or convolution that comes before it.
_PULLED_IN = frozenset(
    _names(
        """
    BiasAdd Add AddV2 AddN Sub Mul Maximum Relu Relu6 Elu LeakyRelu Tanh Sigmoid Softplus Squeeze
    Reshape Identity Cast FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Softmax
    """
    )
)
_PRODUCTS = frozenset(
    _names(
        """
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D Conv3D DepthwiseConv2dNative
    """
    )
)


def signals(op_type: str, readers: Iterable[str]) -> bool:
    """Tell whether others may wait for such an operation without a change of any number.

    Args:
        op_type: its type.
        readers: the types of the operations that read what it makes.
    """
    if op_type not in _SIGNALS:
        return False
    return op_type not in _PRODUCTS or not any(reader in _PULLED_IN for reader in readers)


def vanishes(op_type: str, readers: Iterable[str]) -> bool:
    """Tell whether what such an operation makes may never exist, as its readers pull it in.

    TensorFlow's oneDNN pass merges a Pad with the convolution that reads it and with the gradient
    of that convolution's weights. To park it would bring it into being, and change the numbers in
    their last bits.

    Args:
        op_type: its type.
        readers: the types of the operations that read what it makes.
    """
    return op_type in ("Pad", "PadV2") and any(reader in _PRODUCTS for reader in readers)


# oneDNN's backward kernel is taken only where it reads, in this slot, what the forward one made.
_PAIRS = {
    ("MaxPool", "MaxPoolGrad"): 1,
    ("MaxPool3D", "MaxPool3DGrad"): 1,
    ("LRN", "LRNGrad"): 2,
}


def paired(op_type: str, reader: str, slot: int) -> bool:
    """Tell whether TensorFlow's CPU pass looks at two operations as a pair.

    Which of several equal maxima gets a gradient, and in which order sums are taken, differs
    between oneDNN's kernel and TensorFlow's own: a copy between the two would change numbers.

    Args:
        op_type: the type of the operation of the forward phase.
        reader: the type of one that reads what it makes.
        slot: the input slot in which it does.
    """
    return _PAIRS.get((op_type, reader)) == slot


def of(op_type: str) -> Effects:
    """Return what is known of an op type; of an unknown one, that nothing is."""
    return _TABLE.get(op_type, UNKNOWN)


def gathers(op_type: str) -> bool:
    """Tell whether operations of this type put tensors together and compute nothing."""
    return op_type == "ConcatV2"


def takes_shape(op_type: str) -> bool:
    """Tell whether operations of this type look at the shape of their inputs only."""
    return op_type in ("Shape", "ShapeN", "Size", "Rank")


def owns_variable(op_type: str) -> bool:
    """Tell whether operations of this type are the home of a variable."""
    return op_type in _OWNERS
