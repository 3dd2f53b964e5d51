"""Training steps as functions: long skips, two states, two optimizers, gradients of gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

BATCH = 256


def _weights(*shapes: tuple[int, ...]) -> list[Any]:
    scale = [float(tf.reduce_prod(shape[:-1])) ** -0.5 for shape in shapes]
    return [
        tf.Variable(tf.random.stateless_normal(shape, [i, 7]) * scale[i])
        for i, shape in enumerate(shapes)
    ]


def _learn(variables: list[Any], gradients: list[Any]) -> None:
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.05 * tf.cast(gradient, variable.dtype))


def unet() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Convolutions on three resolutions, with two long skips and a dropout between."""
    shapes = [(3, 3, 4, 8), (3, 3, 8, 8), (3, 3, 8, 8), (3, 3, 8, 8), (3, 3, 8, 8), (3, 3, 16, 8),
              (3, 3, 16, 8), (1, 1, 8, 1)]  # fmt: skip
    w = _weights(*shapes)

    def step(images: Any) -> Any:
        with tf.GradientTape() as tape:
            h, skips = images, []
            for i in range(2):
                h = tf.nn.relu(tf.nn.conv2d(h, w[2 * i], 1, "SAME"))
                h = tf.nn.relu(tf.nn.conv2d(h, w[2 * i + 1], 1, "SAME"))
                skips.append(h)
                h = tf.nn.max_pool2d(h, 2, 2, "SAME")
            h = tf.nn.dropout(tf.nn.relu(tf.nn.conv2d(h, w[4], 1, "SAME")), 0.2, seed=3)
            for i, skip in enumerate(reversed(skips)):
                h = tf.repeat(tf.repeat(h, 2, 1), 2, 2)
                h = tf.nn.relu(tf.nn.conv2d(tf.concat([h, skip], 3), w[5 + i], 1, "SAME"))
            loss = tf.reduce_mean(tf.square(tf.nn.conv2d(h, w[7], 1, "SAME") - 1.0))
        _learn(w, tape.gradient(loss, w))
        return loss

    return step, w, (tf.random.stateless_normal([4, 32, 32, 4], [9, 9]),)


def lstm() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """An unrolled LSTM: two states from step to step, and its results read at the end."""
    w = _weights((32, 64), (16, 1))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = c = tf.zeros([BATCH, 16])
            results = []
            for t in range(8):
                i, f, o, u = tf.split(tf.concat([x[:, t], h], 1) @ w[0], 4, 1)
                c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(u)
                h = tf.sigmoid(o) * tf.tanh(c)
                results.append(h @ w[1])
            loss = tf.reduce_mean(tf.square(tf.concat(results, 1) - 0.5))
        _learn(w, tape.gradient(loss, w))
        return loss

    return step, w, (tf.random.stateless_normal([BATCH, 8, 16], [9, 9]),)


def _deep(x: Any, layers: list[Any]) -> Any:
    for weight in layers[:-1]:
        x = tf.tanh(x @ weight)
    return x @ layers[-1]


def gan() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Two networks, two losses and two gradient computations in one step."""
    made = _weights(*[(16, 16)] * 5)
    judge = _weights(*[(16, 16)] * 4, (16, 1))

    def step(z: Any, real: Any) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            fake = _deep(z, made)
            on_real, on_fake = _deep(real, judge), _deep(fake, judge)
            loss = tf.reduce_mean(tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake))
            other = tf.reduce_mean(tf.nn.softplus(-on_fake))
        judged, learned = first.gradient(loss, judge), second.gradient(other, made)
        _learn(judge, judged)
        _learn(made, learned)
        return loss, other

    data = (tf.random.stateless_normal([BATCH, 16], [i, 9]) for i in range(2))
    return step, [*made, *judge], tuple(data)


def penalty() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """A loss that holds the length of a gradient: a WGAN's critic."""
    critic = _weights(*[(16, 16)] * 4, (16, 1))

    def step(real: Any, fake: Any) -> Any:
        with tf.GradientTape() as tape:
            mix = 0.3 * real + 0.7 * fake
            with tf.GradientTape() as inner:
                inner.watch(mix)
                judged = tf.reduce_sum(_deep(mix, critic))
            slope = inner.gradient(judged, mix)
            length = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-8)
            loss = tf.reduce_mean(_deep(fake, critic) - _deep(real, critic))
            loss += 10.0 * tf.reduce_mean(tf.square(length - 1.0))
        _learn(critic, tape.gradient(loss, critic))
        return loss

    data = (tf.random.stateless_normal([BATCH, 16], [i, 9]) for i in range(2))
    return step, critic, tuple(data)


def mixed() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Float16 layers on a frozen embedding of ids, with a skip across them and two outputs."""
    table = tf.constant(tf.random.stateless_normal([40, 16], [4, 4]))
    w = _weights(*[(16, 16)] * 7, (16, 1), (16, 1))

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            first = h = tf.cast(tf.gather(table, ids), tf.float16) @ tf.cast(w[0], tf.float16)
            for weight in w[1:7]:
                h = tf.nn.relu(h @ tf.cast(weight, tf.float16))
            h = tf.cast(h + first, tf.float32)
            losses = [tf.reduce_mean(tf.square(h @ head - 1.0)) for head in w[7:]]
            loss = losses[0] + 0.5 * losses[1]
        _learn(w, tape.gradient(loss, w))
        return losses

    return step, w, (tf.range(BATCH) % 40,)


def rows() -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Products with constants, quotients, sums of several: they round by who else reads them."""
    w = _weights(*[(64, 64)] * 9)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(0, 9, 3):
                h = tf.nn.dropout(tf.nn.gelu(h @ w[i]), 0.2, seed=i)
                h = h @ w[i + 1]
                h = 1.1 * h / (1.0 + tf.exp(-1.7 * h))
                h = h @ w[i + 2]
                h = tf.add_n([tf.tanh(h), 0.3 * h, tf.sigmoid(h)])
            loss = tf.reduce_mean(h**2)
        _learn(w, tape.gradient(loss, w))
        return loss

    return step, w, (tf.random.stateless_normal([BATCH, 64], [9, 9]),)


def run(kind: str, traced: Any, *, calls: int = 2) -> dict[str, bytes]:
    """Run a step; results of all calls, and the variables behind them, as bytes."""
    tf.random.set_seed(5)
    step, variables, arguments = globals()[kind]()
    call = traced(step)
    found = {}
    for number in range(calls):
        results = tf.nest.flatten(call(*arguments))
        found |= {f"result {number} {i}": r.numpy().tobytes() for i, r in enumerate(results)}
    return found | {f"variable {i}": v.numpy().tobytes() for i, v in enumerate(variables)}
