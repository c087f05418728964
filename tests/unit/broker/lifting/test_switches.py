"""What a GPU's change between processes takes: measured once, kept, and nothing believed that is no such time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.broker.lifting import switches
from layerzero.broker.lifting.switches import Switches, figure
from layerzero.broker.selection.prices import SWITCH_US
from layerzero.envs.probe.child import Ended

GPU, OTHER = "GPU-1", "GPU-2"


class Engine:
    """As much of it as is asked."""

    def __init__(self, driver: str = "580.1") -> None:
        self.devices = {"": SimpleNamespace(driver_version=""), GPU: SimpleNamespace(driver_version=driver)}
        self.switches: dict[str, float] = {}
        self.has_staying = True

    def note_switch(self, uuid: str, us: float) -> None:
        self.switches[uuid] = us


class Machine:
    """Where processes measure, and say this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said, self.runs = b'{"us": 143.5}\n', 0
        monkeypatch.setattr(switches, "run_process", self.run)

    def run(self, argv: list[str], **_: Any) -> Ended:
        assert argv[1:4] == ["-m", "layerzero.workers.switching", GPU]
        self.runs += 1
        return Ended(0, self.said, b"")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def settle(found: Switches) -> None:
    """Look, until what that has started is over, and once more."""
    found.look({GPU})
    for thread in [one for one in threading.enumerate() if one.name == "switching"]:
        thread.join()
    found.look({GPU})


def of(path: Path, engine: Engine) -> Switches:
    return Switches(path, engine)  # type: ignore[arg-type]


def test_what_was_measured_is_kept_for_this_gpu_and_driver(tmp_path: Path, machine: Machine) -> None:
    path, engine = tmp_path / "gpus" / "switches.json", Engine()
    found = of(path, engine)
    assert found.facts(GPU) == {"switch_us": SWITCH_US, "switch": "default; not measured yet"}
    settle(found)
    assert engine.switches == {GPU: 143.5}
    assert found.facts(GPU) == {"switch_us": 143.5, "switch": "measured"}
    again = Engine()
    settle(of(path, again))
    assert (again.switches, machine.runs) == ({GPU: 143.5}, 1)
    newer = Engine(driver="590.2")
    machine.said = b'{"us": 99}'
    settle(of(path, newer))
    assert (newer.switches, machine.runs) == ({GPU: 99.0}, 2)
    assert json.loads(path.read_text()) == {f"{GPU} 580.1": 143.5, f"{GPU} 590.2": 99.0}


def test_nothing_is_measured_while_all_is_lifted(tmp_path: Path, machine: Machine) -> None:
    engine = Engine()
    engine.has_staying = False
    settle(of(tmp_path / "switches.json", engine))
    assert machine.runs == 0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"us": -30}', "-30 us were measured, which is no such time; allowed: 0 to 5000"),
        (b'{"us": 1e9}', "1e+09 us were measured"),
        (b'{"us": NaN}', "nan us were measured"),
        (b'{"us": "many"}', "it says no figure"),
        (b'{"error": "the GPU did not take turns within 1.5 s"}', "the GPU did not take turns within 1.5 s"),
        (b"[]", "something else"),
        (b"", "ended without a word"),
        (b"\xff\xfe", "ended without a word"),
    ],
)
def test_what_is_no_such_time_is_refused_and_said(tmp_path: Path, machine: Machine, said: bytes, why: str) -> None:
    """And not tried again by this broker."""
    assert why in str(figure(said))
    machine.said = said
    path, engine = tmp_path / "switches.json", Engine()
    found = of(path, engine)
    settle(found)
    settle(found)
    assert (engine.switches, machine.runs, path.exists()) == ({}, 1, False)
    facts = found.facts(GPU)
    assert facts["switch_us"] == SWITCH_US
    assert facts["switch"].startswith("default; ")
    assert why in facts["switch"]


@pytest.mark.parametrize("kept", ["", "{", "[]", f'{{"{GPU} 580.1": -90}}', f'{{"{GPU} 580.1": "x"}}', " " * 70_000])
def test_damaged_file_is_measured_anew(tmp_path: Path, machine: Machine, kept: str) -> None:
    path, engine = tmp_path / "switches.json", Engine()
    path.write_text(kept)
    found = of(path, engine)
    assert engine.switches == {}
    settle(found)
    assert json.loads(path.read_text()) == {f"{GPU} 580.1": 143.5}


def test_noise_below_zero_is_zero(tmp_path: Path, machine: Machine) -> None:
    """By MPS a GPU does not change."""
    machine.said, engine = b'{"us": -0.8}', Engine()
    settle(of(tmp_path / "switches.json", engine))
    assert engine.switches == {GPU: 0.0}
    (tmp_path / "kept.json").write_text(f'{{"{GPU} 580.1": -0.8}}')
    of(tmp_path / "kept.json", engine := Engine())
    assert engine.switches == {GPU: 0.0}


def test_a_broker_that_ends_takes_all_that_measure_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another GPU's has ended before."""
    pids, killed, is_running, is_over = {GPU: 101, OTHER: 102}, list[int](), threading.Event(), threading.Event()

    def run(argv: list[str], on_start: Callable[[int], None], **_: Any) -> Ended:
        if argv[3] == GPU:
            is_running.wait(60)
        on_start(pids[argv[3]])
        if argv[3] == OTHER:
            is_running.set()
            is_over.wait(60)
        return Ended(0, b'{"us": 1}', b"")

    monkeypatch.setattr(switches, "run_process", run)
    monkeypatch.setattr(switches, "kill_group", killed.append)
    engine = Engine()
    engine.devices[OTHER] = engine.devices[GPU]
    found = of(tmp_path / "switches.json", engine)
    found.look({GPU, OTHER})
    until_s = time.monotonic() + 60
    while GPU not in engine.switches and time.monotonic() < until_s:
        found.look(())
    found.close()
    is_over.set()
    assert killed == [102]


def test_file_that_cannot_be_written_costs_nothing_but_the_next_broker(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "gpus").write_text("a file")
    engine = Engine()
    settle(of(tmp_path / "gpus" / "switches.json", engine))
    assert engine.switches == {GPU: 143.5}
