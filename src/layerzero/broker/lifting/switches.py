"""What a GPU's change from one process to another takes on this machine: measured once for each GPU and driver, when a
kernel is found that cannot be lifted, in processes of its own (workers/switching.py), and kept in a file."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from layerzero.broker.selection.prices import SWITCH_US
from layerzero.broker.selection.ranking import Engine
from layerzero.envs.probe.child import kill_group, run_process
from layerzero.ipc import files
from layerzero.ipc.logs import log

TIMEOUT_S = 15.0  # of the process, contexts included; the measurement itself takes 1.5 s at most
MOST_US = 5000.0  # what is more is none: a GPU that others keep busy, say
NOISE_US = 5.0  # so much below 0 is 0: by MPS nothing is changed
MAX_BYTES, MAX_KEPT = 64 << 10, 64


class Switches:
    """For the broker's own thread."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path, self._engine = path, engine
        self._problems: dict[str, str] = {}  # by GPU: why its own was not measured
        self._asked: set[str] = set()
        self._ended: deque[tuple[str, float | str]] = deque()
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}  # pids, by GPU
        self._is_closed = False
        known = _read(path)
        for uuid in engine.devices:
            if uuid and (us := known.get(self._key(uuid))) is not None:
                engine.note_switch(uuid, us)

    def look(self, used: Iterable[str]) -> None:
        """Take what was measured, and start what is missing of the GPUs that are used, once in a broker's life."""
        while self._ended:
            uuid, found = self._ended.popleft()
            if isinstance(found, str):
                self._problems[uuid] = found
                log("gpu.switch_unknown", gpu=uuid, why=found)
                continue
            self._engine.note_switch(uuid, found)
            self._keep(uuid, found)
            log("gpu.switch_measured", gpu=uuid, us=found)
        wanted = set(used) - self._asked - self._engine.switches.keys() if self._engine.has_staying else set()
        for uuid in wanted:
            self._asked.add(uuid)
            threading.Thread(target=self._measure, args=(uuid,), name="switching", daemon=True).start()

    def facts(self, uuid: str) -> dict[str, Any]:
        """For `lz status`: the price of a change, and whether it is of this machine."""
        us = self._engine.switches.get(uuid)
        if us is not None:
            return {"switch_us": us, "switch": "measured"}
        return {"switch_us": SWITCH_US, "switch": f"default; {self._problems.get(uuid, 'not measured yet')}"}

    def close(self) -> None:
        """End what runs."""
        with self._lock:
            self._is_closed = True
            for pid in self._running.values():
                kill_group(pid)

    def _measure(self, uuid: str) -> None:
        try:
            ended = run_process(
                [sys.executable, "-m", "layerzero.workers.switching", uuid, str(os.getpid())],
                environ=os.environ,
                timeout_s=TIMEOUT_S,
                on_start=partial(self._note_pid, uuid),
            )
            found = figure(ended.out)
        except Exception as exc:  # a machine that starts no processes, say
            found = f"{type(exc).__name__}: {exc}"
        with self._lock:
            self._running.pop(uuid, None)
        self._ended.append((uuid, found))

    def _note_pid(self, uuid: str, pid: int) -> None:
        with self._lock:
            self._running[uuid] = pid
            if self._is_closed:
                kill_group(pid)

    def _key(self, uuid: str) -> str:
        return f"{uuid} {self._engine.devices[uuid].driver_version}"

    def _keep(self, uuid: str, us: float) -> None:
        known = _read(self._path)
        known.pop(self._key(uuid), None)
        kept = dict([*known.items(), (self._key(uuid), us)][-MAX_KEPT:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(kept))
            draft.replace(self._path)
        except OSError as exc:  # it is measured again by the next broker
            log("gpu.switch_not_kept", gpu=uuid, why=str(exc))


def figure(said: bytes) -> float | str:
    """Microseconds of a change, of what the process has said; or why that is none."""
    try:
        answer = json.loads(said[:MAX_BYTES])
    except ValueError:
        return "the process that measures it ended without a word"
    if not isinstance(answer, dict):
        return "the process that measures it said something else"
    us = answer.get("us")
    if isinstance(us, (int, float)):
        if _is_possible(us):
            return max(float(us), 0.0)
        return f"{us:g} us were measured, which is no such time; allowed: 0 to {MOST_US:g}"
    return str(answer.get("error", "it says no figure"))[:500]


def _is_possible(us: object) -> bool:
    return type(us) in (int, float) and -NOISE_US <= us <= MOST_US  # type: ignore[operator]


def _read(path: Path) -> dict[str, float]:
    """What is kept; nothing of a file that is damaged."""
    try:
        kept = json.loads(files.read(path, MAX_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {key: max(float(us), 0.0) for key, us in list(kept.items())[-MAX_KEPT:] if _is_possible(us)}
