"""`lz restart`: other workers in the place of those that run, one after the other, and no call lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from layerzero.client.cli.options import Json
from layerzero.ipc.wording import counted

TIMEOUT_S = 120.0
POLL_S, GRACE_S = 0.05, 2.0
SHORT_S = 1.0  # of calls that end sooner nothing is said
_COMING = ("backoff", "probing", "starting", "killing")
Ask = Callable[..., Any]


def restart(
    backends: Annotated[
        list[str], typer.Argument(metavar="BACKEND...", help="Of an environment of functions: all workers.")
    ],
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="How long each worker may take to start, and to take over."),
    ] = TIMEOUT_S,
    force: Annotated[
        bool, typer.Option("--force", help="End workers at once, with the calls and objects that they have.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replace running workers: another starts, takes over when it is ready, and the one before ends with the calls that
    it has. What a backend has failed at is forgotten. Exit code 1 when one was not replaced."""
    from layerzero.client.cli.broker import connection
    from layerzero.client.cli.output import FAILED, note, out, print_json
    from layerzero.client.connection import start

    with connection(start.endpoints()) as session:
        names = [one for name in backends for one in session.ask("backends_of", name=name)["backends"]]
        rows = []
        for name in dict.fromkeys(names):
            rows.append(replace(session.ask, name, timeout_s=timeout, force=force, say=note))
            if not as_json and (rows[-1]["before"] or not rows[-1]["ok"] or len(names) == 1):
                out().print(Text(f"{name}: {rows[-1]['said']}"), soft_wrap=True)
    if as_json:
        print_json({"backends": rows})
    elif len(names) > 1 and not any(row["before"] or not row["ok"] for row in rows):
        out().print(Text("no worker of these runs; the next call that needs one starts it"), soft_wrap=True)
    raise typer.Exit(0 if all(row["ok"] for row in rows) else FAILED)


def _silent(_: str) -> None:
    pass


def replace(
    ask: Ask, name: str, *, timeout_s: float, force: bool, say: Callable[[str], None] = _silent
) -> dict[str, Any]:
    """Replace the worker of one backend, and wait for that. `say` takes what it waits for. Returns what there is to
    show: `before` and `pid`, 0 for none, `ok`, `seconds` and `said`, for people."""
    start_s = time.monotonic()
    found = ask("restart", backend=name, timeout_s=timeout_s, force=force)
    before = found["workers"][0]["pid"]
    found = ask("restarting", backend=name)
    untold = [] if force or found["is_joined"] else [_keeps, _has_calls]
    while not _is_over(found, before, force) and time.monotonic() - start_s < timeout_s + GRACE_S:
        if time.monotonic() - start_s >= timeout_s and _has_taken_over(found, before):
            break
        for awaited in list(untold):
            if what := awaited(found, before, time.monotonic() - start_s):
                until = f"waiting for up to {timeout_s:g} s; lz restart --force ends it at once"
                say(f"{name}: pid {before} {what}: {until}")
                untold.remove(awaited)
        time.sleep(POLL_S)
        found = ask("restarting", backend=name)
    seconds = time.monotonic() - start_s
    is_ok, said = _outcome(found, before, seconds)
    pid = found["workers"][0]["pid"]
    return {
        "name": name,
        "state": found["workers"][0]["state"],
        "before": before,
        "pid": pid,
        "ok": is_ok,
        "seconds": round(seconds, 3),
        "unavailable": found["unavailable"],
        "said": said,
    }


def _keeps(found: Mapping[str, Any], before: int, _: float) -> str:
    kept = next((one["kept"] for one in found["workers"] if one["pid"] == before), 0)
    if not kept or _has_taken_over(found, before):
        return ""
    what = "object or stream" if kept == 1 else "objects and streams"
    return f"keeps {kept:,} {what} for clients, which nobody can take over"


def _has_calls(found: Mapping[str, Any], before: int, waited_s: float) -> str:
    """Where those are all that is waited for: the other worker is ready."""
    calls = next((one["calls"] for one in found["workers"] if one["pid"] == before), 0)
    others = [one["state"] for one in found["workers"] if one["pid"] != before]
    return f"has {counted(calls, 'call')}" if calls and others == ["ready"] and waited_s > SHORT_S else ""


def _has_taken_over(found: Mapping[str, Any], before: int) -> bool:
    return bool(found["workers"][0]["pid"] != before)


def _is_over(found: Mapping[str, Any], before: int, force: bool) -> bool:
    """Nothing more is to come of it."""
    workers = found["workers"]
    is_alone = len(workers) == 1
    if not before or found["is_joined"] or found["failure"]:
        return is_alone
    if force:
        return is_alone and workers[0]["pid"] != before and workers[0]["state"] not in _COMING
    return is_alone and _has_taken_over(found, before)


def _outcome(found: Mapping[str, Any], before: int, seconds: float) -> tuple[bool, str]:
    first, *others = found["workers"]
    unavailable = found["unavailable"]
    if found["is_joined"] and before:
        return False, f"pid {before} was started elsewhere: restart its container. Its failures are forgotten"
    if not before and unavailable:
        repair = f"\n    repair: {unavailable['repair']}" if unavailable["repair"] else ""
        return False, f"still unusable: {unavailable['detail']}{repair}"
    if not before:
        return True, "its failures are forgotten; it starts with the next call that needs it"
    if found["failure"] or not _has_taken_over(found, before):
        why = found["failure"] or "another worker has not taken over in time"
        return False, f"pid {before} goes on serving: {why}; lz restart --force ends it at once"
    if others:
        calls = sum(one["calls"] for one in others)
        return False, f"pid {first['pid']} has taken over; pid {before} still runs, and ends with its {calls} calls"
    if first["state"] != "ready":
        return False, f"pid {before} has ended; the next one is {first['state']}"
    return True, f"pid {before} -> {first['pid']}, after {seconds:.1f} s"
