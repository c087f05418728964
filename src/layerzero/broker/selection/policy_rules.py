"""Rules of a policy: conditions on the facts of a call, and what holds for kernels when they are met. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from layerzero.capabilities.context import SelectionContext
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS

GLOB_CHARACTERS = frozenset("*?[")
PREFER_BONUS = 10_000.0
"""More than the other terms of a score can add up to at the default weights (broker/selection/policy.py Weights)."""

Subject = Literal["source", "kernel", "name"]
Kind = Literal["number", "text", "flag"]
FIELDS: Mapping[str, Kind] = {
    "op": "text",
    "dtype": "text",
    "layout": "text",
    "attn_mask_type": "text",
    "device_type": "text",
    "device_name": "text",
    "device_vendor": "text",
    "sm": "number",
    "batch_size": "number",
    "seq_len": "number",  # the longer one of seq_len_q and seq_len_k
    "seq_len_q": "number",
    "seq_len_k": "number",
    "num_heads": "number",
    "num_kv_heads": "number",
    "head_dim": "number",
    "is_causal": "flag",
    "is_contiguous": "flag",
    "enable_gqa": "flag",
}
"""What a rule can match on. A call that lacks a fact (a matmul has no head_dim) never meets a condition on it."""

_OF_DEVICE = ("device_name", "device_vendor")
_COMPARISONS = (">=", "<=", "==", "!=", ">", "<")  # the longer ones first


def is_glob(pattern: str) -> bool:
    return not GLOB_CHARACTERS.isdisjoint(pattern)


@functools.lru_cache(maxsize=16384)  # a cold decision compares every kernel with every pattern
def any_matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def op_names(op: str, *, is_causal: bool) -> tuple[str, ...]:
    """The names by which a policy may mean a call: "attention", and "attention.causal" or "attention.full". Those mean
    attention_forward, too, which stands for attention where a program wants gradients."""
    if op not in ATTENTION_OPS:
        return (op,)
    kind = "causal" if is_causal else "full"
    more = ("attention", f"attention.{kind}") if op == "attention_forward" else ()
    return (op, f"{op}.{kind}", *more)


def fact(context: SelectionContext, field: str) -> Any:
    """A fact of the call by its name in FIELDS; None when the call has no such thing."""
    return getattr(context.device if field in _OF_DEVICE else context, field)


@dataclass(frozen=True, slots=True)
class Test:
    """A comparison (`operator` one of >=, <=, ==, !=, >, <), an inclusive range ("..") or a glob ("glob")."""

    operator: str
    low: Any
    high: float = 0.0

    def holds(self, value: Any) -> bool:
        match self.operator:
            case "==":
                return bool(value == self.low)
            case "!=":
                return bool(value != self.low)
            case ">=":
                return bool(value >= self.low)
            case "<=":
                return bool(value <= self.low)
            case ">":
                return bool(value > self.low)
            case "<":
                return bool(value < self.low)
            case "..":
                return bool(self.low <= value <= self.high)
        return fnmatchcase(str(value), self.low)


@dataclass(frozen=True, slots=True)
class Condition:
    """A field of the call and its tests, of which one must hold. `text` is the condition for people, `written`
    its value in the policy."""

    field: str
    text: str
    tests: tuple[Test, ...]
    written: Any = None

    def holds(self, context: SelectionContext) -> bool:
        if self.field == "op":
            names = op_names(context.op, is_causal=context.is_causal)
            return any(self._meets(test, names) for test in self.tests)
        value = fact(context, self.field)
        return value is not None and any(test.holds(value) for test in self.tests)

    @staticmethod
    def _meets(test: Test, names: tuple[str, ...]) -> bool:
        if test.operator == "!=":
            return test.low not in names
        return any(test.holds(name) for name in names)


def parse_condition(field: str, written: Any) -> Condition:
    """The condition that a rule's `match` has for a field, a key of FIELDS. `written`: a value, a comparison, a range,
    a glob, or a list of these. Raises ValueError with what is allowed.
    """
    items = written if isinstance(written, list | tuple) else [written]
    if not items:
        raise ValueError("an empty list matches no call; name the values, or leave the field out")
    return Condition(field, f"{field}: {_shown(written)}", tuple(_parse_test(field, item) for item in items), written)


def _shown(written: Any) -> str:
    return ", ".join(map(str, written)) if isinstance(written, list | tuple) else str(written)


def _parse_test(field: str, item: Any) -> Test:
    kind = FIELDS[field]
    if kind == "flag":
        if isinstance(item, bool):
            return Test("==", item)
        raise ValueError(f"{field} is {item!r:.80}; allowed: true or false")
    if not isinstance(item, str | int | float) or isinstance(item, bool):
        raise ValueError(f"{field} is {item!r:.80}; allowed: {_ALLOWED[kind]}")
    text = str(item).strip()
    operator = next((sign for sign in _COMPARISONS if text.startswith(sign)), "")
    rest = text[len(operator) :].strip()
    if kind == "text":
        if not rest or operator not in ("", "==", "!="):
            raise ValueError(f"{field} is {text!r:.80}; allowed: {_ALLOWED[kind]}")
        return Test(operator, rest) if operator else Test("glob", rest)
    low, dots, high = rest.partition("..")
    try:
        if dots and not operator:
            found = Test("..", _number(low), _number(high))
            if found.low > found.high:
                raise ValueError(f"the range {text} is empty")
            return found
        return Test(operator or "==", _number(rest))
    except ValueError as exc:
        raise ValueError(f"{field} is {text!r:.80} ({exc}); allowed: {_ALLOWED[kind]}") from exc


_ALLOWED: Mapping[str, str] = {
    "number": 'a number, a comparison such as ">=90", a range such as "128..4096", or a list of these',
    "text": 'a name, a glob such as "float*", "!=NAME", or a list of these',
}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r:.40} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r:.40} is not finite")
    return value


@dataclass(frozen=True, slots=True)
class Limit:
    """A list that denies: kernels outside it ("allow") or in it ("avoid").

    `subject` is what its patterns are compared with: "source" (the backend), "kernel" (the kernel id), or "name"
    (either).
    """

    key: str
    is_allowing: bool
    subject: Subject
    patterns: tuple[str, ...]
    origin: str

    def objection(self, kernel_id: str, backend: str) -> str | None:
        """Why the list denies this kernel, or None."""
        is_listed = (self.subject != "kernel" and any_matches(backend, self.patterns)) or (
            self.subject != "source" and any_matches(kernel_id, self.patterns)
        )
        if is_listed == self.is_allowing:
            return None
        what = f"backend {backend!r}" if self.subject == "source" else f"kernel {kernel_id!r}"
        return f"{what} is {'' if is_listed else 'not '}in {self.key}: {', '.join(self.patterns)} ({self.origin})"


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for calls that meet all `conditions`. `layer` is its rank: that of a call is above that of a file."""

    conditions: tuple[Condition, ...]
    origin: str
    layer: int
    limits: tuple[Limit, ...] = ()
    prefer: tuple[str, ...] = ()  # globs of kernel ids or backends
    bonus: float = PREFER_BONUS
    lock: str = ""  # glob of kernel ids

    def applies(self, context: SelectionContext) -> bool:
        return all(condition.holds(context) for condition in self.conditions)

    def bonus_for(self, kernel_id: str, backend: str) -> float:
        is_meant = any_matches(kernel_id, self.prefer) or any_matches(backend, self.prefer)
        return self.bonus if is_meant else 0.0
