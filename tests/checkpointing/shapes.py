"""Steps written as text that no single value cuts: long skips, two states, branches, two losses."""

from __future__ import annotations

LAYER = "f32[64,8]"


def _weight(name: str) -> list[str]:
    return [
        f"w{name} = VarHandleOp() : resource[] stateful",
        f"r{name} = ReadVariableOp(w{name}) : f32[8,8]",
    ]


def _layer(name: str, below: str, weight: str) -> list[str]:
    return [f"a{name} = MatMul({below}, r{weight}) : {LAYER}", f"h{name} = Tanh(a{name}) : {LAYER}"]


def _back(name: str, below: str, weight: str, gradient: str, result: str = "") -> list[str]:
    """Gradients of one layer; ``result`` names that of its input."""
    lines = [
        f"da{name} = TanhGrad(h{name}, {gradient}) : {LAYER}",
        f"dw{name} = MatMul({below}, da{name}) : f32[8,8]",
    ]
    return [*lines, f"{result} = MatMul(da{name}, r{weight}) : {LAYER}"] if result else lines


def _updates(names: list[str], given: dict[str, str] | None = None) -> list[str]:
    given = given or {}
    return [f"u{n} = AssignSubVariableOp(w{n}, {given.get(n, f'dw{n}')}) stateful" for n in names]


def long_skip(layers: int) -> str:
    """Layers 1 to n, where the result of the first is added to that of the last."""
    names = [str(i) for i in range(1, layers + 1)]
    lines = ["x = Placeholder() : f32[64,8]", "one = Const() : f32[]"]
    for i, name in enumerate(names):
        lines += _weight(name) + _layer(name, f"h{i}" if i else "x", name)
    lines += [
        f"join = AddV2(h{layers}, h1) : {LAYER}",
        f"out = Tanh(join) : {LAYER}",
        "loss = Sum(out) : f32[]",
        f"dout = Fill(one, loss) : {LAYER}",
        f"djoin = TanhGrad(out, dout) : {LAYER}",
    ]
    gradient = "djoin"
    for i in range(layers, 1, -1):
        lines += _back(str(i), f"h{i - 1}", str(i), gradient, f"db{i - 1}")
        gradient = f"db{i - 1}"
    lines += [f"dh1 = AddN(djoin, db1) : {LAYER}", *_back("1", "x", "1", "dh1"), *_updates(names)]
    return "\n".join([*lines, f"train = NoOp() after {', '.join('u' + n for n in names)}"]) + "\n"


def two_states(steps: int) -> str:
    """A recurrent network that hands on two values, h and c, without a common source."""
    names = [str(i) for i in range(1, steps + 1)]
    lines = ["x = Placeholder() : f32[64,8]", "one = Const() : f32[]", *_weight("0")]
    lines += [*_layer("0", "x", "0"), f"c0 = Exp(h0) : {LAYER}"]
    for i, name in enumerate(names):
        lines += [
            *_weight(name),
            *_layer(name, f"h{i}", name),
            f"c{name} = Mul(c{i}, h{i}) : {LAYER}",
        ]
    lines += [
        f"p = Mul(h{steps}, c{steps}) : {LAYER}",
        "loss = Sum(p) : f32[]",
        f"dp = Fill(one, loss) : {LAYER}",
        f"dh{steps} = Mul(dp, c{steps}) : {LAYER}",
        f"dc{steps} = Mul(dp, h{steps}) : {LAYER}",
    ]
    for i in range(steps, 0, -1):
        lines += _back(str(i), f"h{i - 1}", str(i), f"dh{i}", f"dm{i - 1}")
        lines += [
            f"dn{i - 1} = Mul(dc{i}, c{i - 1}) : {LAYER}",
            f"dc{i - 1} = Mul(dc{i}, h{i - 1}) : {LAYER}",
            f"dh{i - 1} = AddN(dm{i - 1}, dn{i - 1}) : {LAYER}",
        ]
    lines += [
        f"de0 = Mul(dc0, c0) : {LAYER}",
        f"ds0 = AddN(dh0, de0) : {LAYER}",
        *_back("0", "x", "0", "ds0"),
        *_updates(["0", *names]),
    ]
    ends = ", ".join("u" + n for n in ["0", *names])
    return "\n".join([*lines, f"train = NoOp() after {ends}"]) + "\n"


def two_branches(layers: int, *, apart: bool = False) -> str:
    """One network reads the data and what a second one makes: a GAN's step.

    The loss is that of the first network on both; the second network learns from another loss.
    ``apart`` leaves each its own train operation, ``train`` and ``train_g``.
    """
    made, judged = [f"g{i}" for i in range(layers)], [f"d{i}" for i in range(layers)]
    lines = [
        "x = Placeholder() : f32[64,8]",
        "z = Placeholder() : f32[64,8]",
        "one = Const() : f32[]",
    ]
    for name in (*made, *judged):
        lines += _weight(name)
    below = "z"
    for name in made:
        lines += _layer(name, below, name)
        below = f"h{name}"
    fake, ends = below, {}
    for branch, source in (("t", "x"), ("f", fake)):
        below = source
        for name in judged:
            lines += _layer(f"{name}{branch}", below, name)
            below = f"h{name}{branch}"
        ends[branch] = below
    lines += [
        f"both = AddV2({ends['t']}, {ends['f']}) : {LAYER}",
        "loss = Sum(both) : f32[]",
        f"dboth = Fill(one, loss) : {LAYER}",
        f"loss_g = Sum({ends['f']}) : f32[]",
        f"dfake = Fill(one, loss_g) : {LAYER}",
    ]
    for branch, source in (("t", "x"), ("f", fake)):
        gradient = "dboth"
        for i in reversed(range(layers)):
            name = f"{judged[i]}{branch}"
            under = f"h{judged[i - 1]}{branch}" if i else source
            lines += _back(name, under, judged[i], gradient, f"db{name}" if i else "")
            gradient = f"db{name}"
    gradient = "dfake"  # through the judge's layers on the fake, once more, to those that made it
    for i in reversed(range(layers)):
        name = judged[i]
        lines += [
            f"dga{name} = TanhGrad(h{name}f, {gradient}) : {LAYER}",
            f"dg{name} = MatMul(dga{name}, r{name}) : {LAYER}",
        ]
        gradient = f"dg{name}"
    for i in reversed(range(layers)):
        lines += _back(
            made[i], f"h{made[i - 1]}" if i else "z", made[i], gradient, f"db{made[i]}" if i else ""
        )
        gradient = f"db{made[i]}"
    lines += [f"dw{name} = AddN(dw{name}t, dw{name}f) : f32[8,8]" for name in judged]
    lines += _updates([*judged, *made])
    first, second = (", ".join("u" + n for n in names) for names in (judged, made))
    if apart:
        lines += [f"train = NoOp() after {first}", f"train_g = NoOp() after {second}, loss_g"]
    else:
        lines += [f"train = NoOp() after {first}, {second}, loss_g"]
    return "\n".join(lines) + "\n"


def unwaitable(layers: int) -> str:
    """A chain whose gradients are products that TensorFlow may fold: nothing can wait for one."""
    lines = ["x = Placeholder() : f32[64,8]", "one = Const() : f32[]", *_weight("")]
    lines += [f"b = Mul(x, r) : {LAYER}", f"h0 = Exp(b) : {LAYER}"]
    lines += [f"h{i} = Exp(h{i - 1}) : {LAYER}" for i in range(1, layers)]
    lines += [f"loss = Sum(h{layers - 1}) : f32[]", f"d{layers} = Fill(one, loss) : {LAYER}"]
    lines += [f"d{i} = Mul(d{i + 1}, h{i}) : {LAYER}" for i in reversed(range(layers))]
    lines += [f"dw = Mul(x, d0) : {LAYER}", "u = AssignSubVariableOp(w, dw) stateful"]
    return "\n".join([*lines, "train = NoOp() after u"]) + "\n"
