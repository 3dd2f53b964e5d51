"""Trains zoo graphs on the emulated accelerator, rewritten or not; runs in child processes."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

import tflms
from tflms import emulator
from tflms.zoo import graphs

v1 = tf.compat.v1
BUILDERS = {
    "mlp": lambda size: graphs.mlp(**size, device=emulator.device),
    "unet3d": lambda size: graphs.unet3d(**size, optimizer_name="sgd", device=emulator.device),
    "resnet50": lambda size: graphs.resnet50(**size, device=emulator.device),
}


def train(name, size, config, *, steps, inter_op_threads=0):
    """Run some steps; return digests of losses and variables, the peak in bytes, and the report."""
    threads = v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads, use_per_session_threads=inter_op_threads > 0
    )
    made = BUILDERS[name](size)
    report = None
    if config is not None:
        report = tflms.rewrite(
            made.graph, config, loss=made.loss, fetches=[made.train_op, made.loss]
        )
    with made.graph.as_default(), v1.Session(graph=made.graph, config=threads) as session:
        session.run(made.init_op)
        emulator.reset_stats()
        losses = [
            session.run([made.loss, made.train_op], made.feed_dict(i))[0] for i in range(steps)
        ]
        peak = emulator.stats().peak_bytes
        values = session.run(v1.global_variables())
    digest = hashlib.sha256()
    for value in values:
        digest.update(np.ascontiguousarray(value).tobytes())
    return {
        "losses": [np.float32(loss).tobytes().hex() for loss in losses],
        "falls": bool(losses[-1] < losses[0]),
        "variables": digest.hexdigest(),
        "peak": peak,
        "swaps": 0 if report is None else len(report.swaps),
        "to_host": 0 if report is None else report.moved_bytes,
        "predicted": None if report is None else report.predicted_peak_bytes,
    }


def compare(name, size, configs, **settings):
    """Train twice as it is, and once with each config."""
    tf.config.experimental.enable_op_determinism()
    return {
        "plain": train(name, size, None, **settings),
        "again": train(name, size, None, **settings),
        "rewritten": [train(name, size, config, **settings) for config in configs],
    }
