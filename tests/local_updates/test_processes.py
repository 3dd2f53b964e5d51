from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import digest
from tests.local_updates.process_script import fit, trainer_for
from tflms.commands.local_throughput import chunked_net
from tflms.errors import ConfigError
from tflms.local_updates import ChunkError
from tflms.local_updates.channels import Channel, pack
from tflms.local_updates.cluster import Cluster, describe, read_cluster
from tflms.local_updates.pipeline import PipelineTrainer
from tflms.local_updates.wire import Gate, Peer

SCRIPT = Path(__file__).with_name("process_script.py")
ROOT = SCRIPT.parents[2]
SECRET = "0123456789abcdef"


EQUAL = {
    # In the first case chunk 2 is slow and the queues short: the others wait, nothing is lost. In
    # the third one the processes start one after another.
    "chunked,1,slow": "chunked",
    "chunked,2,plain": "chunked",
    "chunked,8,late": "chunked",
    "overlapping,2,plain": "overlapping",
    "backprop,2,plain": "backprop",
}
SAVED, RESUMED = "chunked,2,saved", "chunked,2,resumed"
FAULTS = {
    "chunked,2,exception": r"chunk 1 stopped at batch 2: ValueError: injected",
    "chunked,2,nan": r"chunk \d stopped at batch \d: its loss is no number",
    "chunked,2,other model": r"chunk 1 stopped before its first batch: its model, split",
    "chunked,2,hang": r"chunk [12] stopped at batch \d: (no progress for 5 s|.*took no message)",
    "chunked,2,frozen": r"chunk [12] stopped at batch \d: .*(not answer|no message|no progress)",
    "chunked,2,killed": r"chunk 1 stopped at batch \d: .*gone",  # the last: a process less
}


def launch(chunks, script, *arguments, grace=30):
    """Run a script as users do, and return how it ended."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tflms", "local-run", "--chunks", str(chunks)]
    command += ["--grace", str(grace)]
    return subprocess.run(
        [*command, str(script), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per case, what each of three processes told; all cases run in one launch."""
    result = tmp_path_factory.mktemp("processes") / "result"
    run = launch(3, SCRIPT, result, *EQUAL, SAVED, RESUMED, *FAULTS)
    found = {}
    for index in range(3):
        path = Path(f"{result}.{index}")
        for line in path.read_text().splitlines() if path.exists() else []:
            facts = json.loads(line)
            found.setdefault(facts["case"], {})[index] = facts
    missing = [case for case in [*EQUAL, SAVED, RESUMED, *FAULTS] if case not in found]
    assert not missing, run.stdout + run.stderr[-3000:]
    return {**found, "status": run.returncode}


@functools.cache
def fused(method):
    trainer = trainer_for("fused", method, 2)
    history = fit(trainer)
    return digest(trainer), history.history


@pytest.mark.parametrize("case", EQUAL)
def test_three_processes_train_as_one_graph_does_bit_for_bit(outcomes, case):
    first, *others = [outcomes[case][index] for index in range(3)]
    assert (first["digest"], first["history"]) == fused(EQUAL[case])
    assert all(other["served"] for other in others)
    assert "ConfigError" in first["again"] and "have ended" in first["again"]


def test_a_run_of_processes_resumed_within_an_epoch_equals_an_uninterrupted_one(outcomes):
    whole, resumed = outcomes[SAVED][0], outcomes[RESUMED][0]
    assert resumed["digest"] == whole["digest"]
    last = {name: values[-1:] for name, values in whole["history"].items()}
    assert {name: values[-1:] for name, values in resumed["history"].items()} == last


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_ends_every_process_with_an_error_that_names_chunk_and_batch(outcomes, case):
    told = outcomes[case]
    assert set(told) == ({0, 2} if case.endswith("killed") else {0, 1, 2})
    for index, facts in told.items():
        assert facts["kind"] == "error", facts
        if index != 1 and "nan" not in case:
            assert facts["chunk"] == 1, facts  # a frozen process itself blames whom it left waiting
        assert re.search(FAULTS[case], facts["error"]), facts
        assert facts["seconds"] < 40
    assert outcomes["status"] != 0  # one was killed


def test_local_run_ends_processes_that_are_stuck_after_another_has_failed(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import json, os, sys, time\n"
        "index = json.loads(os.environ['TFLMS_CLUSTER'])['task']['index']\n"
        "sys.exit(7) if index else time.sleep(100)\n"
    )
    started = time.monotonic()
    assert launch(2, script, grace=0.5).returncode == 7
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_local_run_however_it_ends(tmp_path, number):
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import os, sys, time\n"
        "open(f'{sys.argv[1]}/{os.getpid()}.pid', 'w').close()\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "tflms", "local-run", "--chunks", "2", script, tmp_path]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 30
    while len(pids := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(timeout=20) != 0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_cut_carries_half_the_bytes_of_pipelined_backpropagation(tmp_path):
    # Both counted on packed messages with headers and labels: over real processes here, the rival
    # over the same format. 1 MiB of activations a batch.
    script = ROOT / "tflms" / "commands" / "local_throughput.py"
    run = launch(2, script, tmp_path / "result", "two", 256, 4, 1)
    assert run.returncode == 0, run.stderr[-2000:]
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
    with pytest.raises(ChunkError, match="second trainer"):
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
