"""Which calls policy wants recorded, as its `traces` names them: kernels by a glob, process:PID, or several fields that
all have to match, "kernel=torch.* op=attention process=*train*". Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from layerzero.ipc.names import unknown_name

FIELDS = ("kernel", "op", "process")
_NAME = re.compile(r"(?:kernel=(?P<kernel>\S+))?(?: ?op=(?P<op>\S+))?(?: ?process=(?P<process>.+))?")
_PROCESS = re.compile(r"process:(?P<number>[0-9]+)", re.ASCII)


@dataclass(frozen=True)
class Traced:
    """What one name means; "" for any. `process`: a process's number, or a glob of its program's name."""

    kernel: str = ""
    op: str = ""
    process: str = ""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, name: str) -> Traced:
        if found := _PROCESS.fullmatch(name):
            return cls(process=found["number"])
        found = _NAME.fullmatch(name) if "=" in name else None
        if found is None:
            return cls(kernel=name)
        return cls(*(found[field] or "" for field in FIELDS))

    @property
    def name(self) -> str:
        return " ".join(f"{field}={getattr(self, field)}" for field in FIELDS if getattr(self, field))

    def means(self, kernel_id: str, ops: Sequence[str], process: int, program: str) -> bool:
        """Whether a call by this kernel, of this process, is meant."""
        return (
            (not self.kernel or fnmatchcase(kernel_id, self.kernel))
            and (not self.op or any(fnmatchcase(op, self.op) for op in ops))
            and (not self.process or self.process == str(process) or fnmatchcase(program, self.process))
        )


def by_name(entries: list[Any]) -> dict[str, Any]:
    """Shares by name, of a list of maps of FIELDS and a share. Raises ValueError."""
    shares: dict[str, Any] = {}
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise ValueError(f"{entry!r:.80} is no map of {', '.join(FIELDS)} and share")
        for key in entry:
            if key not in (*FIELDS, "share"):
                raise ValueError(unknown_name("field of traces", str(key), (*FIELDS, "share")))
        fields = {field: _pattern(field, entry[field]) for field in FIELDS if field in entry}
        if not fields or "share" not in entry:
            raise ValueError(f"{dict(entry)!r:.80} needs a share, and one of {', '.join(FIELDS)}")
        name = Traced(**fields).name
        if name in shares:
            raise ValueError(f"{name!r:.80} is given twice")
        shares[name] = entry["share"]
    return shares


def _pattern(field: str, value: Any) -> str:
    text = str(value) if field == "process" and type(value) is int else value
    if not isinstance(text, str) or not text.strip() or (field != "process" and re.search(r"\s", text)):
        raise ValueError(f"{field} is {value!r:.80}; allowed: a name, with * for any part of it")
    return text.strip()
