"""What a case computes, before a dtype and a place in memory are chosen: a call with its numbers, and what comes out.

What is expected comes from workers/certify/reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from layerzero.ipc.vocabulary.numerics import nearest
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, NARROW_DTYPES
from layerzero.workers.certify import reference
from layerzero.workers.certify.values import Values


@dataclass
class Problem:
    """`kinds` names the dtypes that do not follow the one under test, of the first inputs or of all; `families`: of an
    op that takes dtypes of several, those that the problem is of, or single dtypes."""

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: tuple[Values | None, ...]
    kinds: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    _solved: dict[str, tuple[Values, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = len(self.inputs) - len(self.kinds)
        if missing < 0:
            raise ValueError(f"{self.op}, {self.name}: {len(self.kinds)} kinds of {len(self.inputs)} inputs")
        self.kinds = (*self.kinds, *[""] * missing)

    def is_of(self, dtype: str) -> bool:
        """Whether the problem is one for data of this dtype."""
        return not self.families or dtype in self.families or family(dtype) in self.families

    def numbers(self, kind: str) -> list[Values | None]:
        """The inputs as numbers of a family of dtypes."""
        return [
            values
            if values is None or own or kind == "float"
            else Values(values.shape, partial(_in_kind, values, kind))
            for values, own in zip(self.inputs, self.kinds, strict=True)
        ]

    def solutions(self, kind: str) -> tuple[Values, ...]:
        """What comes out for these numbers, for each output. Computed once."""
        if kind not in self._solved:
            found = reference.OPS[self.op](self.numbers(kind), {**self.attrs, "kind": kind, "kinds": self.kinds})
            self._solved[kind] = found if isinstance(found, tuple) else (found,)
        return self._solved[kind]


def family(dtype: str) -> str:
    """Dtypes that have the same numbers."""
    if dtype in NARROW_DTYPES:
        return dtype
    return "float" if dtype in FLOAT_DTYPES else "bool" if dtype == "bool" else "uint" if dtype[0] == "u" else "int"


def _in_kind(values: Values, kind: str) -> list[float]:
    return [_number(value, kind) for value in values.flat]


def _number(value: float, kind: str) -> float:
    if kind == "float":
        return value
    if kind in ("float8_e4m3fn", "float8_e5m2"):
        return nearest(value, kind)
    if kind == "float4_e2m1fn_x2":  # two in a byte
        return round(value * 16) * 37 % 256
    whole = round(value * 16)
    return whole > 0 if kind == "bool" else abs(whole) if kind == "uint" else whole
