"""`lz top` as it is on a terminal: rows, keys, history, and a broker that goes away. Printed once: test_history.py."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import Site, wait_ended
from tests.process.test_express import X, settle

import layerzero as lz
from layerzero.client.history.history_file import HistoryFile
from layerzero.client.history.sample import Durations, Sample, Worker
from layerzero.top.source import Source

pytest.importorskip("textual", reason="the extra `top` is not installed")
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from layerzero.top.app import Top

PATIENCE_S = 120.0


async def until(pilot: Pilot[None], predicate: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not predicate():
        assert time.monotonic() < end_s, [str(one.render()) for one in pilot.app.query(Static)]
        await pilot.pause(0.05)


def rows(app: Top, table: str) -> list[list[str]]:
    found = app.query_one(table, DataTable)
    return [[str(cell) for cell in found.get_row_at(n)] for n in range(found.row_count)]


def text(app: Top, name: str) -> str:
    return str(app.query_one(name, Static).render())


def served_by() -> str | None:
    lz.silu(X)
    report = lz.last_report()
    return None if report is None else report.backend


def chosen(app: Top, row: list[str]) -> bool:
    """Whether the row of this op and backend is there, and was chosen."""
    lz.silu(X, backend=row[1])
    found = [one[:2] for one in rows(app, "#ops")]
    if row in found:
        app.query_one("#ops", DataTable).move_cursor(row=found.index(row))
    return row in found


def kept(path: Path, at: int) -> None:
    file = HistoryFile.write(path)
    assert file is not None
    for second in range(30):
        calls = {("gelu", "then", "express"): Durations(40 + second, 1, {3: 40 + second})}
        file.add(Sample(1.0, calls, workers={"then": Worker("ready")}), at + second)
    file.close()


def test_live_history_keys_and_the_end_of_the_broker(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Calls are seen as they happen; left and right go through what was kept; `r` has another worker take over."""
    site = new_site()
    site.start().connect()
    [before] = site.wait_ready("alpha")
    settle()
    at = int(time.time()) - 3600
    path = tmp_path / "kept.sqlite"
    kept(path, at)

    async def use() -> None:
        app = Top(Source(path, None))
        async with app.run_test(size=(140, 40)) as pilot:

            def calls() -> bool:
                lz.silu(X)
                return any(row[0] == "alpha" and row[2] != "0.0" for row in rows(app, "#backends"))

            await until(pilot, calls)
            assert "live" in text(app, "#head")
            assert ["silu", "alpha"] in [row[:2] for row in rows(app, "#ops")]
            await pilot.press("r")
            await until(pilot, lambda: site.backend("alpha")["pid"] not in (None, before))
            await pilot.press("d")
            await until(pilot, lambda: "drained: alpha" in text(app, "#head"))
            assert served_by() == "beta"
            await pilot.press("d")
            await until(pilot, lambda: "drained" not in text(app, "#head"))
            await until(pilot, lambda: chosen(app, ["silu", "beta"]))
            await pilot.press("l")
            await until(pilot, lambda: "locked: silu to beta" in text(app, "#head"))
            assert served_by() == "beta"
            await pilot.press("l")
            await until(pilot, lambda: "locked" not in text(app, "#head"))
            app._source.at = at + 25.0
            await pilot.press("left")
            await until(
                pilot, lambda: rows(app, "#ops")[:1] == [["gelu", "then", "express", "55.0", "5.7 us", "7.9 us"]]
            )
            assert "history" in text(app, "#head")
            await pilot.press("right")
            await until(pilot, lambda: rows(app, "#ops") and rows(app, "#ops")[0][3] == "65.0")
            await pilot.press("n")
            await until(pilot, lambda: "live" in text(app, "#head"))
            pid = site.broker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
            await until(pilot, lambda: "broker" in text(app, "#said"))
            await pilot.press("q")

    with site.environment():
        asyncio.run(use())


def test_without_a_history_there_is_nothing_to_look_back_at(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Before the screen is taken."""
    with new_site().environment(), pytest.raises(lz.InvalidArgument, match="lz up --history"):
        Source(tmp_path / "none.sqlite", time.time()).look()
