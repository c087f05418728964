"""What the answers of this folder read of the broker, which is above them, and the few things they have it do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from layerzero.broker.configuration.policy_source import PolicySource
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core.events import Event
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io.counter_pages import CounterPages
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.processes.function_workers import FunctionWorkers
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.registry import Processes
from layerzero.broker.processes.self_registered import Joined
from layerzero.broker.processes.user_brokers import UserBrokers
from layerzero.broker.selection.planner import Planner
from layerzero.broker.selection.tuning import Spending
from layerzero.broker.storage.perf_rows import Identity
from layerzero.broker.storage.perfdb import PerfDB
from layerzero.broker.storage.plan_choices import PlanChoices
from layerzero.broker.storage.rollout_file import RolloutFile
from layerzero.ipc.transport.endpoints import Endpoints


class BrokerView(Protocol):
    """`broker/server.py` has it."""

    settings: Settings
    endpoints: Endpoints
    state: BrokerState
    launcher: Launcher
    planner: Planner
    policy: PolicySource
    processes: Processes
    function_workers: FunctionWorkers
    joined: Joined
    users: UserBrokers | None
    perfdb: PerfDB
    plan_choices: PlanChoices
    rollout_file: RolloutFile
    tuning: Spending
    lifts: Lifts
    counters: CounterPages
    table_problem: str
    incarnation: str
    started_s: float
    stays: bool

    @property
    def identities(self) -> Mapping[str, Identity]:
        """What each backend's times and certificates are of."""

    def handle(self, event: Event) -> Any:
        """Tell the core, and do what it asks for."""

    def post(self, event: Event) -> None:
        """Have `handle` called with it soon, from any thread."""

    def load_table(self) -> None:
        """Read the dispatch table anew; `table_problem` says why there is none."""

    def poll_lanes(self) -> None:
        """Count the calls that did not pass through the broker."""

    def poll_timelines(self) -> None:
        """See which calls GPUs are done with."""
