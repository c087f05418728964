"""Everything that happens to the core in the simulator is recorded, and leads to the same actions again; a record
that is too long ends. In another process, of another hash seed: tests/process/test_recording.py."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests import simulation

from layerzero.broker.core.limits import Limits
from layerzero.broker.core.state import BrokerState
from layerzero.broker.recording.recorder import RecordedState, Recorder
from layerzero.broker.recording.replay import EVENTS, Result, replay
from layerzero.broker.recording.start import Start
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.ranking import Engine
from layerzero.capabilities.match import Rejection
from layerzero.ipc.errors import ConfigError, InvalidArgument

KEEPS: dict[Path, bool] = {}  # of worlds that were recorded: whether restarts wait for what workers keep
SEEDS = (53, 87, 67, 80, 104, 97, 6)  # in which everything happens that happens in the simulator
JOINED = {"BackendOffered", "WorkerGone", "WorkerLost"}  # to workers that join, which have a simulator of their own


def record(seed: int, path: Path, most_bytes: int = 1 << 28) -> Recorder:
    """The schedule of this seed, by a core that records."""
    recorder = Recorder(path, most_bytes)

    def make(engine: Engine, unusable: dict[str, Rejection], limits: Limits, _: random.Random) -> BrokerState:
        start = Start(
            seed=seed + 1,
            limits=limits,
            capabilities=dict(engine.capabilities),
            refused={},
            envs={},
            device=engine.device,
            gpus=tuple(device for uuid, device in engine.devices.items() if uuid),
            no_gpus="",
            policy=Policy.of(Layer("a file", {"rules": [{"match": {"op": "silu"}, "prefer": ["*"]}]})),
            unusable=unusable,
            joined=(),
            records={},
            times=(),
            compiled={},
        )
        return RecordedState(recorder, start)

    world = simulation.World(seed, make)
    world.run()
    recorder.close()
    KEEPS[path] = world.keeps
    return recorder


def again(path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The replay, by a core with what the simulator changes in its own: which ops keep something between calls."""
    made = Start.state

    def state(self: Start) -> BrokerState:
        core = made(self)
        core.closing.grants.keeping = frozenset({"silu"})
        if KEEPS[path]:
            core.replacements.keeping = frozenset({"silu"})
        return core

    with monkeypatch.context() as patch, path.open("rb") as lines:
        patch.setattr(Start, "state", state)
        return replay(lines)


def test_schedules_lead_to_the_same_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        path = tmp_path / f"{seed}.jsonl"
        count = record(seed, path).count
        result = again(path, monkeypatch)
        assert result.difference is None, "\n".join(result.difference.texts())
        assert (result.events, result.notes, result.end) == (count, [], "broker ended")
        seen |= set(result.kinds)
    assert seen == set(EVENTS) - JOINED


def test_a_record_ends_where_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.jsonl"
    record(1, path, most_bytes=60_000)
    assert path.stat().st_size < 61_000
    result = again(path, monkeypatch)
    assert (result.end, result.difference) == ("full", None)
    assert 0 < result.events < record(1, tmp_path / "whole.jsonl").count


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.jsonl"
    record(2, path)
    path.write_bytes(path.read_bytes()[:-60])
    result = again(path, monkeypatch)
    assert result.difference is None
    assert result.notes[-1] == "the record has no end: its broker was killed, or runs"


def test_nothing_is_written_where_it_must_not_be(tmp_path: Path) -> None:
    """A link that somebody has put there is not followed, and a folder that is missing is an error."""
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "record").symlink_to(other)
    for path in (tmp_path / "record", tmp_path / "none" / "record"):
        with pytest.raises(ConfigError, match="LAYERZERO_RECORD"):
            Recorder(path, 1 << 20)
    assert other.read_text() == "mine"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("head") / "record.jsonl"
    record(87, path)
    found: dict[str, Any] = json.loads(path.read_bytes().splitlines()[0])
    return found


@pytest.mark.parametrize("field", ["policy", "limits", "capabilities", "device"])
@pytest.mark.parametrize("value", [None, 7, {}, [{}], "x", [["a", 1]], {"float": "inf"}])
def test_a_start_that_is_none_is_refused(head: dict[str, Any], field: str, value: Any) -> None:
    if (field, value) == ("capabilities", {}):
        return  # a broker without any backend
    wrong = copy.deepcopy(head)
    wrong["start"][field] = value
    with pytest.raises(InvalidArgument, match="line 1"):
        replay([json.dumps(wrong).encode()])
