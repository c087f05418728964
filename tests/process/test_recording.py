"""A broker that records what its core is told and does: the record leads to the same actions again, tells what became
of a call, and whoever changes a line is found out."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import SEGV
from tests.process.harness import Site, wait_ended
from tests.process.test_cli import data
from tests.process.test_cli import lz as command
from tests.process.test_express import X, bad

import layerzero as lz
from layerzero.broker.recording.replay import Result, replay
from layerzero.broker.recording.story import Story
from layerzero.client.cli.replay_log import replay_log
from layerzero.ipc.errors import InvalidArgument

SECRET = 1234.56789  # among the numbers of a call


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_worker_dies_and_the_record_does_it_again(new_site: Callable[..., Site], tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text("of the broker before\n")
    site = new_site(record=path, standby=1, express=0)
    site.start().connect()
    site.wait_ready("alpha", "beta")
    lz.silu(X)
    lz.silu(bad(SEGV, "alpha"))
    lz.silu(np.full(8, SECRET, np.float32), backend="beta")
    pid = site.broker_pid
    assert pid is not None
    lz.disconnect()
    os.kill(pid, signal.SIGTERM)
    wait_ended(pid)
    assert path.with_name("record.jsonl.1").read_text() == "of the broker before\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(SECRET).encode() not in path.read_bytes()
    assert lines_of(path)[-1]["end"] == "broker ended"
    noted = site.events("worker.exited")[0]["by_event"]  # the broker's log names the event that led to its line
    assert lines_of(path)[0]["start"]["joined"] == []

    found = data(command(site, "replay", "--log", str(path), "--json"))
    assert (found["difference"], found["notes"]) == (None, [])
    assert found["exits"][0] == {"event": noted, "backend": "alpha", "exit_code": -signal.SIGSEGV}
    [call] = found["fell_back"]

    story = command(site, "replay", "--log", str(path), "--call", call).stdout
    for line in ("CallArrived", r"Run .*alpha\.silu", r"WorkerExited .*signal 11", r"Run .*beta\.silu", "Answer"):
        found_at = re.search(line, story)
        assert found_at, f"{line}: {story}"
        story = story[found_at.end() :]
    of_alpha = Story(backend="alpha")
    replay(path.read_bytes().splitlines(keepends=True), of_alpha)
    assert re.search("Spawn .*WorkerReady .*Run .*WorkerExited", " ".join(line.what for line in of_alpha.lines))
    with pytest.raises(InvalidArgument, match="no regular file"):
        replay_log(Path("/dev/zero"), call=None, worker=None, as_json=True)
    check_changed(path, noted)


def check_changed(path: Path, noted: int) -> None:
    """What somebody has changed in a record is found, or said to be no record."""
    lines = path.read_bytes().splitlines(keepends=True)
    at, told = next((n, one) for n, one in enumerate(lines_of(path)) if one.get("n") == noted)
    action = json.loads(lines[at + 1])

    def with_line(place: int, line: Any) -> Result:
        return replay([*lines[:place], json.dumps(line).encode() + b"\n", *lines[place + 1 :]])

    other = {**told, "with": {**told["with"], "exit_code": -9}}
    renamed = {**action, "with": {**action["with"], "event": "worker.left"}}
    for result in (with_line(at, other), with_line(at + 1, renamed)):
        assert result.difference is not None
        said = next(result.difference.texts())
        assert said.startswith(f"event {noted} (line {at + 1}), WorkerExited: the core does something else")
    for wrong, pattern in (
        ({**told, "with": {**told["with"], "exit_code": "9"}}, r"WorkerExited\.exit_code: '9' is no int"),
        ({**told, "with": {}}, "WorkerExited has the fields backend"),
        ({**told, "event": "os.system"}, "is no event that this version knows"),
        ({**told, "n": noted + 1}, f"stands where {noted} would"),
        ([1], "no JSON object"),
    ):
        with pytest.raises(InvalidArgument, match=f"line {at + 1}: .*{pattern}"):
            with_line(at, wrong)
    with pytest.raises(InvalidArgument, match="line 1: no JSON"):
        replay([b'{"record":' + b"[" * 100_000 + b"\n"])
    killed = replay(lines[:at])  # as one whose broker was killed
    assert (killed.difference, killed.end) == (None, "")
    assert "has no end" in killed.notes[-1]
