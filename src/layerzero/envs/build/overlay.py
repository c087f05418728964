"""Environments over an interpreter that has a heavy stack already: a few wheels, and below them what it has.

An overlay is a venv whose site-packages come first and which then reads the folders of packages of the interpreter
below, its base. Its record says which distributions of the base it was built for: when those change, the overlay is
refused until it is built again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layerzero.envs.build.base import Base
from layerzero.envs.build.lock import Lock
from layerzero.envs.build.resolution import Resolution

LINK = "lz_overlay.pth"


def key(facts: Sequence[object], requirements: Sequence[str], lock: Lock | None, base: Base) -> str:
    """Names what is asked for; what it led to (`content`) is known after a build only."""
    return _digest([*facts, base.identity, requirements, lock.sha256 if lock else ""])


def content(asked: str, resolution: Resolution) -> str:
    """The id of what is installed, and of what the base must have for it."""
    return _digest([asked, dict(resolution.taken), resolution.text])


def facts(asked: str, base: Base, wheelhouse: Path | None, resolution: Resolution) -> dict[str, Any]:
    """What the record of an environment keeps of its overlay."""
    return {
        "key": asked,
        "python": str(base.python.path),
        "taken": dict(resolution.taken),
        "unlocked": list(resolution.unlocked),
        "wheelhouse": str(wheelhouse) if wheelhouse else None,
    }


def link(folder: Path, base: Base) -> None:
    """Let the venv in `folder` import what the base has. Not through include-system-site-packages: that skips the
    packages of a base that is a venv itself."""
    lines = [f"import site; site.addsitedir({str(path)!r})\n" for path in base.site]
    site_packages(folder, base.python.minor).joinpath(LINK).write_text("".join(lines), encoding="utf-8")


def site_packages(prefix: Path, minor: str) -> Path:
    return prefix / "lib" / f"python{minor}" / "site-packages"


def records(root: Path, name: str, record_name: str, kind: str = "overlay") -> Iterator[dict[str, Any]]:
    """The records of all overlays of that environment, newest first; with the kind "interpreter", of all states of its
    existing one."""
    found = []
    for path in (root / "envs").glob(f"{name}-*/{record_name}"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["name"] == name and record[kind]:
                found.append((str(record["built_at"]), record))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no overlay, or removed at this moment
    return (record for _, record in sorted(found, key=lambda pair: pair[0], reverse=True))


def built(found: Iterator[dict[str, Any]], asked: str, base: Base) -> dict[str, Any] | None:
    """The record to use for what is asked: the newest that suits the base as it is, else the newest."""
    ours = [record for record in found if record["overlay"].get("key") == asked]
    return next((record for record in ours if not drift(record, base)), ours[0] if ours else None)


def drift(record: dict[str, Any], base: Base) -> str:
    """What of the base is no longer as the overlay was built for; empty when nothing."""
    changed = []
    if record["python"] != base.python.version:
        changed.append(f"Python {record['python']} is now {base.python.version}")
    for name, version in record["overlay"]["taken"].items():
        now = base.dists.get(name)
        if now is None:
            changed.append(f"{name} {version} is gone")
        elif now.version != version:
            changed.append(f"{name} {version} is now {now.version}")
    return f"{record['overlay']['python']} has changed since the build: {', '.join(changed)}" if changed else ""


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
