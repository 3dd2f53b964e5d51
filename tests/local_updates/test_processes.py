from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import data, digest
from tests.local_updates.process_script import trainer_for
from tests.local_updates.throughput_script import chunked_net
from tflms.errors import ConfigError
from tflms.local_updates import ChunkError
from tflms.local_updates.channels import Channel, pack
from tflms.local_updates.cluster import Cluster, describe, read_cluster
from tflms.local_updates.pipeline import PipelineTrainer
from tflms.local_updates.wire import Gate, Peer

SCRIPT = Path(__file__).with_name("process_script.py")
ROOT = SCRIPT.parents[2]
SECRET = "0123456789abcdef"


def launch(first, *, arguments=None, queue_size=2, fault="none"):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tflms.commands.local_run", "--chunks", "3"]
    command += ["--grace", "8" if fault == "hang" else "30"]
    rest = arguments or ["chunked", str(queue_size), fault]
    started = time.monotonic()
    run = subprocess.run(
        [*command, str(SCRIPT), str(first), *rest],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return run, time.monotonic() - started


def fused(method):
    x, y = data()
    trainer = trainer_for("fused", method, 2)
    keras.utils.set_random_seed(2)
    weights = np.ones(len(x), "float32")
    history = trainer.fit(
        x, y, sample_weight=weights, epochs=2, batch_size=32, verbose=0, validation_data=(x, y)
    )
    return digest(trainer), history.history


def test_three_processes_train_as_one_graph_does_bit_for_bit(tmp_path):
    # In the first case chunk 2 is slow and the queues short: the others wait, nothing is lost.
    cases = [("chunked", 1), ("chunked", 2), ("chunked", 8), ("overlapping", 2)]
    text = "/".join(f"{method},{size}" for method, size in cases)
    run, _ = launch("several", arguments=[str(tmp_path / "result"), text])
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads((tmp_path / "result").read_text())
    expected = {method: fused(method) for method in ("chunked", "overlapping")}
    for (method, _), (digest_, history, _) in zip(cases, found, strict=True):
        assert (digest_, history) == expected[method]


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("killed", r"chunk 1 stopped at batch \d: .*gone"),
        ("exception", r"chunk 1 stopped at batch 2: ValueError: injected"),
        ("hang", r"chunk [12] stopped at batch \d: no progress for 8 s|took no message"),
        ("other model", r"chunk 1 stopped before its first batch: its model, split or settings"),
    ],
)
def test_a_fault_ends_every_process_with_an_error_that_names_chunk_and_batch(
    tmp_path, fault, names
):
    run, seconds = launch(tmp_path / "result", fault=fault)
    assert run.returncode != 0
    assert not (tmp_path / "result").exists()
    told = re.findall(r"ERROR IN CHUNK (\d): ChunkError: (.*)", run.stdout)
    survivors = {0, 2} if fault in ("killed", "hang") else {0, 1, 2}
    assert {int(index) for index, _ in told} == survivors, run.stdout + run.stderr[-2000:]
    assert all(re.search(names, text) for _, text in told), told
    assert seconds < 60


def test_a_cut_carries_half_the_bytes_of_pipelined_backpropagation(tmp_path):
    # Both counted on packed messages with headers and labels: over real processes here, the rival
    # over the same format. 1 MiB of activations a batch.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    script = SCRIPT.with_name("throughput_script.py")
    command = [sys.executable, "-m", "tflms.commands.local_run", "--chunks", "2", str(script)]
    subprocess.run(
        [*command, str(tmp_path / "result"), "two", "256", "4", "1"],
        env=environment,
        capture_output=True,
        timeout=120,
        check=True,
    )
    local = json.loads((tmp_path / "result").read_text())["wire_bytes"]
    model, plan = chunked_net(256)
    rival = PipelineTrainer(model, plan, micro_batches=4)
    rival.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.zeros((256, 1024), "float32")
    rival.fit([(x, np.zeros(256, "int32"))] * 2)
    assert plan.cuts[0].nbytes <= local <= 0.51 * rival.cut_bytes[0] / 2


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_stranger_cannot_push_and_the_server_listens_on_its_address_alone():
    port = free_port()
    address = f"127.0.0.1:{port}"
    channel = Channel(4)
    gate = Gate(Cluster((address, "127.0.0.1:1"), 0, SECRET), {"forward": channel})
    stranger = Peer(Cluster((address, "127.0.0.1:1"), 1, "another-secret-00"), 0, timeout=5)
    stranger.connect()
    with pytest.raises(ConnectionError, match="secret"):
        stranger.tell("forward", {"kind": "train", "batch": 0})
    assert channel.size() == 0
    friend = Peer(Cluster((address, "127.0.0.1:1"), 1, SECRET), 0, timeout=5)
    friend.connect()
    tensors = [tf.constant([[1.5]]), tf.constant([3])]
    friend.tell("forward", {"kind": "train", "batch": 0}, pack(tensors))
    message = channel.take()
    assert [t.numpy().tolist() for t in message.tensors] == [[[1.5]], [3]]
    assert message.nbytes == friend.bytes_out
    large = [tf.random.normal([1500, 1000]), tf.constant([b"", b"x"]), tf.zeros([0])]
    friend.tell("forward", {"kind": "train", "batch": 1}, pack(large))  # 6 MB: gRPC takes 4
    for sent, taken in zip(large, channel.take().tensors, strict=True):
        np.testing.assert_array_equal(sent.numpy(), taken.numpy())
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening and all("0100007F" in entry for entry in listening)
    with pytest.raises(ChunkError, match="started twice"):
        Gate(Cluster((address, "127.0.0.1:1"), 0, SECRET), {"forward": Channel(1)})
    assert gate is not None


def test_a_full_queue_holds_the_sender_back():
    address = f"127.0.0.1:{free_port()}"
    channel = Channel(1)
    gate = Gate(Cluster((address, "127.0.0.1:1"), 0, SECRET), {"forward": channel})
    sender = Peer(Cluster((address, "127.0.0.1:1"), 1, SECRET), 0, timeout=1)
    sender.connect()
    sender.tell("forward", {"kind": "a"})
    with pytest.raises(ConnectionError, match="took no message for 1 s"):
        sender.tell("forward", {"kind": "b"})
    channel.close()  # lets the server's blocked call go
    assert gate is not None


def test_a_port_that_never_opens_ends_the_start_with_the_chunk_and_its_address():
    address = f"127.0.0.1:{free_port()}"
    peer = Peer(Cluster(("127.0.0.1:1", address), 0, SECRET), 1, timeout=0.5)
    with pytest.raises(ChunkError, match=rf"chunk 1 .*nothing listens at {address}"):
        peer.connect()


@pytest.mark.parametrize(
    ("text", "secret", "message"),
    [
        (None, SECRET, "local-run --chunks 2"),
        ("{", SECRET, "malformed"),
        (describe(["a:1", "b:2", "c:3"], 0), SECRET, "lists 3 processes, the plan has 2"),
        (describe(["a:1", "a:1"], 0), SECRET, "one address twice"),
        (describe(["a:1", "b"], 0), SECRET, "write host:port"),
        (describe(["a:1", "b:2"], 2), SECRET, "index 2"),
        (describe(["a:1", "b:2"], 0), "short", "TFLMS_SECRET"),
    ],
)
def test_a_wrong_cluster_description_is_refused(text, secret, message):
    environment = {"TFLMS_SECRET": secret}
    if text is not None:
        environment["TFLMS_CLUSTER"] = text
    with pytest.raises(ConfigError, match=message):
        read_cluster(environment, chunks=2)
