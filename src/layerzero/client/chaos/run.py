"""A chaos run: a broker of its own, clients, faults by schedule, and the proof that nothing stays behind."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.client.chaos import history
from layerzero.client.chaos.faults import Faults, processes, worker_pid
from layerzero.client.chaos.load import Orders
from layerzero.client.chaos.schedule import Fault, schedule
from layerzero.client.connection import start
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport import control
from layerzero.ipc.transport.endpoints import Endpoints

KEPT = ("LAYERZERO_STORE", "LAYERZERO_MANIFEST_DIRS", "LAYERZERO_VARIANT", "LAYERZERO_OVERLAY")
SURVEY_S = 600.0
CALM_S = 120.0  # for clients and brokers to end by themselves: their calls may wait for libraries that load
LEFT_S = 2.0  # after that nothing may be left
TIMEOUT_S = 3.0  # of an attempt: some processes are stopped for longer
POLL_S = 0.02
ARENA = "/memfd:layerzero"
TMP_PREFIX = "lz-chaos-"


@dataclass(frozen=True, slots=True)
class Chaos:
    """What a run is asked to do. `folder` gets the history; `backends`: all that can serve, when empty."""

    seed: int
    duration_s: float
    clients: int
    folder: Path
    threads: int = 2
    gap_s: float = 1.0
    backends: Sequence[str] = ()


def run(chaos: Chaos, tell: Callable[[str], None]) -> None:
    """Do a run and write its history. `tell` gets a line about each step. Raises LayerZeroError if it cannot begin."""
    chaos.folder.mkdir(parents=True, exist_ok=True)
    if any(chaos.folder.iterdir()):
        raise LayerZeroError(f"{chaos.folder} is not empty; name a folder that is new, or empty it")
    site = Path(tempfile.mkdtemp(prefix=TMP_PREFIX))
    try:
        _Run(chaos, start.endpoints(site), tell).main()
    finally:
        shutil.rmtree(site)


class _Run:
    def __init__(self, chaos: Chaos, where: Endpoints, tell: Callable[[str], None]) -> None:
        self._chaos, self._where, self._tell = chaos, where, tell
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._faults = Faults(where, self._later)
        self._clients: dict[int, subprocess.Popen[str]] = {}
        self._incarnations = [0] * chaos.clients
        self._ended_badly: list[str] = []
        self._environment = start.environment(
            KEPT,
            LAYERZERO_RUNTIME_DIR=str(where.folder),
            LAYERZERO_PERF_DB=str(where.folder / "perf.db"),
            LAYERZERO_POLICY=str(where.folder / "policy.yaml"),
            LAYERZERO_LINGER_S="60",
            LAYERZERO_TIMEOUT_S=str(TIMEOUT_S),
            LAYERZERO_RESTART_BUDGET="1000000",
            LAYERZERO_BACKOFF_S="0.1",
            LAYERZERO_BACKOFF_MAX_S="1",
        )
        (where.folder / "policy.yaml").write_text(
            json.dumps({"allow_sources": list(chaos.backends)} if chaos.backends else {})  # YAML is a superset
        )
        self._orders = Orders(str(chaos.folder), chaos.seed, 0, 0, chaos.threads, {})

    def main(self) -> None:
        chaos = self._chaos
        self._tell("asking each backend what it serves, without faults")
        ops = self._survey()
        backends = sorted({name for names in ops.values() for name in names})
        faults = schedule(chaos.seed, chaos.duration_s, gap_s=chaos.gap_s, backends=backends, clients=chaos.clients)
        self._orders = replace(self._orders, ops=ops)
        writer = history.Writer(chaos.folder / history.FAULTS)
        begin_s = time.monotonic()
        try:
            for number in range(chaos.clients):
                self._start_client(number)
            self._tell(f"{chaos.clients} clients call {', '.join(backends)}; {len(faults)} faults to come")
            for fault in faults:
                self._agenda.append((begin_s + fault.at_s, next(self._order), self._injector(fault, begin_s, writer)))
            heapq.heapify(self._agenda)
            self._work_until(begin_s + chaos.duration_s)
            self._tell("the clients finish")
            self._end_clients()
            held = _eventually_empty(self._held)
        finally:
            self._kill_clients()
            self._end_broker()
            writer.close()
        facts = {
            "seed": chaos.seed,
            "duration_s": chaos.duration_s,
            "clients": chaos.clients,
            "threads": chaos.threads,
            "gap_s": chaos.gap_s,
            "ops": ops,
            "begin_s": begin_s,
            "end_s": time.monotonic(),
            "schedule": [fault.to_dict() for fault in faults],
            "left_behind": [*held, *_eventually_empty(self._left)],
            "ended_badly": self._ended_badly,
        }
        (chaos.folder / history.FACTS).write_text(json.dumps(facts, indent=1) + "\n")

    def _survey(self) -> Mapping[str, Sequence[str]]:
        asked = subprocess.run(
            self._command(self._orders),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SURVEY_S,
            check=False,
        )
        found = json.loads(asked.stdout) if asked.returncode == 0 else {"ops": {}, "left_out": {}}
        for name, why in found["left_out"].items():
            self._tell(f"{name} has no part in it: {why}")
        ops: dict[str, list[str]] = found["ops"]
        if not ops:
            self._end_broker()
            why = asked.stderr.strip()[-1000:] or "no backend serves any op of the load; run: lz env build"
            raise LayerZeroError(f"the run cannot begin: {why}")
        return ops

    def _command(self, orders: Orders) -> list[str]:
        # The folder at the end tells this run's processes from others.
        return [sys.executable, "-P", "-m", "layerzero.client.chaos.load", orders.to_json(), str(self._where.folder)]

    # --- faults

    def _later(self, in_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + in_s, next(self._order), action))

    def _work_until(self, end_s: float) -> None:
        """Do what is due. What lasts until after the end is ended at once."""
        while self._agenda:
            due_s, _, action = heapq.heappop(self._agenda)
            while (now_s := time.monotonic()) < min(due_s, end_s):
                time.sleep(min(POLL_S, min(due_s, end_s) - now_s))
                self._replace_dead_clients()
            action()
        while time.monotonic() < end_s:
            time.sleep(POLL_S)
            self._replace_dead_clients()

    def _injector(self, fault: Fault, begin_s: float, writer: history.Writer) -> Callable[[], None]:
        def inject() -> None:
            incarnation = None
            if fault.role == "client":
                incarnation = self._incarnations[int(fault.target)]
                pid: int | None = self._clients[int(fault.target)].pid
            elif fault.role == "worker":
                pid = worker_pid(self._where, fault.target)
            else:
                pid = start.broker_pid(self._where)
            at_s = time.monotonic()
            if fault.kind == "leave":
                result = self._let_leave(int(fault.target))
            else:
                result = self._faults.inject(pid, fault.kind, fault.lasts_s)
            facts: dict[str, Any] = {**fault.to_dict(), "at": at_s, "planned": begin_s + fault.at_s}
            writer.write(**facts, pid=pid, incarnation=incarnation, result=result)

        return inject

    # --- clients

    def _start_client(self, number: int) -> None:
        orders = replace(self._orders, number=number, incarnation=self._incarnations[number])
        with open(self._where.folder / f"client-{number}.log", "ab") as log:
            self._clients[number] = subprocess.Popen(
                self._command(orders),
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
            )

    def _replace_dead_clients(self) -> None:
        for number, process in self._clients.items():
            if process.poll() is not None:
                self._note_end(number, process)
                self._incarnations[number] += 1
                self._start_client(number)

    def _note_end(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode not in (0, -signal.SIGKILL):
            log = (self._where.folder / f"client-{number}.log").read_text(errors="replace")[-1000:]
            self._ended_badly.append(f"client {number} ended with code {process.returncode}: {log}")

    def _let_leave(self, number: int) -> str:
        stdin = self._clients[number].stdin
        assert stdin is not None
        try:
            stdin.write("leave\n")
            stdin.flush()
        except BrokenPipeError:
            return "absent"
        return "done"

    def _end_clients(self) -> None:
        for process in self._clients.values():
            assert process.stdin is not None
            process.stdin.close()
        until_s = time.monotonic() + CALM_S
        for number, process in self._clients.items():
            try:
                process.wait(max(until_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                self._ended_badly.append(f"client {number} had not ended {CALM_S:g} s after it was told to")
                process.kill()
                process.wait()
            self._note_end(number, process)

    def _kill_clients(self) -> None:
        """None is left unless something went wrong here."""
        for process in self._clients.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    # --- the end

    def _end_broker(self) -> None:
        while (pid := start.broker_pid(self._where)) is not None:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                for number in (signal.SIGCONT, signal.SIGTERM):
                    signal.pidfd_send_signal(fd, number)
                if not control.is_readable(fd, CALM_S):
                    self._ended_badly.append(f"the broker (pid {pid}) had not ended {CALM_S:g} s after SIGTERM")
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                os.close(fd)

    def _held(self) -> list[str]:
        """Arenas of clients, which have all gone, that the broker or a worker still has."""
        found = []
        for pid, command, _ in processes(self._where.folder):
            mapped = Path(f"/proc/{pid}/maps").read_text().count(ARENA)
            opened = sum(os.readlink(fd).startswith(ARENA) for fd in Path(f"/proc/{pid}/fd").iterdir())
            if mapped or opened:
                found.append(f"{mapped} arenas mapped and {opened} open in process {pid}: {command[:200]}")
        return found

    def _left(self) -> list[str]:
        found = [f"process {pid}: {command[:200]}" for pid, command, _ in processes(self._where.folder)]
        return found + [f"socket {path.name}" for path in self._where.folder.iterdir() if path.is_socket()]


def _eventually_empty(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds after LEFT_S."""
    until_s = time.monotonic() + LEFT_S
    while (found := look()) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return found
