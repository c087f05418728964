"""What a core begins with, as a value that a record keeps: from it the same core is made again. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from layerzero.broker.core.limits import Limits
from layerzero.broker.core.state import BrokerState
from layerzero.broker.recording.form import decode
from layerzero.broker.selection.certification import Certification
from layerzero.broker.selection.compile_queue import Compilation
from layerzero.broker.selection.dispatch_table import Group, Header
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.policy_values import Known
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.timings import PerfRow
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.profiles import ALL, Profile
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS

HEAD = "layerzero events"
SCHEMA = 1
E = TypeVar("E", bound=Engine)


class TableForm(NamedTuple):
    """A dispatch table as it is recorded."""

    header: Header
    groups: dict[str, dict[str, Group]]


@dataclass(frozen=True)
class Start:
    """`no_gpus`: why there are none. `lifted`: backends whose kernels callers launch themselves, which the record does
    not follow. `seed`: of the core's random numbers, delays of restarts."""

    seed: int
    limits: Limits
    capabilities: Mapping[str, Capability]
    refused: Mapping[str, str]
    envs: Mapping[str, str]
    device: DeviceSpec
    gpus: tuple[DeviceSpec, ...]
    no_gpus: str
    policy: Policy
    unusable: Mapping[str, Rejection]
    joined: tuple[str, ...]
    records: Mapping[str, ProbeRecord]
    times: tuple[PerfRow, ...]
    compiled: Mapping[str, tuple[Unit, ...]]
    lifted: tuple[str, ...] = ()
    profile: Profile = ALL

    def engine(self, kind: type[E]) -> E:
        """What ranks, knowing what was known at the start."""
        made = kind(
            self.capabilities,
            self.device,
            gpus=self.gpus,
            no_gpus=self.no_gpus,
            policy=self.policy,
            envs=self.envs,
            refused=self.refused,
            profile=self.profile,
        )
        made.set_certification(Certification(self.records))
        made.load_times(self.times)
        made.set_compilation(Compilation(self.compiled))
        return made

    def state(self) -> BrokerState:
        """The core."""
        rng = random.Random(self.seed)
        return BrokerState(self.engine(Engine), self.unusable, self.limits, rng, joined=self.joined)

    @classmethod
    def of(cls, value: Any) -> Start:
        """From what a record's first line has. Raises InvalidArgument."""
        if not isinstance(value, dict) or "capabilities" not in value:
            raise InvalidArgument("start: it has no capabilities")
        capabilities = decode(Mapping[str, Capability], value["capabilities"], place="capabilities")
        made: Start = decode(cls, value, Known.of(capabilities, OPS), "start")
        return made
