"""What the benches share: their arguments, a broker of their own, times, verdicts, and the table with machine, versions
and command."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import zmq
from rich.console import Console
from rich.table import Table

import layerzero as lz

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """With `--quick`, which does what `quick` says and saves nothing."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=f"{quick}, nothing saved")
    return made


@contextlib.contextmanager
def own_broker(**environ: str) -> Iterator[Path]:
    """A broker and workers of this bench alone, with `environ` in their environment and ours. Yields its folder."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        own = {"LAYERZERO_RUNTIME_DIR": folder, "LAYERZERO_PERF_DB": f"{folder}/perf.db"}  # times of this run alone
        os.environ.update({**own, **environ})
        try:
            lz.connect()
            yield Path(folder)
        finally:
            lz.disconnect()
            os.environ.clear()
            os.environ.update(before)


def p50_us(call: Callable[[], Any], count: int, repeat: int = 1) -> float:
    """Median over `count` timings of `repeat` calls each, a call."""
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        for _ in range(repeat):
            call()
        times.append((time.perf_counter_ns() - start) / repeat)
    return statistics.median(times) / 1e3


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def at_most(ratio: float, limit: float) -> str:
    return f"{ratio:.2f} (at most {limit}: {verdict(ratio <= limit)})"


def finish(
    name: str,
    title: str,
    versions: Mapping[str, Mapping[str, str]],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    is_quick: bool = False,
    command: str = "",
) -> None:
    """Print the table of bench/NAME.py, or of another `command`, and write it unless the run was a quick one."""
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if not is_quick:
        print("written:", save(name, title, versions, command or f"python bench/{name}.py", headings, rows, notes))


def backend_versions() -> dict[str, Mapping[str, str]]:
    """Library versions of the backends whose workers have run."""
    return {b["name"]: b["versions"] for b in lz.status()["backends"] if b["versions"]}


def save(
    name: str,
    title: str,
    versions: Mapping[str, Mapping[str, str]],
    command: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> Path:
    """Write results/NAME.md."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown CPU")
    memory_gib = psutil.virtual_memory().total >> 30
    libraries = "".join(f", {library} {v}" for found in versions.values() for library, v in found.items())
    lines = [
        f"# {title}",
        "",
        f"- date: {datetime.date.today().isoformat()}",
        f"- machine: {cpu}, {psutil.cpu_count()} cores, {memory_gib} GiB, Linux {platform.release()}",
        f"- versions: Python {platform.python_version()}, layerzero-broker {lz.__version__}, pyzmq {version('pyzmq')}, "
        f"libzmq {zmq.zmq_version()}{libraries}",
        f"- command: `{command}`",
        "",
        "| " + " | ".join(headings) + " |",
        "| --- " + "| ---: " * (len(headings) - 2) + "| --- |",
        *("| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in rows),
        "",
        *notes,
        *([""] if notes else []),
    ]
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(lines))
    return path
