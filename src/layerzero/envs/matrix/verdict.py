"""What became of libraries that share an environment: the kind of conflict and its evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """Kinds of outcomes; the order is that of the legend."""

    OK = "ok"
    PYTHON = "python"
    RESOLVER = "resolver"
    INSTALL = "install"
    FILES = "files"
    SYMBOL = "symbol"
    STRUCT = "struct"
    VERSION = "version"
    CRASH = "crash"
    HANG = "hang"
    WRONG = "wrong"
    ERROR = "error"


MEANING: Mapping[Kind, str] = {
    Kind.OK: "works: installs, imports in both orders, computes right where an op of it is known",
    Kind.PYTHON: "they need different Pythons",
    Kind.RESOLVER: "the resolver refuses",
    Kind.INSTALL: "resolves, but cannot be installed",
    Kind.FILES: "two distributions own the same files with different contents",
    Kind.SYMBOL: "a symbol, attribute or module is missing",
    Kind.STRUCT: "a struct changed its size",
    Kind.VERSION: "a library refuses the version of another",
    Kind.CRASH: "the process dies of a signal",
    Kind.HANG: "no end within the time limit",
    Kind.WRONG: "a wrong result, or a write to memory of the caller",
    Kind.ERROR: "any other exception",
}

# (kind, pattern over "ExceptionType: message"); the first that matches counts, its group is what is missing.
_CAUSES: tuple[tuple[Kind, str], ...] = (
    (Kind.WRONG, r"^(?:value|wrote): "),
    (Kind.STRUCT, r"([\w.]+) size changed"),
    (Kind.STRUCT, r"ABI version|compiled (?:using|against) (?:NumPy|ABI)"),
    (Kind.SYMBOL, r"undefined symbol: ([\w@.]+)"),
    (Kind.SYMBOL, r"version `(\S+)' not found"),
    (Kind.SYMBOL, r"(\S+?): cannot open shared object file"),
    (Kind.SYMBOL, r"No module named '([^']+)'"),
    (Kind.SYMBOL, r"cannot import name '([^']+)'"),
    (Kind.SYMBOL, r"([\w.]+) failed to import"),
    (Kind.SYMBOL, r"has no attribute '([^']+)'"),
    (Kind.SYMBOL, r"`?([\w.]+)`? was removed in the NumPy 2"),
    (Kind.VERSION, r"only compatible with|needs to be compatible with|requires torch"),
    (
        Kind.VERSION,
        r"Descriptors cannot (?:be )?created? directly|Protobuf Gencode/Runtime|incompatible .{0,20}version",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What came of one attempt to let subjects share an environment. `summary` is one line; `evidence` has the
    resolver's words, the traceback or the end of stderr, and what went wrong afterwards. `orders` says what each order
    of imports gave."""

    kind: Kind
    summary: str = ""
    subject: str = ""  # in whose step it went wrong
    missing: str = ""
    evidence: str = ""
    orders: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    lock_hash: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind is Kind.OK

    @property
    def is_of_numpy_2(self) -> bool:
        """Whether something of NumPy is missing or has changed where NumPy 2 was installed."""
        of_numpy = self.kind in (Kind.SYMBOL, Kind.STRUCT) and "numpy" in self.summary.lower()
        return of_numpy and not self.versions.get("numpy", "1").startswith("1")

    @property
    def is_lasting(self) -> bool:
        """Whether it holds for the next run, too. A network, a full disk, a busy machine or the kernel's killer for
        memory may be behind the others."""
        has_hung = any(one["kind"] == Kind.HANG.value for one in self.orders)
        return self.kind not in (Kind.INSTALL, Kind.HANG) and self.missing != "SIGKILL" and not has_hung

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(**{**data, "kind": Kind(data["kind"])})


def classify(error: Mapping[str, str]) -> tuple[Kind, str]:
    """The kind of an error that the runner reported, and what is missing, when the message names it."""
    text = f"{error['type']}: {error['message']}"
    for kind, pattern in _CAUSES:
        if match := re.search(pattern, text):
            return kind, (match[1] if match.re.groups else "") or ""
    if error["type"] == "ModuleNotFoundError":
        return Kind.SYMBOL, ""
    return Kind.ERROR, ""


def judge(lines: Sequence[Mapping[str, Any]], *, death: str, timeout_s: float | None, err: str) -> Verdict:
    """The verdict on one process of runner.py: its lines, the signal that it died of, the time limit when it had to be
    ended, the end of its stderr."""
    step: Mapping[str, Any] = {}
    failures: list[Verdict] = []
    for line in lines:
        if "step" in line:
            step = line
        elif not line["ok"]:
            failures.append(_failed(step, line["error"]))
    where, subject = _where(step), str(step.get("subject", ""))
    if timeout_s is not None:
        failures.append(Verdict(Kind.HANG, f"no end within {timeout_s:g} s {where}", subject, evidence=err))
    elif death:
        failures.append(Verdict(Kind.CRASH, f"died of {death} {where}", subject, missing=death, evidence=err))
    elif step.get("step") != "end":
        failures.append(Verdict(Kind.ERROR, f"the process ended {where}", subject, evidence=err))
    if not failures:
        return Verdict(Kind.OK, "imported")
    first, *later = failures
    evidence = "\n".join([first.evidence.strip(), *(f"then {one.summary}" for one in later)])
    return replace(first, evidence=evidence.strip())


def _failed(step: Mapping[str, Any], error: Mapping[str, str]) -> Verdict:
    kind, missing = classify(error)
    said = next(iter(error["message"].strip().splitlines()), "")
    text = {"value": said, "wrote": f"it wrote to {said}"}.get(error["type"], f"{error['type']}: {said}")
    return Verdict(kind, f"{_where(step)}: {text}", str(step["subject"]), missing=missing, evidence=error["traceback"])


def _where(step: Mapping[str, Any]) -> str:
    match step.get("step"):
        case "import":
            return f"at import of {step['subject']}"
        case "op":
            return f"in {'a later' if step['again'] else 'the first'} op of {step['subject']}"
        case "end":
            return "at exit"
    return "before the first import"
