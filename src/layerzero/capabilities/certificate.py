"""The certificate of an environment: what its probe (envs/probe/probe.py) has shown. A value that others decide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ProbeRecord:
    """The verdict on one environment. `kind` and `message` are empty when `ok`; kinds made here are crash, timeout,
    changed and protocol, the others come from workers/probe.py.

    ok: the environment works and some kernel is certified. certified: kernel id -> dtype -> shape class -> largest
    error. failures: every (kernel, dtype, shape class) that did not pass, as workers.probe.Failure. profile: of what
    was tried; empty for all.
    """

    env: str
    key: str
    ok: bool
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    certified: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    failures: Sequence[Mapping[str, Any]] = field(default_factory=list)
    kind: str = ""
    message: str = ""
    missing: str | None = None
    wheel: str = ""  # "NAME VERSION" of the distribution that the failure is about
    changed: str = ""  # what has changed in the environment since its build
    traceback: str = ""
    stderr_tail: str = ""
    profile: str = ""
    repair: str = ""  # the command to run when not ok: mends it, or shows all that is known

    @property
    def counts(self) -> tuple[int, int]:
        """How many (kernel, dtype, shape class) are certified, and how many are not."""
        return sum(len(classes) for dtypes in self.certified.values() for classes in dtypes.values()), len(
            self.failures
        )

    @property
    def cause(self) -> str:
        """Why it is not ok, what is missing and whose that is; empty when ok."""
        if self.ok:
            return ""
        missing = f"; missing: {self.missing}" if self.missing and self.missing not in self.message else ""
        wheel = f"; concerns the wheel of {self.wheel}" if self.wheel and self.wheel not in self.message else ""
        return f"{self.kind}: {self.message}{missing}{wheel}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
