"""One client of a chaos run, a process of its own: it calls, writes down what comes of it, and connects again.

`python -m layerzero.client.chaos.load PLAN`: PLAN is JSON (`Orders`). Lines on stdin: "leave" hangs up in the middle of
its calls and connects again; the end of stdin ends it. `run.py` starts it.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.client.chaos.history import Writer, client_file
from layerzero.client.chaos.work import WORKS, fold, is_right
from layerzero.client.connection.report import SelectionReport

RETRY_S = 0.1
ALONE = 0.7  # of the calls are waited for at once; the others are submitted, up to MOST at a time
MOST = 12
PINNED = 0.4  # of the calls name their backend
HURRIED, HURRY_S = 0.1, 1.5  # of the calls have a deadline of their own
SURVEYS = 3  # calls that a backend must answer right to be part of the run


@dataclass(frozen=True, slots=True)
class Orders:
    """What a client is told. `ops`: op -> backends that have proved to serve it; empty: find out and print it."""

    folder: str
    seed: int
    number: int
    incarnation: int
    threads: int
    ops: Mapping[str, Sequence[str]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Client:
    """The threads of a client and what they write."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._history = Writer(client_file(Path(orders.folder), orders.number, orders.incarnation))
        self._is_ending = threading.Event()
        self._lock = threading.Lock()
        self._calls = 0

    def main(self) -> None:
        """Call until stdin ends."""
        self._connect()
        threads = [threading.Thread(target=self._call_on, args=(n,)) for n in range(self._orders.threads)]
        for thread in threads:
            thread.start()
        for line in sys.stdin:
            if line.strip() == "leave":
                self._history.write(did="leave", at=time.monotonic())
                lz.disconnect()
                self._connect()
        self._is_ending.set()
        for thread in threads:
            thread.join()
        lz.disconnect()
        self._history.write(did="end", at=time.monotonic(), calls=self._calls)
        self._history.close()

    def _call_on(self, thread: int) -> None:
        orders = self._orders
        rng = random.Random(f"load {orders.seed} {orders.number} {orders.incarnation} {thread}")
        while not self._is_ending.is_set():
            if rng.random() < ALONE:
                outcomes = [self._call(rng)]
            else:
                open_calls = [self._submit(rng) for _ in range(rng.randint(2, MOST))]
                outcomes = [self._take(number, future) for number, future in open_calls]
            if not {"BROKER_LOST", "NOT_CONNECTED", "CANCELLED"}.isdisjoint(outcomes):
                self._connect()
            if "NO_BACKEND" in outcomes:
                self._restart_backends()

    def _connect(self) -> None:
        """With whatever broker there is; the first who misses it starts one."""
        while True:
            try:
                lz.connect()
            except (lz.LayerZeroError, OSError) as exc:
                self._history.write(did="connect", at=time.monotonic(), failed=f"{type(exc).__name__}: {exc!s:.200}")
                if self._is_ending.wait(RETRY_S):
                    return
                continue
            self._history.write(did="connect", at=time.monotonic())
            return

    def _restart_backends(self) -> None:
        """What a person does who reads why no backend is there: one that crashed in loading is not tried again."""
        with contextlib.suppress(lz.LayerZeroError):
            lz.session().ask("reset")
            self._history.write(did="restart", at=time.monotonic())

    def _begin(self, rng: random.Random, *, must_submit: bool) -> tuple[int, str, tuple[Any, ...], dict[str, Any]]:
        """Choose a call and write down that it is made. Returns its number, op, arguments and options."""
        names = [name for name in self._orders.ops if WORKS[name].can_submit or not must_submit]
        op = rng.choice(names)
        options: dict[str, Any] = {}
        if rng.random() < PINNED:
            options["backend"] = rng.choice(list(self._orders.ops[op]))
        if rng.random() < HURRIED:
            options["timeout_s"] = HURRY_S
        orders = self._orders
        with self._lock:
            self._calls += 1
            number = self._calls
        nonce = (((orders.seed * 4096 + orders.number) * 65536 + orders.incarnation) << 40) + number
        args = WORKS[op].arguments(nonce)
        self._history.write(call=number, op=op, nonce=nonce, at=time.monotonic(), alone=not must_submit, **options)
        return number, op, args, options

    def _call(self, rng: random.Random) -> str:
        number, op, args, options = self._begin(rng, must_submit=False)
        try:
            session = lz.session()
            result = WORKS[op].run(*args, **options)
            return self._done(number, result, session.last_report())
        except Exception as exc:
            return self._failed(number, exc)

    def _submit(self, rng: random.Random) -> tuple[int, Any]:
        """A call's number and its future, or the error that it could not be submitted for."""
        number, op, args, options = self._begin(rng, must_submit=True)
        try:
            return number, WORKS[op].run(*args, submit=True, **options)
        except Exception as exc:
            return number, exc

    def _take(self, number: int, future: Any) -> str:
        if isinstance(future, Exception):
            return self._failed(number, future)
        try:
            result = future.result()
        except Exception as exc:
            return self._failed(number, exc)
        return self._done(number, result, future.report)

    def _done(self, number: int, result: Any, report: SelectionReport | None) -> str:
        by, attempts = (report.backend, len(report.attempts)) if report is not None else (None, 0)
        self._history.write(call=number, end=time.monotonic(), outcome="OK", got=fold(result), by=by, attempts=attempts)
        return "OK"

    def _failed(self, number: int, exc: Exception) -> str:
        outcome = exc.code if isinstance(exc, lz.LayerZeroError) else f"UNTYPED {type(exc).__name__}"
        self._history.write(call=number, end=time.monotonic(), outcome=outcome, detail=f"{exc!s:.300}")
        return outcome


def survey() -> dict[str, Any]:
    """Which backends answer which op right ("ops"), each asked alone and without faults, and why others that are built
    have no part ("left_out"). Starts a broker and their workers.

    Raises BackendError for one that serves an op and gives wrong numbers.
    """
    lz.connect()
    rows = {row["name"]: row for row in lz.status()["backends"] if not row["unavailable"]}
    ops: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for op, work in WORKS.items():
        for name in [n for n in rows if n not in left_out and set(work.ops) <= set(rows[n]["ops"])]:
            try:
                found = [work.run(*work.arguments(n), backend=name, timeout_s=60.0) for n in range(SURVEYS)]
            except lz.NoBackend:
                continue  # it takes other shapes or types only, or is not certified for these, or not wanted
            except lz.BackendError as exc:
                left_out[name] = exc.message
                continue
            for nonce, result in enumerate(found):
                if not is_right(fold(result), work.expected(nonce)):
                    text = f"{name} gives wrong numbers for {op}, without any fault: {fold(result)}"
                    raise lz.BackendError(f"{text}; right: {work.expected(nonce)}")
            ops.setdefault(op, []).append(name)
    lz.disconnect()
    served = {op: [name for name in names if name not in left_out] for op, names in ops.items()}
    return {"ops": {op: names for op, names in served.items() if names}, "left_out": left_out}


if __name__ == "__main__":
    given = Orders(**json.loads(sys.argv[1]))
    if given.ops:
        Client(given).main()
    else:
        print(json.dumps(survey()), flush=True)
