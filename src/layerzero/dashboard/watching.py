"""What the page shows of the broker: asked once a second, however many pages are open; and kept as history where no
recorder does that."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.client.connection import start
from layerzero.client.history.history_file import HistoryFile, Kept
from layerzero.client.history.recorder import EVERY_S, Recorder
from layerzero.client.history.sample import Sample
from layerzero.ipc.transport.endpoints import Endpoints

KEPT = 900  # seconds of points that a page begins with, where there is no file
ASK_S = 8.0
EVENTS = 40  # of the broker's log
LOG_BYTES = 64 << 10


class Broker:
    """Questions to the broker of a runtime folder; none is started. A connection is kept until it breaks."""

    def __init__(self, where: Endpoints) -> None:
        self.where = where
        self._lock = threading.Lock()
        self._session: lz.Session | None = None

    def ask(self, method: str, **params: Any) -> Any:
        """Raises LayerZeroError: NotConnected where none runs."""
        with self._lock:
            try:
                if self._session is None:
                    self._session = self._connect()
                return self._session.ask(method, within_s=ASK_S, **params)
            except (lz.BrokerLost, lz.NotConnected, lz.Cancelled, OSError) as exc:
                self._hang_up()
                if isinstance(exc, OSError):
                    raise lz.BrokerLost(f"the broker does not answer: {exc}", repair="lz status") from exc
                raise

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _connect(self) -> lz.Session:
        key = start.secret_key()
        if key is None and start.broker_pid(self.where) is None:
            raise lz.NotConnected(f"no broker runs in {self.where.folder}", repair="lz up")
        return lz.Session(self.where.control, lz.__version__, key)

    def _hang_up(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class Watch:
    """Asks on a thread of its own. `listen` gives each Frame as JSON text; `history` what was seen before."""

    def __init__(self, broker: Broker, history: Path) -> None:
        self._broker = broker
        self._path = history
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._number = 0
        self._frame = json.dumps({"error": {"message": "the broker has not been asked yet", "repair": ""}})
        self._points: deque[list[Any]] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._broker.close()

    def after(self, number: int, within_s: float) -> tuple[int, str]:
        """The newest frame, once it is another than that; the same number when there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number or self._over.is_set(), within_s)
            return self._number, self._frame

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def points(self, start_s: float, end_s: float) -> list[list[Any]]:
        """Of the file where there is one, else what this process has seen: `point` of each slot, oldest first."""
        try:
            file = HistoryFile.read(self._path)
        except lz.InvalidArgument:
            return [point for point in list(self._points) if start_s <= point[0] <= end_s]
        try:
            return [point(kept) for kept in file.between(start_s, end_s, most=KEPT)]
        except sqlite3.Error:
            return []
        finally:
            file.close()

    def _run(self) -> None:
        file: HistoryFile | None = None
        recorder = Recorder(None)
        due_s = time.monotonic()
        while not self._over.wait(max(due_s - time.monotonic(), 0.0)):
            due_s = max(due_s + EVERY_S, time.monotonic())
            try:
                answer, status = self._broker.ask("metrics"), self._broker.ask("status")
                if file is None and not self._broker.ask("settings").get("history"):
                    file = _writer(self._path)
                    if file is not None:
                        recorder.keep_in(file)
                sample = _kept(recorder, answer)
            except lz.LayerZeroError as exc:
                frame: dict[str, Any] = {"error": {"message": exc.message, "repair": str(exc.facts.get("repair", ""))}}
            else:
                frame = {"now": now(status, sample), "error": None}
                if sample is not None:
                    frame["point"] = point(Kept(int(time.time()), 1, sample))
                    self._points.append(frame["point"])
            frame["at"] = round(time.time(), 3)
            frame["events"] = events(self._broker.where.log)
            self._tell(json.dumps(frame, separators=(",", ":")))
        if file is not None:
            file.close()

    def _tell(self, frame: str) -> None:
        with self._changed:
            self._number += 1
            self._frame = frame
            self._changed.notify_all()


def _writer(path: Path) -> HistoryFile | None:
    try:
        return HistoryFile.write(path)
    except (OSError, sqlite3.Error):
        return None


def _kept(recorder: Recorder, answer: Mapping[str, Any]) -> Sample | None:
    try:
        return recorder.take(answer)
    except sqlite3.Error:  # the page goes on without; its charts begin when it was opened
        return None


def point(kept: Kept) -> list[Any]:
    """What charts have of a slot: when it began, its width, calls a second, p50 and p99 in us, fallbacks, errors,
    restarts, calls that wait, resident bytes of workers."""
    sample = kept.sample
    seconds = max(sample.seconds, 1e-3)
    total = sample.total()
    return [
        kept.at,
        kept.width_s,
        round(total.count / seconds, 2),
        _rounded(total.quantile_us(0.5)),
        _rounded(total.quantile_us(0.99)),
        sum(sample.fallbacks.values()),
        sum(sample.errors.values()),
        sum(sample.restarts.values()),
        sum(worker.waiting for worker in sample.workers.values()),
        sum(worker.memory_bytes for worker in sample.workers.values()),
    ]


def now(status: Mapping[str, Any], sample: Sample | None) -> dict[str, Any]:
    """The broker as it is: its answer to `status`, with the rates of the last second."""
    workers = sample.workers if sample is not None else {}
    seconds = max(sample.seconds, 1e-3) if sample is not None else 1.0
    rates: dict[str, float] = {}
    for (_, backend, _), durations in (sample.calls if sample is not None else {}).items():
        rates[backend] = rates.get(backend, 0.0) + durations.count / seconds
    backends = [
        {
            **row,
            "rate": round(rates.get(row["name"], 0.0), 1),
            "memory_bytes": workers[row["name"]].memory_bytes if row["name"] in workers else 0,
            "gpu_bytes": workers[row["name"]].gpu_bytes if row["name"] in workers else 0,
        }
        for row in status["backends"]
    ]
    return {
        "broker": status["broker"],
        "clients": len(status["clients"]) + status["more_clients"] - 1,  # this one
        "open_calls": sum(one["open_calls"] for one in status["clients"]),
        "lent_bytes": sum(one["bytes"] for one in status["clients"]),
        "devices": status["devices"],
        "backends": backends,
        "problems": status["problems"],
        "totals": status["calls"],
        "errors": status["errors"],
        "fallbacks": status["fallbacks"],
        "restarts": status["restarts"],
        "calls": [] if sample is None else [_call(key, durations, seconds) for key, durations in sample.calls.items()],
    }


def _call(key: tuple[str, ...], durations: Any, seconds: float) -> list[Any]:
    quantiles = (_rounded(durations.quantile_us(share)) for share in (0.5, 0.99))
    return [*key, round(durations.count / seconds, 1), *quantiles]


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 1)


def events(path: Path) -> list[dict[str, Any]]:
    """The newest records of a broker's log, oldest first; lines that are none are left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            facts = {name: _short(value) for name, value in record.items() if name not in ("time", "event")}
            found.append({"time": record.get("time"), "event": record["event"][:80], "facts": facts})
        if len(found) == EVENTS:
            break
    return found[::-1]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
