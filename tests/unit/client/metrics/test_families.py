"""Families of metrics, and that documents, alerts and board speak of those that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.client.metrics import text
from layerzero.client.metrics.families import BOUNDS, STATES, Snapshot
from layerzero.ipc.shm.counter_words import BUCKETS

DOCS = Path(__file__).parents[4] / "docs"
ALERTS, BOARD = DOCS / "metrics" / "alerts.yml", DOCS / "metrics" / "board.json"


def answer(**more: Any) -> dict[str, Any]:
    """Of a broker in which everything has happened once."""
    three = [["silu", "alpha", "DEADLINE", 1]]
    return {
        **dict.fromkeys(("up_s", "epoch", "clients", "open_calls", "lanes", "stale", "refused_pages", "problems"), 1),
        "version": "1",
        "arena_bytes": {"host": 8, "gpu": 0},
        "durations": [["silu", "alpha", "express", [1] * BUCKETS, 2_500_000_000]],
        "queued": [["silu", [1] + [0] * (BUCKETS - 1), 500]],
        **dict.fromkeys(("errors", "fallbacks", "late", "rejections"), three),
        "copied": [["silu", "express", 32]],
        "restarts": [["alpha", "crash", 1]],
        "compiles": [["alpha", "ok", 1]],
        "compile_s": [["alpha", 0.5]],
        "mismatches": [["silu", "alpha", 1]],
        "workers": [["alpha", "ready", 1, 0, 0]],
        **more,
    }


def shown(given: dict[str, Any]) -> str:
    return text.render(Snapshot(given, {"alpha": {"GPU-1": 1 << 30}}).collect()).decode()


def names() -> set[str]:
    """Of samples."""
    return {sample.name for family in text_string_to_metric_families(shown(answer())) for sample in family.samples}


def test_a_duration_is_a_histogram_of_seconds() -> None:
    """Buckets hold what is in those before them, too."""
    samples = [s for family in text_string_to_metric_families(shown(answer())) for s in family.samples]
    buckets = [s for s in samples if s.name == "layerzero_call_duration_seconds_bucket"]
    assert [s.labels["le"] for s in buckets] == BOUNDS
    assert [s.value for s in buckets] == list(range(1, BUCKETS + 1))
    assert float(BOUNDS[-2]) == pytest.approx(16.777216)
    assert [s.value for s in samples if s.name == "layerzero_call_duration_seconds_sum"] == [2.5]


def test_what_workers_hold_of_gpus_has_the_backend_and_the_gpu() -> None:
    samples = [s for family in text_string_to_metric_families(shown(answer())) for s in family.samples]
    [held] = [s for s in samples if s.name == "layerzero_gpu_memory_bytes"]
    assert (held.labels, held.value) == ({"backend": "alpha", "gpu": "GPU-1"}, 1 << 30)


@pytest.mark.parametrize("backend", ["alpha", 'a"b', "a\\b\n", "", "\u00e4", "{}"])
def test_the_text_is_what_the_library_writes(backend: str) -> None:
    """Byte for byte, whatever values labels have."""
    given = answer(restarts=[[backend, "crash", 3]], compile_s=[[backend, 1.5e-7]], epoch=1e17)
    assert text.render(Snapshot(given).collect()) == generate_latest(Snapshot(given))


def test_values_of_labels_are_quoted() -> None:
    """Whatever a backend calls itself, it ends no line and opens no series."""
    said = shown(answer(restarts=[['a"} 9\nlayerzero_up_seconds 7\\', "crash", 1]]))
    found = [s for f in text_string_to_metric_families(said) for s in f.samples if "restarts" in s.name]
    assert [s.labels["backend"] for s in found] == ['a"} 9\nlayerzero_up_seconds 7\\']


def test_states_are_those_of_workers() -> None:
    """A new one would be 0 everywhere. Of one that drains another has the backend's calls, and is the one shown."""
    assert set(STATES) == {state.value for state in WorkerState} - {"draining", "retired"}


def test_the_page_has_every_metric_and_no_other() -> None:
    """With the suffix that a query needs."""
    table = re.findall(r"`(layerzero_\w+)`", (DOCS / "metrics.md").read_text(encoding="utf-8"))
    histograms = {name.removesuffix("_bucket") for name in names() if name.endswith("_bucket")}
    plain = {name for name in names() if not any(name.startswith(one) for one in histograms)}
    assert set(table) == plain | histograms


@pytest.mark.parametrize("file", [ALERTS, BOARD])
def test_alerts_and_board_ask_for_metrics_that_there_are(file: Path) -> None:
    """A query for another is silent for ever."""
    asked = set(re.findall(r"\blayerzero_\w+", file.read_text(encoding="utf-8")))
    assert asked
    assert asked <= names()


def test_the_board_is_one_that_can_be_imported() -> None:
    """Panels lie in the grid and beside each other, and ask the data source that is chosen."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    places = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        places.add((at["x"], at["y"]))
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert len(places) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here (Debian: prometheus)")
def test_promtool_finds_nothing_wrong() -> None:
    """With the rules, and with what is shown."""
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, capture_output=True)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=shown(answer()), check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
