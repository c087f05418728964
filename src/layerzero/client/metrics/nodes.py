"""Metrics of all nodes of a cluster: each family as a broker's own, with the label `node`, and what became of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layerzero.client.metrics.families import Histogram, Snapshot


@dataclass(frozen=True)
class NodeAnswer:
    """What is known of a node. `metrics`: its broker's answer, None where there is none that can be read here."""

    node: str
    host: str
    state: str
    broker_restarts: int = 0
    metrics: Mapping[str, Any] | None = None
    gpu_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class NodesSnapshot(Collector):
    """Of `nodes`; `states` are all that a node may be in."""

    def __init__(self, nodes: Sequence[NodeAnswer], states: Sequence[str]) -> None:
        self._nodes, self._states = nodes, states

    def collect(self) -> Iterator[Metric]:
        """As Snapshot.collect; a family that no node has is left out."""
        states = GaugeMetricFamily(
            "layerzero_node_state", "1 for the state that it is in.", labels=("node", "host", "state")
        )
        what = "Brokers of the node that ended and were started again."
        restarts = CounterMetricFamily("layerzero_node_broker_restarts", what, labels=("node",))
        families: dict[str, list[tuple[str, Metric]]] = {}
        for one in self._nodes:
            for state in self._states:
                states.add_metric((one.node, one.host, state), float(state == one.state))
            restarts.add_metric((one.node,), float(one.broker_restarts))
            if one.metrics is not None:
                for family in Snapshot(one.metrics, one.gpu_bytes).collect():
                    families.setdefault(family.name, []).append((one.node, family))
        yield states
        yield restarts
        yield from map(_joined, families.values())


def _joined(found: Sequence[tuple[str, Metric]]) -> Metric:
    """One family of many nodes'."""
    first = found[0][1]
    if isinstance(first, Histogram):
        joined = Histogram(first.name, first.documentation, ("node", *first.labels), ())
        for node, family in found:
            assert isinstance(family, Histogram)
            joined.rows += [([node, *given], counts, total) for given, counts, total in family.rows]
        return joined
    metric = Metric(first.name, first.documentation, first.type)
    for node, family in found:
        for sample in family.samples:
            metric.add_sample(sample.name, {"node": node, **sample.labels}, sample.value)
    return metric
