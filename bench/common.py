"""What the benches share: the result file with machine, versions and command."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
import zmq

import layerzero as lz

RESULTS = Path(__file__).parent / "results"


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
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *notes,
        *([""] if notes else []),
    ]
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(lines))
    return path
