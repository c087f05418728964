"""What the page shows of files: capsules, traces, the last conflict matrix. Read when they are looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.client.capsules import form, store
from layerzero.ipc import files

MAX_TRACES = 200
MAX_CALLS = 600  # of a trace, in its picture
MAX_MATRIX_BYTES = 16 << 20
SUFFIX = ".lztrace"


def capsules(folder: Path) -> list[dict[str, Any]]:
    """The newest first."""
    return [
        {
            "name": name,
            "made_s": None if one is None else one.made_s,
            "call": "" if one is None else one.label,
            "kernel": "" if one is None else one.failed.kernel_id,
            "ended_by": "" if one is None else one.failed.what,
            "served_by": "" if one is None else one.served_by,
            "data": "" if one is None else "yes" if one.has_data else one.left_out,
            "problem": problem,
        }
        for name, one, problem in reversed(list(store.entries(folder)))
    ]


def capsule(folder: Path, name: str) -> dict[str, Any]:
    """All of it but its bytes. Raises InvalidArgument."""
    if name not in store.names(folder):
        raise lz.InvalidArgument(f"no capsule is called {name!r:.80}; lz capsule list has all")
    found = form.read(folder / name)
    try:
        log = files.read(folder / name / form.LOG, form.MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        log = ""
    return {**found.to_dict(), "call": found.label, "log": log[-16_384:], "replay": f"lz replay {name} --env all"}


def traces(folder: Path) -> dict[str, Any]:
    """Files that `trace.save` wrote to the folder, the newest first."""
    try:
        found = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime)[:MAX_TRACES]
        rows = [{"name": path.name, "bytes": path.stat().st_size, "made_s": path.stat().st_mtime} for path in found]
    except OSError:
        rows = []
    return {"folder": str(folder), "traces": rows}


def trace(folder: Path, name: str) -> dict[str, Any]:
    """Its tables, and its first calls for a picture: label, backend, thread, start and duration in us, error. Raises
    InvalidArgument."""
    if name not in {row["name"] for row in traces(folder)["traces"]}:
        raise lz.InvalidArgument(f"no trace is called {name!r:.80} in {folder}")
    found = lz.load_trace(folder / name)
    calls = sorted(found.calls, key=lambda one: one.start_ns)[:MAX_CALLS]
    begin = calls[0].start_ns if calls else 0
    return {
        "name": name,
        "tables": {by: found.text(by, None) for by in ("backend", "scope")},
        "facts": dict(found.facts),
        "count": len(found.calls),
        "calls": [
            {
                "label": one.label,
                "backend": one.backend or "none",
                "thread": str(one.thread),
                "start_us": (one.start_ns - begin) / 1e3,
                "us": one.elapsed_ns / 1e3,
                "scope": "/".join(one.scopes),
                "error": one.error.partition("\n")[0],
                "fell_back": len(one.attempts),
            }
            for one in calls
        ],
    }


def matrix(path: Path) -> dict[str, Any] | None:
    """What the last `lz matrix` found; None where none was made here."""
    try:
        value = json.loads(files.read(path, MAX_MATRIX_BYTES))
    except (OSError, ValueError, lz.LayerZeroError):
        return None
    return value if isinstance(value, dict) else None
