"""What a graph is made of: operations, values, uses, and the record of an edit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

OpId = NewType("OpId", int)
ValueId = NewType("ValueId", int)
Shape = tuple[int | None, ...]

BYTES_PER_ELEMENT = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1,
    "u64": 8, "u32": 4, "u16": 2, "u8": 1, "bool": 1, "c64": 8, "c128": 16,
    "q8": 1, "qu8": 1, "q16": 2, "qu16": 2, "q32": 4, "i4": 1, "u4": 1,
}  # fmt: skip
# Kinds of value that are no plain tensors: handles, references and nested containers.
OPAQUE_DTYPES = frozenset({"resource", "variant", "string", "unknown"})


class Use(NamedTuple):
    """One input slot of one operation."""

    op: OpId
    slot: int


@dataclass(slots=True)
class Value:
    """One output of an operation.

    ``dtype`` is a short name ("f32", "i64", "resource"); a trailing ``*`` marks a reference to a
    variable of control flow v1 times ("f32*"). ``shape`` is None where the rank is unknown.
    """

    id: ValueId
    op: OpId
    index: int
    dtype: str
    shape: Shape | None
    uses: list[Use] = field(default_factory=list)

    @property
    def is_ref(self) -> bool:
        """Whether the value is a reference to a variable's own buffer."""
        return self.dtype.endswith("*")

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a plain tensor: no handle, reference, string or container."""
        return not self.is_ref and self.dtype not in OPAQUE_DTYPES

    def nbytes(self, unknown: int = 1) -> int | None:
        """Return the size in bytes, an unknown leading dimension counted as ``unknown``.

        None where the rank or a later dimension is unknown, or the element has no fixed size.
        """
        element = BYTES_PER_ELEMENT.get(self.dtype.rstrip("*"))
        if element is None or self.shape is None:
            return None
        dims = list(self.shape)
        if dims and dims[0] is None:
            dims[0] = unknown
        if any(dim is None for dim in dims):
            return None
        return element * math.prod(dim for dim in dims if dim is not None)


@dataclass(slots=True)
class Op:
    """One operation.

    ``role`` is empty for the user's own operations and says what an inserted one is for:
    ``swap_out``, ``swap_in``, ``swap_join``, ``identity``, ``own``, ``clone`` or ``seed``.
    ``origin`` names the operation that is repeated by a clone, or on the host by a swap_join.
    ``frame`` is the path of v1 loop frames that it runs in.
    """

    id: OpId
    name: str
    type: str
    device: str = ""
    inputs: list[ValueId] = field(default_factory=list)
    controls: list[OpId] = field(default_factory=list)
    outputs: list[ValueId] = field(default_factory=list)
    stateful: bool = False
    frame: str = ""
    colocation: tuple[str, ...] = ()
    role: str = ""
    origin: OpId | None = None
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def joins_step(self) -> bool:
        """Whether it was inserted and runs in the step, not in the variables' initialisation."""
        return self.role not in ("", "own")

    @property
    def repeats(self) -> bool:
        """Whether it does what one of the user's operations does, and stands in for that."""
        return self.role in ("clone", "swap_join")


@dataclass(frozen=True, slots=True)
class Edit:
    """One primitive change, with what is needed to take it back.

    ``kind`` is "add", "drop", "rewire", "control" or "uncontrol"; ``slot``, ``old`` and ``new``
    belong to "rewire", ``other`` to the control edges.
    """

    kind: str
    op: OpId
    slot: int = -1
    old: ValueId | None = None
    new: ValueId | None = None
    other: OpId | None = None
    position: int = -1
