"""Random training steps in the text form: forward phase, its gradients, updates, v1 branches."""

from __future__ import annotations

import random

from hypothesis import strategies as st

UNARY = (
    "Tanh",
    "Relu",
    "Sigmoid",
    "Softmax",
    "Exp",
    "Identity",
    "Reshape",
    "TheirKernel",
    "MaxPool",
)
BINARY = ("Mul", "AddV2", "MatMul", "ConcatV2", "Sub")


class _Writer:
    """Writes one step line by line, drawing what each line is."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines = ["x = Placeholder() : f32[16,8]", "p = Placeholder() : bool[]"]
        self.made = ["x"]  # values of the forward phase
        self.depth = {"x": 0}
        self.tape = []  # what the backward phase has to undo, in order
        self.variables = []
        self.ops = ["x"]
        self.count = 0

    def fresh(self, stem):
        self.count += 1
        return f"{stem}{self.count}"

    def line(self, text, *, controls=True):
        name = text.split(" = ")[0]
        if controls and self.random.random() < 0.1:
            text += f" after {self.random.choice(self.ops)}"
        self.lines.append(text)
        self.ops.append(name)
        return name

    def pick(self):
        recent = self.made[-2:]
        return self.random.choice(self.made if self.random.random() < 0.25 else recent)

    def weight(self):
        if not self.variables or self.random.random() < 0.75:
            name = self.fresh("w")
            self.line(f"{name} = VarHandleOp() : resource[] stateful", controls=False)
            self.variables.append(name)
        name = self.random.choice(self.variables)
        read = self.fresh("r")
        self.line(f"{read} = ReadVariableOp({name}) : f32[8,8]", controls=False)
        return name, read

    def forward(self):
        kind = self.random.choice(("unary", "unary", "binary", "dense", "dense", "split",
                                          "random", "cond"))  # fmt: skip
        out = self.fresh("f")
        if kind == "unary":
            a, op = self.pick(), self.random.choice(UNARY)
            self.line(f"{out} = {op}({a}) : f32[16,8]")
            self.tape.append(("unary", op, out, (a,)))
        elif kind == "binary":
            a, b = self.pick(), self.pick()
            op = self.random.choice(BINARY)
            self.line(f"{out} = {op}({a}, {b}) : f32[16,8]")
            self.tape.append(("binary", op, out, (a, b)))
        elif kind == "dense":
            a = self.pick()
            w, read = self.weight()
            self.line(f"{out} = MatMul({a}, {read}) : f32[16,8]")
            self.tape.append(("dense", w, out, (a, read)))
        elif kind == "split":
            a = self.pick()
            self.line(f"{out} = Split({a}) : f32[16,8], f32[16,8], i32[]")
            self.tape.append(("split", "", out, (a,)))
            self.made.append(f"{out}:1")
        elif kind == "random":
            a = self.pick()
            self.line(f"{out} = RandomUniform({a}) : f32[16,8] stateful")
            self.tape.append(("unary", "RandomUniform", out, (a,)))
        else:
            a = self.pick()
            s, yes, no = self.fresh("s"), self.fresh("yes"), self.fresh("no")
            self.line(f"{s} = Switch({a}, p) : f32[16,8], f32[16,8]", controls=False)
            self.line(f"{yes} = Tanh({s}:1) : f32[16,8]", controls=False)
            self.line(f"{no} = Relu({s}) : f32[16,8]", controls=False)
            self.line(f"{out} = Merge({no}, {yes}) : f32[16,8], i32[]", controls=False)
            self.ops = [op for op in self.ops if op not in (yes, no)]
            self.tape.append(("cond", "", out, (a, yes, no)))
        self.made.append(out)

    def backward(self, last):
        """Gradients of all on the tape, newest first; those that meet are added up."""
        grads = {last: [self.line(f"{self.fresh('g')} = Fill(loss, loss) : f32[16,8]")]}
        updates = []
        for kind, what, out, inputs in reversed(self.tape):
            found = grads.pop(out, []) + grads.pop(f"{out}:1", [])
            if not found:
                continue
            dy = found[0]
            if len(found) > 1:
                dy = self.line(f"{self.fresh('sum')} = AddN({', '.join(found)}) : f32[16,8]")
            if kind == "unary":
                read = self.random.choice((out, inputs[0], f"{out}, {inputs[0]}"))
                types = ("TanhGrad", "ReluGrad", "Mul", "MaxPoolGrad")
                op = self.random.choice(types)
                grads.setdefault(inputs[0], []).append(
                    self.line(f"{self.fresh('g')} = {op}({read}, {dy}) : f32[16,8]")
                )
            elif kind == "binary":
                for mine, other in (inputs, inputs[::-1]):
                    name = self.fresh("g")
                    if self.random.random() < 0.5:
                        self.line(f"{name}s = Shape({mine}) : i32[2]")
                        self.line(f"{name} = StridedSliceGrad({name}s, {dy}, {other}) : f32[16,8]")
                    else:
                        self.line(f"{name} = Mul({dy}, {other}) : f32[16,8]")
                    grads.setdefault(mine, []).append(name)
            elif kind == "dense":
                a, read = inputs
                dw = self.line(f"{self.fresh('dw')} = MatMul({a}, {dy}) : f32[8,8]")
                name = self.fresh("u")
                self.line(f"{name} = AssignSubVariableOp({what}, {dw}) stateful", controls=False)
                updates.append(name)
                grads.setdefault(a, []).append(
                    self.line(f"{self.fresh('g')} = MatMul({dy}, {read}) : f32[16,8]")
                )
            elif kind == "split":
                grads.setdefault(inputs[0], []).append(
                    self.line(f"{self.fresh('g')} = ConcatV2({dy}, {out}, {out}:1) : f32[16,8]")
                )
            else:
                a, yes, no = inputs
                s, gy, gn = self.fresh("s"), self.fresh("gy"), self.fresh("gn")
                self.line(f"{s} = Switch({dy}, p) : f32[16,8], f32[16,8]", controls=False)
                self.line(f"{gy} = TanhGrad({yes}, {s}:1) : f32[16,8]", controls=False)
                self.line(f"{gn} = ReluGrad({no}, {s}) : f32[16,8]", controls=False)
                self.ops = [op for op in self.ops if op not in (gy, gn)]
                out = self.line(
                    f"{self.fresh('g')} = Merge({gn}, {gy}) : f32[16,8], i32[]", controls=False
                )
                grads.setdefault(a, []).append(out)
        return updates


@st.composite
def steps(draw, smallest=4, largest=24):
    """A training step as text, with the fetches ``loss``, ``train`` and ``aside``.

    Hypothesis draws a seed and a size, so that most steps are large enough to hold something to
    swap, and a failing one is made smaller.
    """
    size = draw(st.integers(smallest, largest))
    return step(draw(st.integers(0, 2**32 - 1)), size)


def step(seed, size):
    """The step of a seed, with ``size`` layers."""
    writer = _Writer(seed)
    for _ in range(size):
        writer.forward()
    w, read = writer.weight()
    last = writer.made[-1]
    writer.line(f"head = MatMul({last}, {read}) : f32[16,8]")
    writer.tape.append(("dense", w, "head", (last, read)))
    writer.line("loss = Sum(head) : f32[]")
    updates = writer.backward("head")
    lines = writer.lines
    lines.append(f"train = NoOp() after {', '.join(updates)}")
    lines.append(f"aside = Exp({writer.random.choice(writer.made)}) : f32[16,8]")
    return "\n".join(lines) + "\n"


@st.composite
def dials(draw):
    """Any setting of the dials of both strategies."""
    lb = draw(st.integers(1, 6))
    return {
        "strategy": draw(st.sampled_from(("chain_rule", "direct_order"))),
        "n_tensors": draw(st.sampled_from((-1, -1, -1, 5, 2, 1, 0))),
        "lb": lb,
        "ub": lb + draw(st.sampled_from((10000, 10, 3, 1, 0))),
        "fuse_swapins": draw(st.booleans()),
        "fuse_distance": draw(st.sampled_from((None, 0, 1, 4))),
        "swap_branches": draw(st.booleans()),
        "branch_threshold": draw(st.integers(0, 6)),
    }
