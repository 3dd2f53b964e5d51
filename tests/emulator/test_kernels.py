"""What runs on the device, with the CPU's numbers: all kinds of tensors, ops and front ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.emulated import run_on_emulator


@pytest.fixture(scope="module")
def eager() -> Any:
    """Eager operations, functions and Keras."""
    return run_on_emulator(
        """
        import gc
        def place(tensor):
            return tensor.device.rpartition("device:")[2]
        def storage(tensor):
            return tensor.backing_device.rpartition("device:")[2]

        result = {}
        with tf.device(emulator.device):
            words = tf.constant(["a" * 100, "b"])
            passed = tf.identity(words)
            joined = tf.strings.join([words, words])
            numbers = tf.range(5)
            floats = tf.cast(numbers, tf.float32)
            result["strings"] = [place(passed), place(joined), joined.numpy()[1], passed.numpy()[0]]
            result["int32"] = [place(numbers), storage(numbers), storage(floats)]
            result["int32 sum"] = [int(tf.reduce_sum(numbers * numbers)), floats.numpy().tolist()]
            empty = tf.concat([tf.zeros([0, 5]), tf.ones([1, 5])], 0)
            result["empty"] = [float(tf.reduce_sum(empty)), tf.zeros([0, 5]).numpy().shape,
                               tf.matmul(tf.zeros([2, 0]), tf.zeros([0, 4])).numpy().tolist()]

        resource = tf.Variable(tf.ones([1000]))
        resource.assign_add(tf.ones([1000]))
        counter = tf.Variable(3)
        counter.assign_add(1)
        result["variables"] = [place(resource), float(resource.numpy().sum()), int(counter)]
        before = emulator.stats().bytes_in_use
        del resource
        gc.collect()
        result["a variable frees"] = before - emulator.stats().bytes_in_use

        @tf.function
        def loop(x, n):
            y = x
            for _ in tf.range(n):
                y = tf.tanh(tf.matmul(y, x))
            if tf.reduce_sum(y) > 0:
                y = y + 1.0
            else:
                y = y - 1.0
            return y, n + 1

        @tf.function
        def listed(x):
            items = tf.TensorArray(tf.float32, size=0, dynamic_size=True, clear_after_read=False)
            for i in tf.range(4):
                items = items.write(i, x * tf.cast(i, tf.float32))
            return items.stack()

        def both(function, *arguments):
            out = []
            for device in (emulator.device, "/cpu:0"):
                with tf.device(device):
                    flat = tf.nest.flatten(function(*[tf.constant(a) for a in arguments]))
                out.append([place(flat[0]), *[t.numpy() for t in flat]])
            return out

        matrix = np.random.RandomState(0).randn(4, 4).astype("f")
        result["loop"] = both(loop, matrix, np.int32(5))
        result["listed"] = both(listed, np.ones(3, "f"))
        with tf.GradientTape() as tape:
            x = tf.ones([3])
            tape.watch(x)
            y = listed(x)
        result["gradient"] = tape.gradient(y, x).numpy()

        @tf.function
        def across(x):
            with tf.device(emulator.device):
                items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[2])
            with tf.device("/cpu:0"):
                items = tf.raw_ops.TensorListPushBack(input_handle=items, tensor=[7.0, 8.0])
            with tf.device(emulator.device):
                return tf.raw_ops.TensorListStack(
                    input_handle=items, element_shape=[2], element_dtype=tf.float32)
        result["variants across"] = across(tf.ones([2, 2])).numpy()

        @tf.function
        def python(x):
            return tf.numpy_function(lambda a: a + 1, [x], tf.float32) + 1.0
        result["python"] = python(tf.ones([2])).numpy()

        rows = tf.data.Dataset.from_tensor_slices(np.arange(8, dtype="f")).map(lambda r: r * 2)
        elements = list(rows.batch(4))
        result["dataset"] = [place(elements[0]), elements[1].numpy()]

        # Keras, with everything that its default settings bring along.
        import keras
        def fit(device):
            keras.utils.set_random_seed(0)
            with tf.device(device):
                model = keras.Sequential([
                    keras.layers.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, activation="relu"),
                    keras.layers.BatchNormalization(), keras.layers.Flatten(),
                    keras.layers.Dense(3)])
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile("adam", loss, jit_compile=False)
                x = np.random.RandomState(0).randn(64, 8, 8, 3).astype("f")
                return model.fit(x, np.arange(64) % 3, epochs=2, batch_size=16, shuffle=False,
                                 verbose=0).history["loss"]
        def recurrent():
            model = keras.Sequential([
                keras.layers.Input((7,), dtype="int32"), keras.layers.Embedding(10, 4),
                keras.layers.LSTM(5), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
            return model.fit(np.arange(70).reshape(10, 7) % 10, np.ones(10), epochs=3,
                             verbose=0).history["loss"]
        emulator.reset_stats()
        result["keras"] = fit(emulator.device)
        result["keras copies"] = emulator.stats()
        result["keras on the cpu"] = fit("/cpu:0")
        result["recurrent"] = recurrent()

        @tf.function
        def small(x):
            return tf.reduce_sum(x * 2.0)
        def many(n):
            for _ in range(n):
                small(tf.ones([8])).numpy()
            return emulator.stats().bytes_in_use
        result["small calls"] = [many(100), many(2000)]
        """,
        memory_bytes="500MB",
    )


EMU = "EMU:0"


def test_strings_live_on_the_host_and_text_ops_run_there(eager: Any) -> None:
    assert eager["strings"] == [EMU, "CPU:0", "bb", "a" * 100]


def test_int32_tensors_belong_to_the_device_but_lie_on_the_host(eager: Any) -> None:
    assert eager["int32"] == [EMU, "CPU:0", EMU]
    assert eager["int32 sum"] == [30, [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_empty_tensors_have_no_bytes_and_do_no_harm(eager: Any) -> None:
    assert eager["empty"] == [5.0, [0, 5], [[0.0] * 4] * 2]


def test_variables_live_on_the_device_until_they_are_deleted(eager: Any) -> None:
    assert eager["variables"] == [EMU, 2000.0, 4]
    assert eager["a variable frees"] >= 4000


def test_functions_with_control_flow_give_the_cpus_numbers(eager: Any) -> None:
    for name in ("loop", "listed"):
        on_device, on_cpu = eager[name]
        assert (on_device[0], on_cpu[0]) == (EMU, "CPU:0")
        for got, wanted in zip(on_device[1:], on_cpu[1:], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert eager["gradient"] == [6.0] * 3


def test_tensor_lists_move_between_the_devices(eager: Any) -> None:
    assert eager["variants across"] == [[1.0, 1.0], [1.0, 1.0], [7.0, 8.0]]


def test_input_pipelines_and_python_calls_stay_on_the_host(eager: Any) -> None:
    assert eager["dataset"] == ["CPU:0", [8.0, 10.0, 12.0, 14.0]]
    assert eager["python"] == [3.0, 3.0]


def test_keras_trains_on_it_with_the_cpus_losses(eager: Any) -> None:
    np.testing.assert_allclose(eager["keras"], eager["keras on the cpu"], rtol=1e-3)
    assert eager["keras"][1] < eager["keras"][0]
    assert eager["keras copies"]["to_device_bytes"] > 2 * 64 * 8 * 8 * 3 * 4  # each batch goes in
    assert eager["recurrent"][2] < eager["recurrent"][0]


def test_thousands_of_function_calls_leave_nothing_behind(eager: Any) -> None:
    first, last = eager["small calls"]
    assert first == last


@pytest.fixture(scope="module")
def sessions() -> Any:
    """Graphs in sessions, under op determinism so that "the same" can mean every bit."""
    return run_on_emulator(
        """
        tf.config.experimental.enable_op_determinism()
        result = {}
        hidden = v1.ConfigProto(device_count={"EMU": 0})

        def network():
            keep = dict(use_resource=True)
            x = v1.placeholder(tf.float32, [4, 16, 16, 3], "x")
            labels = v1.placeholder(tf.int32, [4], "labels")
            def var(name, *shape):
                start = np.random.RandomState(len(name)).randn(*shape).astype("f") * 0.3
                return v1.get_variable(name, initializer=start, use_resource=True)
            h = x
            for i, (size, filters) in enumerate([(3, 8), (8, 12)]):
                mark = "i" * i
                k = var("k" + mark, 3, 3, size, filters)
                h = tf.nn.conv2d(h, k, 1, "SAME", name=f"conv{i}")
                h, _, _ = v1.nn.fused_batch_norm(
                    h, var("gamma" + mark, filters), var("beta" + mark, filters))
                h = tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, "SAME")
            h = tf.nn.depthwise_conv2d(h, var("depthwise", 3, 3, 12, 2), [1, 1, 1, 1], "SAME")
            h = tf.nn.avg_pool2d(h, 2, 2, "VALID")
            v = tf.reshape(h, [4, 2, 2, 2, 12])
            v = tf.nn.conv3d(v, var("volume", 3, 3, 3, 12, 6), [1] * 5, "SAME")
            k = var("upward", 2, 2, 2, 5, 6)
            v = tf.nn.conv3d_transpose(v, k, [4, 4, 4, 4, 5], [1, 2, 2, 2, 1])
            v = tf.nn.max_pool3d(v, 2, 2, "SAME")
            logits = tf.reduce_mean(v, [1, 2, 3])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            step = v1.train.AdamOptimizer(0.01).minimize(loss)
            return x, labels, loss, step

        with tf.Graph().as_default() as graph:
            x, labels, loss, step = network()
            init = v1.global_variables_initializer()
            variables = v1.global_variables()
        feed = {x: np.random.RandomState(0).randn(4, 16, 16, 3), labels: [0, 1, 2, 3]}
        def train(config=None):
            with v1.Session(graph=graph, config=config) as session:
                session.run(init)
                losses = [session.run([loss, step], feed)[0] for _ in range(5)]
                flat = np.concatenate([np.ravel(v) for v in session.run(variables)])
            return {"losses": losses, "variables": flat}
        result["trained"] = [train(), train(), train(hidden)]

        # What the full trace of a step tells.
        with v1.Session(graph=graph) as session:
            session.run(init)
            session.run(step, feed)
            trace = v1.RunMetadata()
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            session.run([loss, step], feed, options=options, run_metadata=trace)
        nodes = {}
        for device in trace.step_stats.dev_stats:
            for node in device.node_stats:
                nodes.setdefault(node.node_name, (device.device.rpartition("device:")[2], node))
        place, conv = nodes["conv1"]
        output = conv.output[0].tensor_description
        result["trace"] = {
            "device": place,
            "micros": conv.all_end_rel_micros,
            "shape": [d.size for d in output.shape.dim],
            "output bytes": output.allocation_description.requested_bytes,
            "workspace": conv.memory_stats.temp_memory_size,
            "allocations": [r.alloc_bytes for r in conv.memory[0].allocation_records],
            "allocator": conv.memory[0].allocator_name,
            "label": conv.timeline_label,
        }
        result["devices of the step"] = sorted({p for p, _ in nodes.values()})

        # Loops and conditions of both generations, ref variables, strings, in one graph each.
        def control_flow():
            x = v1.placeholder(tf.float32, [2, 4], "x")
            ones, zeros = v1.ones_initializer(), v1.zeros_initializer()
            ref = v1.get_variable("ref", [4, 4], use_resource=False, initializer=ones)
            count = v1.get_variable("count", [], tf.int32, use_resource=False, initializer=zeros)
            _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: [i + 1, tf.matmul(h, ref)],
                                 [tf.constant(0), x])
            chosen = v1.cond(tf.reduce_sum(x) > 0,
                             lambda: (x * 2, tf.size(x) + 5), lambda: (x * 3, tf.size(x)))
            text = tf.identity(tf.fill([2], "word" * 20))
            return [h, tf.gradients(h, x)[0], *chosen, v1.assign_add(count, 1), text]
        for generation in ("v1", "v2"):
            (v1.disable_control_flow_v2 if generation == "v1" else v1.enable_control_flow_v2)()
            with tf.Graph().as_default() as loops:
                fetched = control_flow()
                starts = v1.global_variables_initializer()
            kinds = {op.type for op in loops.get_operations()}
            answers = []
            for config in (None, hidden):
                with v1.Session(graph=loops, config=config) as session:
                    session.run(starts)
                    values = session.run(fetched, {"x:0": np.ones((2, 4))})
                    answers.append([v.tolist() if v.dtype != object else [t.decode() for t in v]
                                    for v in values])
            result[generation] = {"answers": answers, "frames": "Enter" in kinds,
                                  "functions": bool(kinds & {"While", "StatelessWhile"})}

        # Grappler makes one fused op of these on any device, with a kernel by oneDNN alone.
        with tf.Graph().as_default() as fused:
            y, _, _ = v1.nn.fused_batch_norm(v1.placeholder(tf.float32, [4, 8, 8, 6], "x"),
                                             tf.ones([6]), tf.zeros([6]))
            out = tf.reduce_mean(tf.nn.relu(y) ** 2)
        feed = {"x:0": np.random.RandomState(1).randn(4, 8, 8, 6)}
        result["fused"] = []
        for config in (None, hidden):
            with v1.Session(graph=fused, config=config) as session:
                result["fused"].append(float(session.run(out, feed)))

        # Text ops have no kernel there: as beside a GPU, that is said, unless placement is soft.
        with tf.Graph().as_default() as text:
            with tf.device(emulator.device):
                joined = tf.strings.join([v1.placeholder(tf.string, [], "letter"), "b"])
        try:
            with v1.Session(graph=text, config=v1.ConfigProto()) as session:
                session.run(joined, {"letter:0": "a"})
        except tf.errors.InvalidArgumentError as error:
            result["text"] = str(error)
        with v1.Session(graph=text, config=v1.ConfigProto(allow_soft_placement=True)) as session:
            result["soft"] = session.run(joined, {"letter:0": "a"})

        # 10,000 small steps, with a copy each way in each.
        with tf.Graph().as_default() as tiny:
            p = v1.placeholder(tf.float32, [8])
            zeros = v1.zeros_initializer()
            total = v1.get_variable("total", [8], use_resource=True, initializer=zeros)
            with tf.device("/cpu:0"):
                parked = p * 3.0
            advance = v1.assign_add(total, parked + p)
            starts = v1.global_variables_initializer()
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        with v1.Session(graph=tiny) as session:
            session.run(starts)
            call = session.make_callable([advance, parked], [p])
            one = np.ones(8, "f")
            for _ in range(1000):
                call(one)
            emulator.reset_stats()
            before = emulator.stats().bytes_in_use, resident()
            for _ in range(10_000):
                last = call(one)
            result["steps"] = {"device": emulator.stats().bytes_in_use - before[0],
                               "host": resident() - before[1], "total": float(last[0][0]),
                               "copies": emulator.stats()}
        result["left"] = emulator.stats().bytes_in_use
        """,
        memory_bytes="200MB",
    )


def test_a_network_trains_alike_on_both_devices(sessions: Any) -> None:
    first, again, cpu = sessions["trained"]
    assert first == again  # every bit
    np.testing.assert_allclose(first["losses"], cpu["losses"], rtol=1e-4)
    np.testing.assert_allclose(first["variables"], cpu["variables"], rtol=1e-3, atol=1e-4)
    assert first["losses"][4] < first["losses"][0]


def test_the_full_trace_tells_time_output_and_workspace_of_an_op(sessions: Any) -> None:
    trace = sessions["trace"]
    assert trace["device"] == EMU
    assert trace["micros"] > 0
    assert trace["shape"] == [4, 8, 8, 12]
    assert trace["output bytes"] == 4 * 8 * 8 * 12 * 4
    assert trace["allocator"] == "EMU_0_bfc"
    assert trace["allocations"][0] >= trace["output bytes"]
    assert sum(trace["allocations"]) == 0
    assert trace["workspace"] > 0
    assert sessions["devices of the step"] == ["CPU:0", EMU]


def test_convolutions_run_the_kernels_of_onednn(sessions: Any) -> None:
    assert "_MklNativeConv2D" in sessions["trace"]["label"]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_sessions_run_control_flow_of_both_generations(sessions: Any, generation: str) -> None:
    on_device, on_cpu = sessions[generation]["answers"]
    assert on_device == on_cpu
    assert on_device[0] == [[64.0] * 4] * 2
    assert on_device[3:] == [13, 1, ["word" * 20] * 2]
    assert sessions[generation]["frames"] == (generation == "v1")
    assert sessions[generation]["functions"] == (generation == "v2")


def test_fused_batch_norm_and_relu_run(sessions: Any) -> None:
    on_device, on_cpu = sessions["fused"]
    assert on_device == pytest.approx(on_cpu, rel=1e-5)


def test_text_ops_are_placed_as_beside_a_gpu(sessions: Any) -> None:
    assert "no supported kernel for EMU devices" in sessions["text"]
    assert sessions["soft"] == "ab"


def test_ten_thousand_small_steps_leak_nothing(sessions: Any) -> None:
    steps = sessions["steps"]
    assert steps["device"] == 0
    assert steps["host"] < 8 * 2**20
    assert steps["total"] == 4.0 * 11_000
    assert steps["copies"]["to_device_copies"] >= 10_000
    assert steps["copies"]["to_host_copies"] >= 10_000
    assert sessions["left"] == 0
