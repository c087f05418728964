"""`lz logs`: the broker's JSON lines in a readable form, workers' text as it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from layerzero.client.cli.output import note, out, print_json
from layerzero.client.connection import start
from layerzero.ipc.errors import BrokerLost, InvalidArgument
from layerzero.ipc.names import nearest
from layerzero.ipc.transport.endpoints import Endpoints

POLL_S = 0.2
BLOCK_BYTES = 1 << 16
_BAD, _GOOD = ("failed", "disabled", "exited", "unusable", "dropped", "refused", "unreachable"), ("started", "ready")


def logs(backend: str | None, *, lines: int, follow: bool, as_json: bool) -> None:
    """Print the last `lines` lines, then with `follow` what comes, until interrupted."""
    path = _path(start.endpoints(), backend)
    with path.open("rb") as file:
        position = _seek_last_lines(file.fileno(), lines)
        if not os.fstat(file.fileno()).st_size:
            note(f"{path} is empty")
    source = _follow(path, position) if follow else _read(path, position)
    try:
        for line in source:
            _print(line, backend, as_json=as_json)
    except KeyboardInterrupt:
        pass


def _path(where: Endpoints, backend: str | None) -> Path:
    path = where.log if backend is None else where.worker_log(backend)
    if path.exists():
        return path
    if backend is None:
        raise BrokerLost(f"there is no log at {path}: no broker has run in this runtime folder", repair="lz up")
    known = sorted(p.stem.removeprefix("worker-") for p in where.folder.glob("worker-*.log"))
    raise InvalidArgument(
        f"backend {backend!r} has no log in {where.folder}; "
        + (f"those with one: {', '.join(known)}" if known else "no worker has been started there")
        + nearest(backend, known),
        repair="lz status for the names; lz logs for the broker's own",
    )


def _seek_last_lines(fd: int, count: int) -> int:
    """Where the last `count` lines begin."""
    end = os.fstat(fd).st_size
    position, missing = end, count
    while position > 0:
        begin = max(position - BLOCK_BYTES, 0)
        block = os.pread(fd, position - begin, begin)
        for offset in range(len(block) - 1, -1, -1):
            if block[offset : offset + 1] == b"\n" and begin + offset != end - 1:  # the last line's own end
                missing -= 1
                if missing == 0:
                    return begin + offset + 1
        position = begin
    return 0 if count else end


def _read(path: Path, position: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            yield line.decode(errors="replace").rstrip("\n")


def _follow(path: Path, position: int) -> Iterator[str]:
    """Whole lines as they come; goes on with the new file when the log was moved away."""
    file = path.open("rb")
    file.seek(position)
    part = b""
    try:
        while True:
            data = file.readline()
            if data:
                part += data
                if part.endswith(b"\n"):
                    yield part.decode(errors="replace").rstrip("\n")
                    part = b""
                continue
            if path.exists() and path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = path.open("rb")
            else:
                time.sleep(POLL_S)
    finally:
        file.close()


def _print(line: str, backend: str | None, *, as_json: bool) -> None:
    record = _parse(line)
    if as_json:
        print_json(record if record is not None else {"backend": backend, "line": line}, indent=None)
    elif record is None:
        out().print(Text(line), soft_wrap=True)
    else:
        out().print(readable(record), soft_wrap=True)


def _parse(line: str) -> dict[str, Any] | None:
    """An event of the log, or None for plain text such as a traceback."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value and "time" in value else None


def readable(record: dict[str, Any]) -> Text:
    """One line, and an indented block for each fact that has several."""
    event = str(record["event"])
    seconds = float(record["time"])
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
    style = "bold red" if event.endswith(_BAD) else "bold green" if event.endswith(_GOOD) else "bold"
    text = Text.assemble((clock, "dim"), "  ", (f"{event:<16}", style))
    blocks = []
    for name, value in record.items():
        if name in ("time", "event") or value in (None, "", []):
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        if "\n" in shown.strip():
            blocks.append((name, shown.strip()))
            continue
        quoted = json.dumps(shown) if isinstance(value, str) and " " in shown else shown.strip()
        text.append(f" {name}=", style="dim").append(quoted)
    for name, block in blocks:
        text.append(f"\n    {name}:", style="dim")
        for part in block.splitlines():
            text.append(f"\n    | {part}")
    return text
