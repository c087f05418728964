"""`lz up, down, status`: the broker as seen from a terminal."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from layerzero.client.cli import keys as cli_keys
from layerzero.client.cli.output import FAILED, note, out, print_json
from layerzero.client.connection import remote as remote_broker
from layerzero.client.connection import start
from layerzero.client.history.moments import bytes_text
from layerzero.client.session import settings_check
from layerzero.client.session.session import Session
from layerzero.ipc.cuda.usage import GpuUsage
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected, ProtocolError
from layerzero.ipc.transport import control
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.version import __version__
from layerzero.ipc.wording import counted

ROOMY = 100  # columns of a terminal, from which on versions are shown

STOP_TIMEOUT_S = 10.0
ENDING_POLL_S = 0.1
_STYLES = {"ready": "green", "busy": "green", "starting": "cyan", "probing": "cyan", "idle": ""}


@contextmanager
def connection(where: Endpoints) -> Iterator[Session]:
    """A session with the broker that runs; starts none. Raises NotConnected when there is none, BrokerLost when it does
    not answer."""
    key = start.secret_key()
    pid = start.broker_pid(where) if key is None else 0  # of another container, maybe
    if pid is None:
        raise NotConnected(f"no broker runs in {where.folder}", repair="lz up")
    try:
        session = Session(where.control, __version__, key)
    except (OSError, ProtocolError) as exc:
        if key is not None and isinstance(exc, (FileNotFoundError, ConnectionRefusedError)):
            raise NotConnected(f"no broker runs in {where.folder}", repair="start the one of this stack") from exc
        who = f"the broker (pid {pid})" if pid else "the broker"
        raise BrokerLost(
            f"{who} does not answer: {exc}", repair="try again; if it stays like this, lz down --force"
        ) from exc
    try:
        if key is None:
            settings_check.warn_of_broker(session)
        yield session
    finally:
        session.close()


def up(*, as_json: bool, foreground: bool, watchdog: bool, settings: Mapping[str, str]) -> int:
    """`settings`: of the broker, by name; they win over the environment. Returns the exit code."""
    if foreground and watchdog:
        raise InvalidArgument("--foreground and --watchdog exclude each other: what started the former watches it")
    os.environ.update({f"LAYERZERO_{name.upper()}": value for name, value in settings.items()})
    if foreground:
        start.become_broker()
    where = start.endpoints()
    if watchdog:
        from layerzero.client.cli.watchdog import Watchdog

        return Watchdog(where, as_json=as_json).main()
    was_started = ensure_it_stays(where)
    if not was_started and settings.get("metrics"):
        _refuse_other_metrics(where, settings["metrics"])
    if not was_started and settings.get("record"):
        _refuse_other_record(where, settings["record"])
    pid = start.broker_pid(where)
    if as_json:
        print_json({"started": was_started, "pid": pid, "socket": str(where.control), "log": str(where.log)})
        return 0
    verb = "broker started" if was_started else "a broker runs already"
    out().print(f"{verb}: pid {pid}, socket {where.control}", soft_wrap=True, highlight=False)
    note("it stays until lz down; lz status shows it")
    return 0


def _refuse_other_metrics(where: Endpoints, wanted: str) -> None:
    """A broker that runs shows its metrics where it was told to when it started. Raises LayerZeroError."""
    with connection(where) as session:
        shown = session.ask("settings").get("metrics", "")
    if shown != wanted:
        text = f"the broker that runs shows its metrics {f'at {shown}' if shown else 'nowhere'}, not at {wanted}"
        raise LayerZeroError(text, repair=f"lz down, then lz up --metrics {wanted}")


def _refuse_other_record(where: Endpoints, wanted: str) -> None:
    """A record begins with its broker. Raises LayerZeroError."""
    with connection(where) as session:
        kept = session.ask("settings").get("record", "")
    if kept != wanted:
        has = f"writes its record to {kept}" if kept else "has no record"
        text = f"the broker that runs {has}, and a record begins with its broker"
        raise LayerZeroError(text, repair=f"lz down, then lz up --record {wanted}")


def ensure_it_stays(where: Endpoints) -> bool:
    """True when a broker was started here; one that a client had started is told to stay."""
    deadline_s = time.monotonic() + start.START_TIMEOUT_S
    while not start.ensure_broker(where, stays=True):
        try:
            with connection(where) as session:
                session.ask("stay")
                return False
        except (BrokerLost, NotConnected) as exc:
            if isinstance(exc.__cause__, TimeoutError) or time.monotonic() > deadline_s:
                raise
            start.wait_for_end(where, ENDING_POLL_S)  # its last client has left just now
    return True


def down(*, force: bool, as_json: bool) -> None:
    where = start.endpoints()
    pid = stop(where, force=force)
    if as_json:
        print_json({"stopped": pid is not None, "pid": pid})
    elif pid is None:
        out().print(f"no broker runs in {where.folder}", soft_wrap=True, highlight=False)
    else:
        out().print(f"broker {'killed' if force else 'ended'}: pid {pid}", highlight=False)


def stop(where: Endpoints, *, force: bool) -> int | None:
    """End the broker and wait for it. Returns its pid, or None when none ran.

    A signal, not a request: a broker of another version or one that is stuck must be reachable too, and SIGTERM means
    to it what the request `shutdown` means.
    """
    pid = start.broker_pid(where)
    if pid is None:
        return None
    if start.is_foreign(where):
        raise LayerZeroError(
            f"the broker in {where.folder} runs in another container or pid namespace; it is ended from there",
            repair="docker compose stop, or lz down where it runs",
        )
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        if start.broker_pid(where) != pid:  # it ended before we held it, and its number may be another's
            return None
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if force else signal.SIGTERM)
        except ProcessLookupError:
            return pid
        if not control.is_readable(pidfd, STOP_TIMEOUT_S):
            text = f"the broker (pid {pid}) has not ended within {STOP_TIMEOUT_S:g} s"
            raise LayerZeroError(text, repair="wait for its calls and try again, or lz down --force to kill it")
    finally:
        os.close(pidfd)
    return pid


def tell_about_environments(words: Sequence[str]) -> None:
    """After `lz env build` or `probe`: a running broker looks again at the backends among `words`, or at all."""
    try:
        with connection(start.endpoints()) as session:
            session.ask("learn")  # of versions that it has not seen yet
            known = {row["name"] for row in session.ask("status")["backends"]}
            for name in known.intersection(words) or known:
                session.ask("reset", backend=name)
            note(f"the broker (pid {session.broker_pid}) looks at them again")
    except (BrokerLost, NotConnected):
        return  # one that starts later reads them anyway
    except LayerZeroError as exc:
        note(f"the running broker was not told: {exc.message}")


# --- status


def status(*, backend: str | None, remote: str | None, keys: Path | None, shows_all: bool, as_json: bool) -> int:
    """`shows_all`: backends that are left alone, too. Returns the exit code: with `backend` 1 when that one cannot
    serve."""
    if remote is None:
        where = start.endpoints()
        with connection(where) as session:
            answer = session.ask("status") if backend is None else session.ask("health", backend=backend)
        if backend is None:
            add_gpu_memory(answer)
    else:
        method, params = ("status", {}) if backend is None else ("health", {"backend": backend})
        answer = remote_broker.ask(remote, cli_keys.where(keys), method, params)
        where = Endpoints(Path(answer["broker"]["runtime_dir"] if backend is None else "."))
    if backend is not None:
        if as_json:
            print_json({"backend": backend, **answer})
        else:
            out().print(f"{backend}: {'ok' if answer['ok'] else 'not ok'}: {answer['detail']}", soft_wrap=True)
        return 0 if answer["ok"] else FAILED
    workers = {row["name"]: str(where.worker_log(row["name"])) for row in answer["backends"]}
    if as_json:
        print_json({**answer, "logs": {"broker": str(where.log), "workers": workers}})
        return 0
    _print_head(answer, where)
    out().print()
    elsewhere = [] if shows_all else [row for row in answer["backends"] if _is_elsewhere(row)]
    out().print(_table([row for row in answer["backends"] if row not in elsewhere]))
    for row in answer["backends"]:
        for one in row["beside"]:
            calls = f" with {counted(one['running'], 'call')}" if one["state"] == "draining" else ""
            pid = f" pid {one['pid']}" if one["pid"] else ""
            text = f"{row['name']} is being replaced: {one['state']}{pid}{calls}"
            out().print(Text(text, style="cyan"), soft_wrap=True)
    for code, text in _LEFT_ALONE.items():
        if names := ", ".join(row["name"] for row in elsewhere if row["unavailable"]["code"] == code):
            out().print(Text(f"{text}, --all shows why: {names}", style="dim"))
    _print_wrong(answer, shows_all=shows_all)
    return 0


def add_gpu_memory(answer: dict[str, Any]) -> None:
    """What the driver tells of each worker, by the GPU's UUID: nothing of those in other containers."""
    held = GpuUsage().of({row["name"]: row["pid"] for row in answer["backends"] if row["pid"]})
    for row in answer["backends"]:
        row["gpu_bytes"] = held.get(row["name"], {})


def _print_head(answer: Mapping[str, Any], where: Endpoints) -> None:
    broker, clients, more = answer["broker"], answer["clients"], answer["more_clients"]
    clients = clients if more else clients[:-1]  # the newest is this very command
    devices = answer["devices"]
    calls, nbytes = sum(c["open_calls"] for c in clients), sum(c["bytes"] for c in clients)
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_column(style="dim")
    head.add_column(overflow="fold")
    rows = {
        "broker": f"pid {broker['pid']}, up {_duration(broker['up_s'])}, layerzero {broker['package']}, "
        f"protocol {broker['protocol']}" + ("" if broker["stays"] else "; ends with its last client (lz up: stays)"),
        "clients": f"{len(clients) + more} connected, {counted(calls, 'open call')}, {nbytes / 1e6:,.1f} MB lent",
        "devices": ", ".join(
            f"{d['name'] or d['type']}{' ' + d['uuid'] if d['type'] != 'cpu' else ''}" for d in devices
        ),
        "socket": str(where.control),
        "store": broker["store"],
        "logs": f"{where.log}; lz logs [BACKEND]",
    }
    if switches := [d for d in devices if "switch_us" in d]:
        rows["GPU switch"] = ", ".join(f"{d['switch_us']:,.0f} us ({d['switch']})" for d in switches)
    if held := [row for row in answer["backends"] if row.get("gpu_bytes")]:
        rows["GPU memory"] = ", ".join(f"{row['name']} {bytes_text(sum(row['gpu_bytes'].values()))}" for row in held)
    if answer.get("lifted"):
        states = Counter(row["state"] for row in answer["lifted"])
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        rows["GPU calls"] = f"{told}; lz cache list --all says why"
    if imported := [row for row in answer["backends"] if row.get("imported")]:
        rows["imported"] = ", ".join(
            f"{row['name']}: {counted(row['imported']['calls'], 'lifted call')}" for row in imported
        )
    if damaged := [row for row in answer["backends"] if (row.get("cache") or {}).get("set_aside")]:
        told = ", ".join(f"{row['name']} ({row['cache']['set_aside']})" for row in damaged)
        rows["caches"] = f"files set aside, since they were not as sealed: {told}; lz cache gc removes them"
    if answer["users"]:
        rows["users"] = "with a broker of their own each: " + ", ".join(
            f"{user['uid']} (pid {user['pid']}, LAYERZERO_RUNTIME_DIR={user['runtime_dir']})"
            for user in answer["users"]
        )
    for name, value in rows.items():
        head.add_row(name, Text(value))
    out().print(head)


def _table(backends: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("backend", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("pid", "ops", "answered", "failed", "restarts"):
        table.add_column(name, no_wrap=True, justify="right")
    if has_versions := out().width >= ROOMY:
        table.add_column("versions")
    for row in backends:
        state = state_of(row)
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        table.add_row(
            Text(row["name"]),
            Text(state, style=_STYLES.get(state, "yellow")),
            str(row["pid"] or ""),
            str(len(row["ops"])),
            f"{row['answered']:,}",
            Text(f"{row['failed']:,}", style="yellow" if row["failed"] else ""),
            Text(str(row["restarts"]), style="yellow" if row["restarts"] else ""),
            *([Text(versions, no_wrap=True, overflow="ellipsis")] if has_versions else []),
        )
    return table


_UNUSABLE = {
    "NOT_FOR_MACHINE": "elsewhere",
    "NOT_RUN": "not run",
    "NOT_INSTALLED": "not built",
    "NOT_JOINED": "not joined",
    "LIFTED_ONLY": "imported",
    "LIFTED_ELSEWHERE": "elsewhere",
    "SOURCE_NOT_ALLOWED": "refused",
    "SOURCE_CHANGED": "refused",
}


def state_of(row: Mapping[str, Any]) -> str:
    """Of a backend, in a word."""
    is_vacant = (row["unavailable"] or {}).get("code") == "NOT_JOINED"
    if row["state"] != "absent" and not (row["state"] == "disabled" and is_vacant):
        return str(row["state"])
    if not row["unavailable"]:
        return "idle"
    return _UNUSABLE.get(row["unavailable"]["code"], "unusable")


# Codes of backends that are left alone, which is no fault of anybody; and how they are called.
_LEFT_ALONE = {"NOT_FOR_MACHINE": "not for this machine", "NOT_RUN": "never run by this project"}


def _is_elsewhere(row: Mapping[str, Any]) -> bool:
    """A backend that is not for this machine, or that was never run."""
    return (row["unavailable"] or {}).get("code") in _LEFT_ALONE


def _is_imported(row: Mapping[str, Any]) -> bool:
    """A backend without a worker, whose lifted calls were imported, which is no fault."""
    return (row["unavailable"] or {}).get("code") == "LIFTED_ONLY"


def _print_wrong(answer: Mapping[str, Any], *, shows_all: bool) -> None:
    unusable = [row for row in answer["backends"] if row["unavailable"]]
    lines = _joined([row for row in unusable if not _is_elsewhere(row) and not _is_imported(row)])
    lines += [Text(f"  {problem}") for problem in answer["problems"]]
    if lines:
        out().print(Text("\nwhat is wrong", style="bold yellow"))
        for line in lines:
            out().print(line, soft_wrap=True)
    for code, text in _LEFT_ALONE.items() if shows_all else ():
        if alone := [row for row in unusable if row["unavailable"]["code"] == code]:
            out().print(Text(f"\n{text}", style="bold"))
            for line in _joined(alone):
                out().print(line, soft_wrap=True)


def _what_is_wrong(unavailable: Mapping[str, str]) -> str:
    """With the repair on a line of its own, to be copied."""
    repair = unavailable["repair"]
    return unavailable["detail"] + (f"\n    repair: {repair}" if repair else "")


def _joined(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    """One line for all backends of which the same is to be said: the commands of `lz env` take several names."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        name, text = row["name"], _what_is_wrong(row["unavailable"])
        alike.setdefault(text.replace(f"lz env build {name}", "lz env build NAMES"), []).append(name)
    return [Text(f"  {', '.join(names)}: {text.replace('NAMES', ' '.join(names))}") for text, names in alike.items()]


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
