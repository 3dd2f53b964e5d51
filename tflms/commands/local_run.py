"""``python -m tflms local-run``: start one process per chunk on this machine and watch them."""

from __future__ import annotations

import argparse
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from tflms.errors import ConfigError
from tflms.local_updates.cluster import SECRET_VARIABLE, VARIABLE, describe

_CHILD = "TFLMS_LOCAL_RUN_CHILD"
_POLL_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--chunks", type=int, required=True, help="how many chunks, one process each"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that the processes listen on")
    parser.add_argument("--port", type=int, default=0, help="first port; 0 takes free ones")
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds that the others have after one has failed",
    )
    parser.add_argument("script", help="script that builds the model and calls LocalTrainer.fit")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Run the script once per chunk and return the first exit status that is not 0."""
    if os.environ.get(_CHILD):
        return _child(args.script, args.arguments)
    if args.chunks < 1:
        raise ConfigError(f"--chunks {args.chunks} makes no sense; use 1 or more")
    if not os.path.exists(args.script):
        raise ConfigError(f"there is no script {args.script!r}")
    ports = _free_ports(args.chunks, args.host, args.port)
    addresses = [f"{args.host}:{port}" for port in ports]
    secret = secrets.token_hex(16)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, too
    processes: list[subprocess.Popen[bytes]] = []
    for index in range(args.chunks):
        environment = {
            **os.environ,
            VARIABLE: describe(addresses, index),
            SECRET_VARIABLE: secret,
            _CHILD: "1",
        }
        command = [sys.executable, "-m", "tflms.commands.local_run", "--chunks", str(args.chunks)]
        command += [args.script, *args.arguments]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        return _watch(processes, grace=args.grace)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _watch(processes: Sequence[subprocess.Popen[bytes]], *, grace: float) -> int:
    """Wait for all; when one fails, give the others some time to end by themselves."""
    failed_at: float | None = None
    status = 0
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        bad = [code for code in codes if code not in (None, 0)]
        if bad and failed_at is None:
            failed_at = time.monotonic()
            status = int(bad[0] or 1)
        if failed_at is not None and time.monotonic() - failed_at > grace:
            return status
        time.sleep(_POLL_SECONDS)
    return status or next((process.returncode for process in processes if process.returncode), 0)


def _free_ports(count: int, host: str, first: int) -> list[int]:
    if first:
        return list(range(first, first + count))
    held = []
    for _ in range(count):
        listener = socket.socket()
        listener.bind((host, 0))
        held.append(listener)
    ports = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return ports


def _child(script: str, arguments: Sequence[str]) -> int:
    """Run the script in this process and leave without waiting for TensorFlow's server threads."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """End this process when ``local-run`` is gone, however that came about."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(143)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; what ``python -m tflms.commands.local_run`` calls."""
    parser = argparse.ArgumentParser(prog="python -m tflms local-run", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
