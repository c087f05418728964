"""Workers that die while they are busy or lose their GPU: what their clients and neighbours see of it."""

from __future__ import annotations

import math
import os
import random
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gpu_common import F, Row, attention, qkv, served, torch, wait_until

import layerzero as lz

KILLS, FAULTS, MINUTES = 100, 6, 9  # so many kills, or minutes: a killed worker is back after seconds
CALLS = 30  # enqueued before the worker is killed
HANG_S = 20.0
SLOW_MS = 1000.0  # worth a line
SETTLE_S = 2.0  # after which nothing may be left of a dead worker
LEAK_MIB = 64
RESTARTS = {"LAYERZERO_RESTART_BUDGET": "1000", "LAYERZERO_BACKOFF_S": "0.05", "LAYERZERO_BACKOFF_MAX_S": "0.05"}


def deaths(quick: bool) -> Iterator[Row]:
    """SIGKILL of the worker that serves, at a random moment of its work, while another one stands by."""
    q, k, v = qkv(2, 16, 4096, 128)
    ours, _ = attention(q, k, v)
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).to(q.dtype)
    backends = serving(ours, q, k, v)
    if len(backends) < 2:
        yield Row(
            "SIGKILL of the busy worker", "", "", f"not run: attention is served by {', '.join(backends) or 'none'}"
        )
        return
    others = [b["name"] for b in lz.status()["backends"] if b["name"] not in backends]
    with lz.avoid(*others) if others else nullcontext():  # one that has to compile first could come in later
        row = kills(quick, ours, right, backends)
    yield row


def kills(quick: bool, ours: Any, right: Any, backends: list[str]) -> Row:
    rng = random.Random(7)
    wrong = hung = idle = 0
    ends: dict[str, int] = {}
    recovery_ms: list[float] = []
    exits_ms: list[float] = []
    begin_anew(backends)
    free_before = free_mib(ours, backends)
    until_s = time.monotonic() + MINUTES * 60
    for number in range(5 if quick else KILLS):
        if number % 10 == 0:
            print(f"{number} kills, {wrong} wrong, typed errors {ends}", flush=True)
        if time.monotonic() > until_s:
            break
        wait_until(lambda: sum(state == "ready" for state, _ in states(backends).values()) > 1, "two workers are ready")
        ours()
        torch.cuda.synchronize()
        pid = states(backends)[str(served().backend)][1]
        results = [ours() for _ in range(CALLS)]
        time.sleep(rng.uniform(0, 0.004))
        stream = torch.cuda.current_stream()
        idle += stream.query()
        start_ns = time.perf_counter_ns()
        end = _End(pid)
        os.kill(pid, signal.SIGKILL)
        while not stream.query() and time.perf_counter_ns() - start_ns < HANG_S * 1e9:
            time.sleep(0.0005)
            end.look()
        took_ms = (time.perf_counter_ns() - start_ns) / 1e6
        end.wait()
        if took_ms > SLOW_MS:
            told = [(b["name"], b["state"], b["pid"]) for b in lz.status()["backends"] if b["name"] in backends]
            print(f"kill {number}: {took_ms:,.0f} ms; the process was gone after {end.ms:,.0f} ms; {told}", flush=True)
        end.close()
        if not stream.query():
            hung += 1
            break
        recovery_ms.append(took_ms)
        exits_ms.append(end.ms)
        try:
            lz.synchronize(HANG_S)
        except lz.LayerZeroError as exc:
            ends[exc.code] = ends.get(exc.code, 0) + 1  # an allowed end; its results are not looked at
        else:
            wrong += sum(not torch.allclose(result, right, rtol=2e-2, atol=2e-2) for result in results)
        del results
    leaked_mib = 0.0
    if not hung:
        begin_anew(backends)
        leaked_mib = max(free_before - free_mib(ours, backends), 0)
    typed = ", ".join(f"{code} {count}" for code, count in ends.items()) or "none"
    return Row(
        f"SIGKILL of the busy worker, {len(recovery_ms)} times ({idle} after its work), {', '.join(backends)} there "
        "for each other: wrong results, hung streams, GPU memory leaked",
        f"{wrong}, {hung}, {leaked_mib:.0f} MiB; typed errors: {typed}",
        f"p50 {statistics.median(recovery_ms):,.1f} ms, longest {max(recovery_ms):,.1f} ms until all calls are done; "
        f"of it until the killed process is gone {statistics.median(exits_ms):,.1f} and {max(exits_ms):,.1f} ms",
        "met" if not wrong and not hung and leaked_mib < LEAK_MIB else "MISSED (0, 0, 0)",
    )


class _End:
    """When a process is gone, as far as looks at it tell."""

    def __init__(self, pid: int) -> None:
        self._poll, self._fd, self._start_ns, self.ms = (
            select.poll(),
            os.pidfd_open(pid),
            time.perf_counter_ns(),
            math.nan,
        )
        self._poll.register(self._fd, select.POLLIN)

    def look(self) -> None:
        if math.isnan(self.ms) and self._poll.poll(0):
            self.ms = (time.perf_counter_ns() - self._start_ns) / 1e6

    def wait(self) -> None:
        while math.isnan(self.ms):
            self._poll.poll(1)
            self.look()

    def close(self) -> None:
        os.close(self._fd)


def serving(call: Any, *tensors: Any) -> list[str]:
    """The backends that take the call, each after a call, so that their workers run. JAX's compiles it anew after each
    start and would only be waited for."""
    said = lz.explain(lz.attention, *tensors, is_causal=True)
    found: list[str] = []
    for backend in dict.fromkeys(c.backend for c in said.candidates if c.accepted and c.backend != "jax-cuda"):
        try:
            with lz.prefer(backend, only=True):
                call()
                torch.cuda.synchronize()
                lz.synchronize(HANG_S)
            found.append(backend)
        except lz.LayerZeroError as exc:
            print(f"{backend}: {exc.message}", flush=True)
    return found


def states(backends: list[str]) -> dict[str, tuple[str, int]]:
    return {b["name"]: (b["state"], b["pid"]) for b in lz.status()["backends"] if b["name"] in backends}


def begin_anew(backends: list[str]) -> None:
    """Kill all workers: what one keeps of its life, such as 256 MiB of graphs, is no leak."""
    for name, (_, pid) in states(backends).items():
        if pid:
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda name=name, pid=pid: states([name])[name] not in {("ready", pid), ("busy", pid)}, "it is gone"
            )


def free_mib(call: Any, backends: list[str]) -> float:
    """Of the whole GPU, with each worker up and having worked, after what was left had its time to go."""
    wait_until(lambda: all(state == "ready" for state, _ in states(backends).values()), "all workers are ready")
    for backend in backends:
        with lz.prefer(backend, only=True):
            for _ in range(8):
                call()
                torch.cuda.synchronize()
    torch.cuda.empty_cache()
    time.sleep(SETTLE_S)
    return float(torch.cuda.mem_get_info()[0] / 2**20)


def faults(quick: bool) -> Iterator[Row]:
    """An illegal address and a device assert in one worker, while a second worker and the client itself work."""
    from tests.gpu.backends.torch_toy import ASSERT, ILLEGAL
    from tests.gpu.gpu_site import gpu_site
    from tests.process.harness import is_running

    lz.disconnect()
    site = gpu_site(Path(tempfile.mkdtemp(prefix="lz-faults-")), "one", "two")
    try:
        site.start()
        session = site.connect()
        work = _Work()
        x = torch.randn(64, 64, device="cuda")
        wrong = survived = raised = 0
        lz.layer_norm(x, (64,), backend="two")
        with work:
            for eps in [ILLEGAL, ASSERT] * (1 if quick else FAULTS // 2):
                session.ask("reset", backend="one")
                lz.layer_norm(x, (64,), backend="one")
                pid = site.backend("one")["pid"]
                try:
                    with lz.prefer("one"):
                        result = lz.layer_norm(x, (64,), eps=eps)  # falls back
                    lz.synchronize(HANG_S)
                    torch.cuda.current_stream().synchronize()
                    wrong += not torch.allclose(result.double(), F.layer_norm(x.double(), (64,), eps=eps), atol=1e-5)
                except lz.LayerZeroError as exc:
                    raised += 1
                    print(f"fault: {exc.message}", flush=True)
                end_s = time.monotonic() + SETTLE_S
                while is_running(pid) and time.monotonic() < end_s:
                    time.sleep(0.005)
                survived += is_running(pid)
                wait_until(lambda: site.backend("one")["state"] == "ready", "the worker is back")
        errors = work.errors
    finally:
        lz.disconnect()
        site.stop()
        lz.connect()
    count = 2 if quick else FAULTS
    yield Row(
        f"illegal address and device assert in a worker, {count} times, beside a client and a second worker at work: "
        "errors of the client, of the second worker; calls not served by another, wrong results",
        f"{errors['client']}, {errors['second worker']}; {raised}, {wrong}",
        f"{work.rounds:,} rounds of work meanwhile; the worker outlived its fault {survived} times",
        "met" if not any((*errors.values(), raised, wrong, survived)) and work.rounds else "MISSED (0)",
    )


class _Work:
    """A thread that works on the GPU itself and through the second worker, until the block ends, and counts errors."""

    def __init__(self) -> None:
        self.errors = {"client": 0, "second worker": 0}
        self.rounds = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="work")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)

    def _run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(256, 256, device="cuda")
            product, expected = x.double() @ x.double(), F.silu(x.double())
            while not self._end.is_set():
                self._round("client", lambda: x @ x, product, 1e-2)
                self._round("second worker", lambda: lz.silu(x, backend="two"), expected, 1e-5)
                self.rounds += 1

    def _round(self, who: str, call: Any, expected: Any, atol: float) -> None:
        try:
            if not torch.allclose(call().double(), expected, rtol=1e-4, atol=atol):
                raise ArithmeticError("a wrong result")
        except Exception as exc:
            self.errors[who] += 1
            print(f"{who}: {type(exc).__name__}: {exc}"[:300], flush=True)
