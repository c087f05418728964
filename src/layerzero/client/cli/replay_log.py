"""`lz replay --log`: what a broker's core was told (lz up --record), told again."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.broker.recording.replay import Result
    from layerzero.broker.recording.story import Story

MAX_SHOWN = 12


def replay_log(path: Path, *, call: str | None, worker: str | None, as_json: bool) -> int:
    """Returns the exit code: 1 where the core does something else than was recorded. Raises InvalidArgument."""
    from layerzero.broker.recording.replay import replay
    from layerzero.broker.recording.story import Story
    from layerzero.client.cli.output import FAILED, err, print_json
    from layerzero.ipc.errors import InvalidArgument

    if call is not None and worker is not None:
        raise InvalidArgument("--call and --worker are two stories: ask for one")
    story = Story(call=call or "", backend=worker or "") if call or worker else None
    try:
        with err().status(f"{path} ..."):
            result = replay(_lines(path), story)
    except OSError as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc.strerror}") from exc
    if as_json:
        print_json(_to_dict(path, result, story))
    else:
        _show(result, story)
    return FAILED if result.difference is not None else 0


def _lines(path: Path) -> Iterator[bytes]:
    from layerzero.broker.recording.replay import MAX_LINE

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        while line := stream.readline(MAX_LINE + 1):
            yield line


def _to_dict(path: Path, result: Result, story: Story | None) -> dict[str, object]:
    found = result.difference
    return {
        "file": str(path),
        "package": result.package,
        "unix_s": result.unix_s,
        "seconds": result.last_s - result.begun_s,
        "events": result.events,
        "actions": result.actions,
        "end": result.end,
        "notes": result.notes,
        "kinds": dict(result.kinds.most_common()),
        "failed": [{"call": one, "code": code} for one, code in result.failed],
        "fell_back": result.fell_back,
        "exits": [{"event": n, "backend": backend, "exit_code": code} for n, backend, code in result.exits],
        "difference": None
        if found is None
        else {"event": found.event, "line": found.line, "recorded": found.recorded, "now": found.now},
        "story": None if story is None else [one._asdict() for one in story.lines],
    }


def _show(result: Result, story: Story | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import note, out
    from layerzero.ipc.version import __version__

    if story is not None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head in ("event", "ms", "what", ""):
            table.add_column(head, justify="right" if head == "ms" else "left", overflow="fold")
        for line in story.lines:
            ms = f"{1e3 * (line.at_s - result.begun_s):,.3f}"
            is_action = "." in line.number
            table.add_row(line.number, "" if is_action else ms, f"{'  ' * is_action}{line.what}", Text(line.text))
        out().print(table)
        if not story.lines:
            note("the record says nothing of it")
        if story.dropped:
            note(f"and {story.dropped:,} more lines")
    if result.difference is not None:
        out().print(Text("\n".join(result.difference.texts())), soft_wrap=True)
    else:
        seconds = result.last_s - result.begun_s
        said = f"{result.events:,} events of {seconds:,.1f} s led to the same {result.actions:,} actions"
        out().print(said, soft_wrap=True, highlight=False)
    if story is None:
        _show_what_went_wrong(result)
    for text in result.notes:
        note(text)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(result.unix_s, 0.0), 4e9)))
    by = f"recorded by {result.package} on {when}"
    note(by if result.package == __version__ else f"{by}; this is {__version__}")


def _show_what_went_wrong(result: Result) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import note, out

    rows = [f"event {n}: a worker of {backend} ended, {_ended(code)}" for n, backend, code in result.exits]
    rows += [f"call {call}: failed, {code}" for call, code in result.failed]
    rows += [f"call {call}: failed somewhere, and was answered elsewhere" for call in result.fell_back]
    for row in rows[:MAX_SHOWN]:
        out().print(Text(row), soft_wrap=True)
    if len(rows) > MAX_SHOWN:
        note(f"and {len(rows) - MAX_SHOWN:,} more: --json has all")
    if result.failed or result.fell_back:
        note("--call tells one call's story, --worker that of a backend's workers")


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
