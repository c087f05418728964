"""One layer of policy as it was written: its keys, their types, and every problem with its place. Pure.

A value may be written as YAML or, since environment variables have no structure, as text: "a;b" for a list,
"name=value;name=value" for a map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from layerzero.broker.selection.policy_rules import FIELDS, is_glob, op_names, parse_condition
from layerzero.broker.selection.traced import Traced, by_name
from layerzero.capabilities.descriptor import Capability
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.policy import GONE, KERNEL_SOURCE

MAX_RULES = 256
MAX_PATTERNS = 256
MAX_BONUS = 1e9
MAX_BYTES = 2**60
MAX_PROBLEMS = 20  # of a layer; each costs a search for the nearest name
_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)

Place = tuple[str | int, ...]
Isolation = Literal["in_process", "subprocess", "lifted", "auto"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the value at `place`: the keys and list positions that lead to it."""

    place: Place
    message: str


# --- from text to structure


def _items(value: Any) -> Any:
    return [item.strip() for item in re.split("[;,]", value) if item.strip()] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [item.partition("=") for item in value.split(";") if item.strip()]
    wrong = [name for name, equals, _ in pairs if not equals]
    if wrong:
        raise ValueError(f"{wrong[0].strip()!r:.80} is not NAME=VALUE; several are separated by ';'")
    names = [name.strip() for name, _, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r:.80} is given twice")
    return {name: text.strip() for name, (_, _, text) in zip(names, pairs, strict=True)}


def _traces(value: Any) -> Any:
    """A list has a map of fields for each share."""
    if isinstance(value, list):
        return by_name(value)
    return _pairs(value)


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None or found[2].lower() not in _SIZES:
        raise ValueError("not a size; allowed: bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    count = float(found[1])
    if count > MAX_BYTES:  # also for what no float holds
        raise ValueError(f"more than {MAX_BYTES:,} bytes")
    return round(count * _SIZES[found[2].lower()])


def _isolation(value: Any) -> Any:
    if isinstance(value, str) and "=" not in value:
        value = {"*": value.strip()}
    value = _pairs(value)
    if isinstance(value, Mapping) and "container" in value.values():
        raise ValueError(
            "container needs a container runtime on the host and an image of each backend's environment, which this "
            "version cannot make; use subprocess (an environment and a process of its own), lifted, in_process or auto"
        )
    return value


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("not an absolute path, and the broker has no folder that it could start from")
    return value


Name = Annotated[str, Field(min_length=1, max_length=200)]
KernelSource = Annotated[str, Field(pattern=KERNEL_SOURCE)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_items), Field(min_length=1, max_length=MAX_PATTERNS)]
Bonus = Annotated[float, Field(gt=0, le=MAX_BONUS)]
Multiplier = Annotated[float, Field(ge=0, le=MAX_BONUS)]
Share = Annotated[float, Field(ge=0, le=1)]
WEIGHTS = ("priority", "policy", "perfdb", "jit", "reliability", "transform", "fusion", "table")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RuleValues(_Strict):
    """A rule as written. Without `match` it holds for all calls."""

    match: dict[str, Any] = {}
    prefer: Names | None = None
    avoid: Names | None = None
    allow: Names | None = None
    avoid_sources: Names | None = None
    allow_sources: Names | None = None
    lock: Name | None = None
    bonus: Bonus | None = None


RULE_ACTIONS = tuple(name for name in RuleValues.model_fields if name not in ("match", "bonus"))


class Values(_Strict):
    """What a layer sets; None where it says nothing. docs/policy.md describes each key."""

    locks: Annotated[dict[Name, Name], BeforeValidator(_pairs)] | None = None
    allow_sources: Names | None = None
    avoid_sources: Names | None = None
    allow_kernels: Names | None = None
    avoid_kernels: Names | None = None
    rules: Annotated[tuple[RuleValues, ...], Field(max_length=MAX_RULES)] | None = None
    strict_mode: bool | None = None
    plan_mode: bool | None = None
    allow_adaptation: bool | None = None
    backend_isolation: Annotated[dict[Name, Isolation], BeforeValidator(_isolation)] | None = None
    allow_jit_compile: bool | None = None
    requires_deterministic: bool | None = None
    memory_headroom_bytes: Annotated[int, BeforeValidator(_size), Field(ge=0, le=MAX_BYTES)] | None = None
    weights: Annotated[dict[Literal[WEIGHTS], Multiplier], BeforeValidator(_pairs)] | None = None  # type: ignore[valid-type]
    shadow_rate: Share | None = None
    traces: Annotated[dict[Name, Share], BeforeValidator(_traces), Field(max_length=MAX_PATTERNS)] | None = None
    tune_budget: Share | None = None
    dispatch_table: Annotated[Path, AfterValidator(_absolute)] | None = None
    kernel_sources: Annotated[dict[Name, KernelSource], BeforeValidator(_pairs)] | None = None


def parse_values(written: Any) -> tuple[Values, list[Problem]]:
    """The layer's values and all that is wrong with them; keys with a problem are left out of the values."""
    if written is None:
        return Values(), []
    if not isinstance(written, Mapping):
        return Values(), [Problem((), f"a policy is a map of keys, not a {type(written).__name__}")]
    try:
        return Values.model_validate(dict(written)), []
    except ValidationError as exc:
        errors = exc.errors()
        problems = [_problem(error) for error in errors[:MAX_PROBLEMS]]
        wrong = {error["loc"][0] for error in errors if error["loc"]}
    try:  # the rest, so that its names are checked as well
        return Values.model_validate({key: value for key, value in written.items() if key not in wrong}), problems
    except ValidationError:
        return Values(), problems


def _problem(error: Any) -> Problem:
    place: Place = tuple(part for part in error["loc"] if part != "[key]")
    name, got = str(place[-1]) if place else "policy", error.get("input")
    match error["type"]:
        case "extra_forbidden" if place[0] == "rules":
            return Problem(place, unknown_name("key of a rule", name, RuleValues.model_fields))
        case "extra_forbidden":
            return Problem(place, GONE.get(name) or unknown_name("key of a policy", name, Values.model_fields))
        case "literal_error" if place[0] == "weights" and error["loc"][-1] == "[key]":
            return Problem(place, unknown_name("weight", name, WEIGHTS))
        case "value_error":
            return Problem(place, f"{name}: {error['ctx']['error']}, got {got!r:.120}")
    return Problem(place, f"{name}: {error['msg']}, got {got!r:.120}")


# --- names


@dataclass(frozen=True)
class Known:
    """The names that a policy may use."""

    backends: tuple[str, ...]
    kernels: Mapping[str, str]  # kernel id -> its op
    ops: tuple[str, ...]

    @classmethod
    def of(cls, capabilities: Mapping[str, Capability], ops: Iterable[str]) -> Known:
        """`ops`: the op vocabulary (ipc/vocabulary/ops.py)."""
        kernels = {k.kernel_id: op for c in capabilities.values() for op, ks in c.ops.items() for k in ks}
        names = {name for op in ops for causal in (True, False) for name in op_names(op, is_causal=causal)}
        return cls(tuple(sorted(capabilities)), dict(sorted(kernels.items())), tuple(sorted(names)))


def check(values: Values, known: Known | None) -> list[Problem]:
    """The problems that types cannot find: wrong conditions, rules that do nothing, and names that nobody has; the
    first MAX_PROBLEMS of them.

    Without `known` the names are not looked at.
    """
    return list(islice(_check(values, known), MAX_PROBLEMS))


def _check(values: Values, known: Known | None) -> Iterator[Problem]:
    for i, rule in enumerate(values.rules or ()):
        yield from _check_rule(rule, ("rules", i))
    if known is None:
        return
    for pattern, kernel in (values.locks or {}).items():
        yield from _check_lock(pattern, kernel, known)
    for key, names in (("allow_sources", known.backends), ("avoid_sources", known.backends)):
        yield from _unknown(getattr(values, key), names, (key,), "backend")
    for key in ("allow_kernels", "avoid_kernels"):
        yield from _unknown(getattr(values, key), known.kernels, (key,), "kernel")
    for name in values.traces or ():
        meant = Traced.of(name)
        yield from _unknown((meant.kernel,) if meant.kernel else (), known.kernels, ("traces", name), "kernel")
        yield from _unknown((meant.op,) if meant.op else (), known.ops, ("traces", name), "op")
    isolated = [name for name in values.backend_isolation or () if name != "*"]
    for name in isolated:
        yield from _unknown(
            (name,), (*known.backends, *known.kernels), ("backend_isolation", name), "backend or kernel"
        )
    for i, rule in enumerate(values.rules or ()):
        for key in ("allow_sources", "avoid_sources"):
            yield from _unknown(getattr(rule, key), known.backends, ("rules", i, key), "backend")
        for key in ("prefer", "avoid", "allow"):
            both = (*known.backends, *known.kernels)
            yield from _unknown(getattr(rule, key), both, ("rules", i, key), "kernel or backend")
        if rule.lock is not None:
            yield from _unknown((rule.lock,), known.kernels, ("rules", i, "lock"), "kernel")
        ops = rule.match.get("op")
        for op in ops if isinstance(ops, list | tuple) else [ops]:
            if isinstance(op, str):
                yield from _unknown((op.lstrip("!= "),), known.ops, ("rules", i, "match", "op"), "op")


def _check_rule(rule: RuleValues, place: Place) -> Iterator[Problem]:
    for field, written in rule.match.items():
        where = (*place, "match", field)
        if field not in FIELDS:
            yield Problem(where, unknown_name("field of a call", field, FIELDS))
            continue
        try:
            parse_condition(field, written)
        except ValueError as exc:
            yield Problem(where, str(exc))
    if all(getattr(rule, name) is None for name in RULE_ACTIONS):
        yield Problem(place, f"the rule does nothing; give it one of {', '.join(RULE_ACTIONS)}")
    if rule.bonus is not None and rule.prefer is None:
        yield Problem((*place, "bonus"), "bonus belongs to prefer, which the rule lacks")


def _check_lock(pattern: str, kernel: str, known: Known) -> Iterable[Problem]:
    ops = _matching(pattern, known.ops)
    if not ops:
        return _unknown((pattern,), known.ops, ("locks", pattern), "op")
    kernels = _matching(kernel, known.kernels)
    served = {known.kernels[name] for name in kernels}
    if kernels and not any(op.partition(".")[0] in served for op in ops):
        own = [name for name, op in known.kernels.items() if op in {op.partition(".")[0] for op in ops}]
        text = (
            f"{kernel!r} serves {', '.join(sorted(served))}, not {pattern}; kernels of it: {', '.join(own) or 'none'}"
        )
        return [Problem(("locks", pattern), text)]
    return _unknown((kernel,), known.kernels, ("locks", pattern), "kernel")


def _unknown(patterns: Iterable[str] | None, known: Iterable[str], place: Place, what: str) -> Iterator[Problem]:
    names = list(known)
    for pattern in patterns or ():
        if not _matching(pattern, names):
            verb = "matches" if is_glob(pattern) else "is called"
            yield Problem(place, unknown_name(what, pattern, names, verb=verb))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]
