"""How inserted operations are called, so that they sort where the value that they stand for sorts.

TensorFlow's arithmetic optimizer sorts the inputs of commutative operations by name and regroups
chains of products and sums in that order. A copy whose name sorted elsewhere would change the order
of the factors, and with it the last bits of the result. ``-`` is the smallest character that a name
may hold: ``x--tflms/swap_in`` stands where ``x`` stood among all other names.
"""

from __future__ import annotations

MARK = "--tflms/"


def inserted(name: str, index: int, role: str) -> str:
    """Return what a copy of an operation's output is called.

    Args:
        name: the operation's; ``op:slot`` for one slot of an IdentityN.
        index: which of its outputs.
        role: what the copy is for.
    """
    name, _, slot = name.partition(":")
    index = index or int(slot or 0)
    output = f"output_{index}/" if index else ""
    return f"{name}{MARK}{output}{role}"


def is_inserted(name: str) -> bool:
    """Tell whether an operation was inserted by a rewrite, from its name."""
    return MARK in name
