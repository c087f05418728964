"""The floors of dispatch.py, and its peer: what other ways between processes take for as much, and an op alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import zmq
from common import p50_us

NULL_BYTES = 64  # of an echoed message: our own null call has 32
ARRAY_SHAPE = (4096, 1024)  # float32: 16 MiB
IN_FLIGHT = 64


# --- echo over pyzmq through three processes


def echo_broker(front: str, back: str) -> None:
    context = zmq.Context()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    clients.bind(front)
    workers.bind(back)
    worker, _ = workers.recv_multipart()
    poller = zmq.Poller()
    poller.register(clients, zmq.POLLIN)
    poller.register(workers, zmq.POLLIN)
    while True:
        for sock, _ in poller.poll():
            if sock is clients:
                message = clients.recv_multipart()
                workers.send_multipart([worker, *message])
            else:
                clients.send_multipart(workers.recv_multipart()[1:])


def echo_worker(back: str) -> None:
    sock = zmq.Context().socket(zmq.DEALER)
    sock.connect(back)
    sock.send(b"ready")
    while True:
        sock.send_multipart(sock.recv_multipart())


@contextlib.contextmanager
def echo_stack(folder: Path) -> Iterator[zmq.Socket[bytes]]:
    front, back = f"ipc://{folder}/f", f"ipc://{folder}/b"
    children = [
        multiprocessing.Process(target=echo_broker, args=(front, back), daemon=True),
        multiprocessing.Process(target=echo_worker, args=(back,), daemon=True),
    ]
    for child in children:
        child.start()
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.connect(front)
    try:
        yield sock
    finally:
        sock.close(0)
        for child in children:
            child.kill()
            child.join()


def echo_once(sock: zmq.Socket[bytes]) -> Callable[[], None]:
    message = bytes(NULL_BYTES)

    def call() -> None:
        sock.send(message)
        sock.recv()

    return call


def echo_rate(sock: zmq.Socket[bytes], count: int) -> float:
    message, open_calls = bytes(NULL_BYTES), 0
    start = time.perf_counter()
    for _ in range(count):
        sock.send(message)
        open_calls += 1
        if open_calls >= IN_FLIGHT:
            sock.recv()
            open_calls -= 1
    for _ in range(open_calls):
        sock.recv()
    return count / (time.perf_counter() - start)


# --- multiprocessing.Pipe


def pipe_echo(end: Connection) -> None:
    while True:
        end.send_bytes(end.recv_bytes())


@contextlib.contextmanager
def pipe_stack() -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=pipe_echo, args=(theirs,), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.kill()
        child.join()


# --- a round trip of Python over two eventfds


@contextlib.contextmanager
def eventfd_stack() -> Iterator[Callable[[], None]]:
    there, back = os.eventfd(0), os.eventfd(0)
    child = multiprocessing.Process(target=eventfd_echo, args=(there, back), daemon=True)
    child.start()

    def call() -> None:
        os.eventfd_write(there, 1)
        os.eventfd_read(back)

    try:
        yield call
    finally:
        child.kill()
        child.join()
        os.close(there)
        os.close(back)


def eventfd_echo(there: int, back: int) -> None:
    while True:
        os.eventfd_read(there)
        os.eventfd_write(back, 1)


# --- an op on 16 MiB in torch's own environment: in process, and behind a bare pyzmq stack

FLOOR_OPS = f"""
import statistics, sys, time, torch
torch.set_grad_enabled(False)
x = torch.randn({ARRAY_SHAPE}); out = torch.empty_like(x)
ops = {{
    b"": lambda: None,
    b"silu": lambda: torch.ops.aten.silu.out(x, out=out),
    b"softmax": lambda: torch.softmax(x, -1, out=out),
}}
for op in ops.values():
    op(), op(), op()
"""

IN_PROCESS = """
for line in sys.stdin.buffer:
    op, count = line.split()
    times = []
    for _ in range(int(count)):
        start = time.perf_counter_ns()
        ops[op]()
        times.append(time.perf_counter_ns() - start)
    print(statistics.median(times) / 1e3, flush=True)
"""

BEHIND_PYZMQ = """
import zmq
sock = zmq.Context().socket(zmq.DEALER)
sock.connect(sys.argv[1])
sock.send(b"ready")
while True:
    message = sock.recv_multipart()
    ops[message[-1].rstrip(bytes(1))]()
    sock.send_multipart(message)
"""


@contextlib.contextmanager
def in_process(python: str) -> Iterator[Callable[[str, int], float]]:
    child = subprocess.Popen(
        [python, "-c", FLOOR_OPS + IN_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None

    def measure(op: str, count: int) -> float:
        print(op, count, file=stdin, flush=True)
        return float(stdout.readline())

    try:
        measure("silu", 3)
        yield measure
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def behind_pyzmq(python: str) -> Iterator[Callable[[str, int], float]]:
    """The bare echo stack, whose worker runs the named op on tensors of its own before it echoes."""
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        front, back = f"ipc://{folder}/f", f"ipc://{folder}/b"
        broker = multiprocessing.Process(target=echo_broker, args=(front, back), daemon=True)
        broker.start()
        worker = subprocess.Popen([python, "-c", FLOOR_OPS + BEHIND_PYZMQ, back])
        sock = zmq.Context.instance().socket(zmq.DEALER)
        sock.connect(front)

        def measure(op: str, count: int) -> float:
            message = op.encode().ljust(NULL_BYTES, bytes(1))
            return p50_us(lambda: (sock.send(message), sock.recv()), count)

        try:
            measure("silu", 3)
            yield measure
        finally:
            sock.close(0)
            worker.kill()
            worker.wait()
            broker.kill()
            broker.join()
