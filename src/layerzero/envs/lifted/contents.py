"""What is in a folder of lifted calls: backends as far as ranking needs them, and calls with what they gave on trial
inputs. All of it comes from elsewhere, and is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layerzero.capabilities import vetting
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.descriptor import Capability, DescriptorError
from layerzero.envs.manifest import NAME_PATTERN
from layerzero.envs.probe.probe import parse_record
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import Lifted
from layerzero.ipc.lifting.keys import WHAT, call_digest, call_key
from layerzero.ipc.lifting.results import Trials, fits, has_samples
from layerzero.ipc.lifting.specimen import SEEDS, pack_trials, unpack_trials
from layerzero.ipc.transport.plain import pack_body, unpack_body

MAX_TIMES = 4096
_MAX_TEXT = 200
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Wrong(Exception):
    """A folder holds what it must not. The text says what and where."""


class MeasuredTime(BaseModel):
    """How fast a kernel was where it was exported, on calls of one bucket (broker/selection/timings.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kernel_id: Annotated[str, Field(pattern=NAME_PATTERN)]
    key: Annotated[str, Field(max_length=1000)]
    count: Annotated[int, Field(ge=1)]
    median_us: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    p95_us: _Time
    variance_us: _Time
    warmup_ms: _Time


class _BackendFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    env: Annotated[str, Field(max_length=_MAX_TEXT)]
    descriptor: dict[str, Any]
    record: dict[str, Any]
    times: Annotated[list[MeasuredTime], Field(max_length=MAX_TIMES)] = []


@dataclass(frozen=True)
class ExportedBackend:
    """A backend as it was where its calls were lifted. `env`: what was locked for it; `record`: of its probe."""

    capability: Capability
    env: str
    record: ProbeRecord
    times: tuple[MeasuredTime, ...] = ()

    @property
    def name(self) -> str:
        return self.capability.backend

    def pack(self) -> bytes:
        value = {
            "env": self.env,
            "descriptor": json.loads(self.capability.model_dump_json()),
            "record": {**self.record.to_json(), "traceback": "", "stderr_tail": ""},
            "times": [time.model_dump() for time in self.times],
        }
        return json.dumps(value, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, name: str) -> ExportedBackend:
        """Raises Wrong."""
        where = f"backends/{name}.json"
        try:
            value = _BackendFile.model_validate_json(data)
            capability = vetting.vet(json.dumps(value.descriptor), where, name)
        except ValidationError as exc:
            first = exc.errors()[0]
            raise Wrong(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
        except DescriptorError as exc:
            raise Wrong(exc.message) from exc
        record = parse_record(json.dumps(value.record).encode())
        if record is None or record.env != name or record.ok is not True or not _is_texts(record.versions):
            raise Wrong(f"{where}: record: no probe of {name} that has passed")
        if not isinstance(record.kernels, dict) or not set(record.kernels) <= set(capability.kernel_ids):
            raise Wrong(f"{where}: record: kernels that the descriptor does not name")
        if not {time.kernel_id for time in value.times} <= set(capability.kernel_ids):
            raise Wrong(f"{where}: times: kernels that the descriptor does not name")
        return cls(capability, value.env, record, tuple(value.times))

    def check(self, call: ExportedCall) -> None:
        """Raises Wrong for a call that is of another environment than this one."""
        capability, what = self.capability, call.what
        own = {
            "backend": self.name,
            "backend_version": capability.backend_version,
            "torch_version": self.record.versions.get("torch", ""),
            "capabilities_hash": capability.hash,
            "env_hash": self.env,
        }
        for name, value in own.items():
            if what[name] != value:
                raise Wrong(f"calls/{call.key}: {name} is {what[name]!r:.80}, that of the backend {value!r:.80}")
        of_op = {kernel.kernel_id: kernel for kernel in capability.ops.get(call.lifted.op, ())}
        kernel = of_op.get(call.lifted.kernel_id)
        if kernel is None:
            raise Wrong(f"calls/{call.key}: {call.lifted.kernel_id!r:.80} is no kernel of {self.name}")
        if kernel.deterministic and has_samples(call.trials):
            raise Wrong(f"calls/{call.key}: {kernel.kernel_id} repeats its bytes, and has numbers to compare")


@dataclass(frozen=True)
class ExportedCall:
    """A lifted call. `what`: all that its machine code depends on; `trials`: as of a Specimen."""

    lifted: Lifted
    what: Mapping[str, str]
    trials: Trials = field(default_factory=dict)

    @property
    def key(self) -> str:
        return call_key(self.lifted, self.lifted.alignments, self.what)

    @property
    def digest(self) -> str:
        return call_digest(self.lifted)

    def pack(self) -> bytes:
        return pack_body({"what": dict(self.what), "form": self.lifted.pack(), "trials": pack_trials(self.trials)})

    @classmethod
    def unpack(cls, data: bytes, key: str) -> ExportedCall:
        """Raises Wrong."""
        where = f"calls/{key}"
        try:
            value = unpack_body(data)
            if set(value) != {"what", "form", "trials"}:
                raise ValueError("what, form and trials are needed, and nothing else")
            lifted, what, trials = Lifted.unpack(value["form"]), value["what"], unpack_trials(value["trials"])
            if set(what) != set(WHAT) or not _is_texts(what):
                raise ValueError(f"`what` has other names than {', '.join(WHAT)}, or no texts")
            if what["kernel"] != lifted.kernel_id:
                raise ValueError(f"it is of {lifted.kernel_id!r:.80}, and says {what['kernel']!r:.80}")
            if trials and not (set(trials) == set(SEEDS) and fits(trials, lifted.outputs)):
                raise ValueError(f"it was tried otherwise than with seeds {SEEDS}, or not all outputs are told")
        except (ProtocolError, KeyError, TypeError, ValueError, AttributeError) as exc:
            raise Wrong(f"{where}: {exc}"[:500]) from exc
        call = cls(lifted, what, trials)
        if call.key != key:
            raise Wrong(f"{where}: it is another call than its name says")
        return call


def _is_texts(value: Any) -> bool:
    """Whether it is a map of short texts."""
    return isinstance(value, dict) and all(
        type(one) is str and len(one) <= _MAX_TEXT for pair in value.items() for one in pair
    )
