"""Run as a process of its own, with two logical devices: placement, data parallelism, rewriting."""

from __future__ import annotations

import json

import keras
import tensorflow as tf

import tflms
from tests.local_updates.local_nets import compiled, data, digest, losses, mlp
from tflms.errors import ConfigError
from tflms.local_updates import LocalTrainer, split

X, Y = data()


def run(**options):
    model = mlp(depth=2)
    trainer = compiled(LocalTrainer(model, split(model, chunks=2), timeout=30, **options))
    keras.utils.set_random_seed(2)
    trainer.fit(X, Y, batch_size=32, epochs=2, verbose=0)
    places = [
        sorted({v.value.device[-5:] for v in stage.block.variables}) for stage in trainer.stages
    ]
    return digest(trainer), places


def mirrored():
    keras.utils.set_random_seed(2)
    model = mlp(depth=2, norm=False, dropout=0)
    trainer = LocalTrainer(model, split(model, chunks=2))
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss=losses())
    return trainer.fit(X, Y, batch_size=32, epochs=3, shuffle=False, verbose=0).history


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    devices = ["/CPU:0", "/CPU:1"]
    facts = {"plain": run(), "fused": run(devices=devices)}
    facts["threads"] = run(devices=devices, runtime="threads")
    facts["one replica"] = mirrored()
    with tf.distribute.MirroredStrategy(devices).scope():
        facts["two replicas"] = mirrored()
        model = mlp(depth=2)
        try:
            LocalTrainer(model, split(model, chunks=2), runtime="threads")
        except ConfigError as refusal:
            facts["refused"] = str(refusal)
    for runtime in ("fused", "threads"):
        config = {"n_tensors": -1, "min_swap_bytes": 0, "device": "/device:CPU:0"}
        with tflms.enabled(config) as traced:
            facts[f"rewritten {runtime}"] = run(runtime=runtime)
        facts[f"swaps {runtime}"] = [len(report.swaps) for report in traced.reports]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
