"""Where `lz top` has its Samples from: the broker, each second, or its history."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import layerzero as lz
from layerzero.client.connection import start
from layerzero.client.history import history_file
from layerzero.client.history.history_file import HistoryFile
from layerzero.client.history.recorder import Recorder
from layerzero.client.history.sample import Sample

ASK_S = 5.0
STEP_S = 10


class Seen(NamedTuple):
    """`rates`: calls a second of the minutes before, oldest first. `problem`: why there is nothing."""

    at: float
    sample: Sample | None
    rates: list[float]
    problem: str = ""
    is_live: bool = True
    locks: Mapping[str, str] = {}  # ops, to backends, by these keys
    drained: Sequence[str] = ()


class Source:
    """`at`: the time to look at, None for now. Of the broker in this user's runtime folder, none is started."""

    def __init__(self, history: Path | None, at: float | None) -> None:
        self.at = at
        self._where = start.endpoints()
        self._path = history or history_file.default_path(os.environ, self._where.folder)
        self._recorder = Recorder(None)
        self._session: lz.Session | None = None
        self._rates: list[float] = []

    def look(self) -> Seen:
        """What is to be shown. Raises InvalidArgument where a time is asked for and there is no history."""
        return self._now() if self.at is None else self._then(self.at)

    def step(self, by: int) -> None:
        """So many seconds on; from now, back."""
        moved = (time.time() if self.at is None else self.at) + by
        self.at = None if moved >= time.time() - 1 else moved

    def ask(self, method: str, **params: Any) -> Any:
        """Raises LayerZeroError."""
        try:
            if self._session is None:
                key = start.secret_key()
                if key is None and start.broker_pid(self._where) is None:
                    raise lz.NotConnected(f"no broker runs in {self._where.folder}", repair="lz up")
                self._session = lz.Session(self._where.control, lz.__version__, key)
            return self._session.ask(method, within_s=ASK_S, **params)
        except (lz.BrokerLost, lz.NotConnected, lz.Cancelled):
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise lz.BrokerLost(f"the broker does not answer: {exc}", repair="lz status") from exc

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _now(self) -> Seen:
        try:
            sample = self._recorder.take(self.ask("metrics"))
            steered = self.ask("steer")
        except lz.LayerZeroError as exc:
            return Seen(time.time(), None, self._rates, exc.message)
        if sample is not None:
            self._rates = [*self._rates, sample.total().count / max(sample.seconds, 1e-3)][-120:]
        return Seen(time.time(), sample, self._rates, locks=steered["locks"], drained=steered["drained"])

    def _then(self, at: float) -> Seen:
        found = HistoryFile.read(self._path)
        try:
            kept = found.at(at)
            before = found.between(at - 600, at)
            span = found.span()
        except sqlite3.Error as exc:
            return Seen(at, None, [], f"the history cannot be read: {exc}", is_live=False)
        finally:
            found.close()
        rates = [one.sample.total().count / max(one.sample.seconds, 1e-3) for one in before][-120:]
        if kept is None:
            said = (
                "nothing was kept"
                if span is None
                else (f"nothing was kept then; from {_clock(span[0])} to {_clock(span[1])} there is something")
            )
            return Seen(at, None, rates, said, is_live=False)
        return Seen(float(kept.at), kept.sample, rates, is_live=False)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
