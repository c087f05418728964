"""Metrics of many nodes: a broker's own families, with the label that says whose."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
from prometheus_client.parser import text_string_to_metric_families

from layerzero.client.metrics import text
from layerzero.client.metrics.families import COUNTS, Snapshot
from layerzero.client.metrics.nodes import NodeAnswer, NodesSnapshot
from layerzero.ipc.shm.counter_words import BUCKETS

STATES = ("ok", "NODE_LOST")


def answer(calls: int) -> dict[str, Any]:
    """Of a broker's `metrics`."""
    numbers = dict.fromkeys(
        ("up_s", "epoch", "clients", "open_calls", "lanes", "stale", "refused_pages", "problems"), 1
    )
    keys = {"late_failures": "late", "copied_bytes": "copied", "worker_restarts": "restarts"}
    keys |= {"compile_seconds": "compile_s", "shadow_mismatches": "mismatches"}
    rows: dict[str, list[Any]] = {keys.get(name, name): [] for name, *_ in COUNTS}
    durations = [["silu", "alpha", "broker", [calls] + [0] * (BUCKETS - 1), 1000]]
    return {
        "version": "1",
        **numbers,
        **rows,
        "durations": durations,
        "queued": [],
        "errors": [["silu", "none", "NO_BACKEND", 2]],
        "arena_bytes": {"host": 1, "gpu": 0},
        "workers": [["alpha", "ready", 0, 0, 0]],
    }


def test_each_nodes_numbers_have_its_name_and_a_lost_node_is_told() -> None:
    """And what a node has is, but for the label, what its broker's own endpoint says."""
    nodes = [
        NodeAnswer("one", "h1", "ok", 0, answer(3), {"alpha": {"GPU-1": 7}}),
        NodeAnswer("two", "h2", "ok", 2, answer(5)),
        NodeAnswer("gone", "h3", "NODE_LOST"),
    ]
    lines = text.render(NodesSnapshot(nodes, STATES).collect()).decode().splitlines()
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    assert value("layerzero_node_state", node="gone", host="h3", state="NODE_LOST") == 1
    assert value("layerzero_node_state", node="one", host="h1", state="NODE_LOST") == 0
    assert value("layerzero_node_broker_restarts_total", node="two") == 2
    assert value("layerzero_calls_total", node="two", op="silu", backend="alpha", outcome="ok") == 5
    assert value("layerzero_gpu_memory_bytes", node="one", backend="alpha", gpu="GPU-1") == 7
    own = text.render(Snapshot(nodes[0].metrics or {}, nodes[0].gpu_bytes).collect()).decode().splitlines()
    of_one = [re.sub(r"\{\}", "", re.sub(r',?node="one",?', _between, line)) for line in lines if 'node="one"' in line]
    of_one = [line for line in of_one if "layerzero_node_" not in line]
    assert of_one == [line for line in own if not line.startswith("#")]


def _between(match: re.Match[str]) -> str:
    return "," if match[0].startswith(",") and match[0].endswith(",") else ""
