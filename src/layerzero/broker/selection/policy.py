"""What the user wants of selection: locks, lists, rules, modes and weights, merged from layers. Pure.

A layer is a file, an environment variable or a call. Values of later layers replace those of earlier ones; locks,
weights and isolation modes do so entry by entry, and rules of all layers hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from layerzero.broker.selection.policy_rules import (
    PREFER_BONUS,
    Limit,
    Rule,
    Subject,
    any_matches,
    is_glob,
    op_names,
    parse_condition,
)
from layerzero.broker.selection.policy_values import (
    MAX_PROBLEMS,
    Isolation,
    Known,
    Place,
    Problem,
    RuleValues,
    Values,
    check,
    parse_values,
)
from layerzero.broker.selection.traced import Traced
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.vocabulary.policy import BROKER_WIDE

DEFAULT = "default"
VERSION_MARK = "@"  # in the name of a version beside another backend, and in those of its kernels
MAX_OVERLAY_LAYERS = 64
MAX_OVERLAY_BYTES = 48 << 10  # a ROUTE, which has one in it, may have 64 KiB
_LISTS = ("allow_sources", "avoid_sources", "allow_kernels", "avoid_kernels")
_RULE_LISTS = ("allow_sources", "avoid_sources", "allow", "avoid")


@dataclass(frozen=True)
class Weights:
    """Multipliers of the terms of a kernel's score. `perfdb`'s term is fastest/this, in 0..1; the penalties jit,
    reliability and transform are subtracted; `table` is what the dispatch table's choice gets."""

    priority: float = 1.0
    policy: float = 1.0
    perfdb: float = 1000.0
    jit: float = 50.0
    reliability: float = 10.0  # repeated failures are the breaker's business
    transform: float = 1.0
    fusion: float = 1.0
    table: float = 2000.0  # a dispatch table's choice beats measured times


@dataclass(frozen=True)
class Layer:
    """Values as they were written, and where: `lines` maps a place in them to its line in `origin`, a file. `flaws` are
    problems of the writing, with their lines."""

    origin: str
    values: Any
    lines: Mapping[Place, int] = field(default_factory=dict)
    flaws: tuple[tuple[int, str], ...] = ()

    def line_of(self, place: Place) -> int:
        """The line of a place, or of the nearest place around it that has one; 0 in a layer that is no file."""
        return next((self.lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in self.lines), 0)

    def origin_of(self, place: Place) -> str:
        line = self.line_of(place)
        return f"{self.origin}:{line}" if line else self.origin

    def complaints(self, problems: Iterable[Problem]) -> list[str]:
        """The layer's flaws and these problems of its values as texts, from the first line to the last."""
        found = [*self.flaws, *((self.line_of(problem.place), problem.message) for problem in problems)]
        found.sort(key=itemgetter(0))
        return [f"{self.origin}:{line}: {message}" if line else f"{self.origin}: {message}" for line, message in found]


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """What the policy says of one kernel. `why` names each rule that gave a part of the bonus, and its origin."""

    rejections: tuple[Rejection, ...] = ()
    bonus: float = 0.0
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lock:
    """A call whose op `pattern` matches runs on a kernel that the glob `kernel` matches."""

    pattern: str
    kernel: str
    origin: str
    layer: int

    def rank(self) -> tuple[int, bool, int]:
        """The lock's rank among those that match a call: a later layer is above an earlier one, then an exact name
        above a glob, then a longer glob above a shorter one."""
        return (self.layer, not is_glob(self.pattern), len(self.pattern))


class PolicyForCall:
    """The policy for one call: what `Policy.judge` needs to look up once and not for every kernel. `pinned`: the
    backend that the call names, if any; `rolled`: the versions that need no name, since a rollout wants them."""

    __slots__ = ("_limits", "_lock", "_op", "_pinned", "_rolled", "_rules")

    def __init__(self, policy: Policy, context: SelectionContext, pinned: str = "", rolled: Sequence[str] = ()) -> None:
        self._pinned, self._rolled = pinned, rolled
        names = op_names(context.op, is_causal=context.is_causal)
        self._op = context.op
        self._rules = tuple(rule for rule in policy.rules if rule.applies(context))
        self._limits = (*policy.limits, *(limit for rule in self._rules for limit in rule.limits))
        locks = [lock for lock in policy.locks if any(any_matches(name, (lock.pattern,)) for name in names)]
        locks += [Lock("", rule.lock, rule.origin, rule.layer) for rule in self._rules if rule.lock]
        self._lock = max(locks, key=Lock.rank, default=None)

    def judge(self, kernel_id: str, backend: str) -> PolicyVerdict:
        """Reasons against this kernel, and its bonus."""
        is_unnamed = VERSION_MARK in backend and backend not in self._rolled and not self.names(kernel_id, backend)
        if self._lock is None and not self._limits and not self._rules and not is_unnamed:
            return _NOTHING
        rejections = []
        if is_unnamed:
            base = backend.partition(VERSION_MARK)[0]
            detail = f"{backend} is a version beside {base}, and neither the call nor the policy names it"
            rejections.append(Rejection(Reason.VERSION_NOT_NAMED, detail, f"backend={backend!r}"))
        lock = self._lock
        if lock is not None and not any_matches(kernel_id, (lock.kernel,)):
            detail = f"{self._op} is locked to {lock.kernel!r} ({lock.origin})"
            rejections.append(Rejection(Reason.POLICY_LOCKED, detail))
        for limit in self._limits:
            objection = limit.objection(kernel_id, backend)
            if objection is not None:
                rejections.append(Rejection(Reason.POLICY_DENIED, objection))
        bonuses = [(rule, rule.bonus_for(kernel_id, backend)) for rule in self._rules]
        why = tuple(f"prefer {', '.join(rule.prefer)}: {bonus:+g} ({rule.origin})" for rule, bonus in bonuses if bonus)
        return PolicyVerdict(tuple(rejections), sum(bonus for _, bonus in bonuses), why)

    def names(self, kernel_id: str, backend: str) -> bool:
        """Whether the call, or what the policy allows, prefers or locks, names a version: with its mark, which "*" and
        the name of its backend lack."""
        if backend == self._pinned:
            return True
        patterns = [pattern for limit in self._limits if limit.is_allowing for pattern in limit.patterns]
        patterns += [pattern for rule in self._rules for pattern in rule.prefer]
        patterns += [self._lock.kernel] if self._lock is not None else []
        meant = tuple(pattern for pattern in patterns if VERSION_MARK in pattern)
        return any_matches(kernel_id, meant) or any_matches(backend, meant)


_NOTHING = PolicyVerdict()


@dataclass(frozen=True, eq=False)
class Policy:
    """What layers of policy say when they are merged; made by `of` or `compose`. Policies with the same `hash` decide
    the same."""

    locks: tuple[Lock, ...] = ()
    limits: tuple[Limit, ...] = ()
    rules: tuple[Rule, ...] = ()
    strict_mode: bool = False
    plan_mode: bool = False
    allow_adaptation: bool = True
    backend_isolation: Mapping[str, Isolation] = field(default_factory=lambda: {"*": "lifted"})
    allow_jit_compile: bool = True
    requires_deterministic: bool = False
    memory_headroom_bytes: int | None = None  # free device memory that a kernel's workspace must leave
    weights: Weights = Weights()
    shadow_rate: float = 0.0  # share of calls that are repeated on the reference and compared
    traces: Mapping[str, float] = field(
        default_factory=dict
    )  # share of calls to record, by what names them (traced.py)
    tune_budget: float = 0.0  # share of a worker's time that background tuning may take
    dispatch_table: Path | None = None
    kernel_sources: Mapping[str, str] = field(default_factory=dict)  # backend from outside -> its hash, or "refuse"
    origins: Mapping[str, str] = field(default_factory=dict)  # "key" or "key.entry" -> where its value comes from
    hash: str = ""
    _parsed: tuple[_Parsed, ...] = ()
    _known: Known | None = None

    @classmethod
    def of(cls, *layers: Layer, known: Known | None = None) -> Policy:
        """The policy that the layers make, as by `compose`. Raises ConfigError with every problem."""
        policy, problems = compose(layers, known)
        if policy is None:
            raise ConfigError("the policy is wrong\n" + "\n".join(problems), problems=problems)
        return policy

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What it was made of, as it was written."""
        return tuple(one.layer for one in self._parsed)

    def isolation(self, backend: str, kernel_id: str = "") -> Isolation:
        """How this backend's kernels are kept apart from the caller's process, or this one of them."""
        return self.backend_isolation[self.isolation_key(backend, kernel_id)]

    def isolation_key(self, backend: str, kernel_id: str) -> str:
        """Where it says so: of this very kernel, of its backend, or of all, `*`."""
        return next((name for name in (kernel_id, backend) if name in self.backend_isolation), "*")

    def traced(self, kernel_id: str, ops: Sequence[str], process: int, program: str = "") -> float:
        """The share of a kernel's calls that this process is to record: the greatest of those that mean it. `ops`: the
        names by which the call's op may be meant."""
        call = (kernel_id, ops, process, program)
        return max((share for name, share in self.traces.items() if Traced.of(name).means(*call)), default=0.0)

    def policy_for_call(self, context: SelectionContext, pinned: str = "", rolled: Sequence[str] = ()) -> PolicyForCall:
        """The policy's ruling on one call, which judges many kernels. `pinned`: the backend that it names; `rolled`:
        versions that need no name."""
        return PolicyForCall(self, context, pinned, rolled)

    def judge(self, context: SelectionContext, kernel_id: str, backend: str) -> PolicyVerdict:
        """What locks, lists and rules say of one kernel for one call."""
        return self.policy_for_call(context).judge(kernel_id, backend)

    def with_overlay(self, overlay: Mapping[str, Any]) -> Policy:
        """This policy with a caller's own layers on top: {"layers": [{"origin": text, "values": map}, ...]}.

        Raises InvalidArgument with every problem: overlays come from other processes.
        """
        if not overlay:
            return self
        policy, problems = _merge((*self._parsed, *(_parse(layer) for layer in _overlay_layers(overlay))), self._known)
        if policy is None:
            raise InvalidArgument("the policy set here is wrong\n" + "\n".join(problems), problems=problems)
        return policy

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every value and its origin, as plain values: {key or key.entry: {"value": ..., "origin": ...}}."""
        return {
            name: {"value": value, "origin": self.origins.get(name, DEFAULT)} for name, value in self._rows().items()
        }

    def _rows(self) -> dict[str, Any]:
        rows: dict[str, Any] = {f"locks.{lock.pattern}": lock.kernel for lock in self.locks}
        rows |= {limit.key: list(limit.patterns) for limit in self.limits}
        rows |= {f"rules.{i}": _rule_row(rule) for i, rule in enumerate(self.rules)}
        for name in _SCALARS:
            value = getattr(self, name)
            rows[name] = str(value) if isinstance(value, Path) else value
        rows |= {f"kernel_sources.{name}": value for name, value in sorted(self.kernel_sources.items())}
        rows |= {f"backend_isolation.{name}": mode for name, mode in sorted(self.backend_isolation.items())}
        rows |= {f"traces.{name}": share for name, share in sorted(self.traces.items())}
        rows |= {f"weights.{name}": value for name, value in asdict(self.weights).items()}
        return rows


def _rule_row(rule: Rule) -> dict[str, Any]:
    row: dict[str, Any] = {"match": {condition.field: condition.written for condition in rule.conditions}}
    row |= {limit.key: list(limit.patterns) for limit in rule.limits}
    if rule.prefer:
        row |= {"prefer": list(rule.prefer), "bonus": rule.bonus}
    return row | ({"lock": rule.lock} if rule.lock else {})


# --- from layers to a policy


@dataclass(frozen=True, slots=True)
class _Parsed:
    layer: Layer
    values: Values
    problems: tuple[Problem, ...]


def compose(layers: Sequence[Layer], known: Known | None = None) -> tuple[Policy | None, list[str]]:
    """The policy that the layers make, later ones on top; or None and every problem with its origin.

    known: the names that exist; without it names are not checked.
    """
    return _merge(tuple(_parse(layer) for layer in layers), known)


def _parse(layer: Layer) -> _Parsed:
    values, problems = parse_values(layer.values)
    return _Parsed(layer, values, tuple(problems))


def _merge(parsed: tuple[_Parsed, ...], known: Known | None) -> tuple[Policy | None, list[str]]:
    problems: list[str] = []
    for one in parsed:
        problems += one.layer.complaints((*one.problems, *check(one.values, known)))
        if len(problems) > MAX_PROBLEMS:
            return None, [*problems[:MAX_PROBLEMS], "and more problems, which are told when these are repaired"]
    if problems:
        return None, problems
    locks: dict[str, Lock] = {}
    limits: dict[str, Limit] = {}
    rules: list[Rule] = []
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    isolation: dict[str, Isolation] = {"*": "lifted"}
    weights: dict[str, float] = {}
    sources: dict[str, str] = {}
    traces: dict[str, float] = {}
    for rank, (layer, values) in enumerate((one.layer, one.values) for one in parsed):
        for pattern, kernel in (values.locks or {}).items():
            locks[pattern] = Lock(pattern, kernel, layer.origin_of(("locks", pattern)), rank)
            origins[f"locks.{pattern}"] = locks[pattern].origin
        for key in _LISTS:
            patterns = getattr(values, key)
            if patterns is not None:
                limits[key] = _limit(key, patterns, layer.origin_of((key,)))
                origins[key] = limits[key].origin
        for i, rule in enumerate(values.rules or ()):
            origins[f"rules.{len(rules)}"] = layer.origin_of(("rules", i))
            rules.append(_rule(rule, origins[f"rules.{len(rules)}"], rank))
        for key in _SCALARS:
            value = getattr(values, key)
            if value is not None:
                given[key], origins[key] = value, layer.origin_of((key,))
        entries: dict[str, dict[str, Any]] = {
            "backend_isolation": isolation,
            "weights": weights,
            "kernel_sources": sources,
            "traces": traces,
        }
        for key, into in entries.items():
            for name, value in (getattr(values, key) or {}).items():
                into[name] = value
                origins[f"{key}.{name}"] = layer.origin_of((key, name))
    policy = Policy(
        locks=tuple(sorted(locks.values(), key=Lock.rank)),
        limits=tuple(limits[key] for key in _LISTS if key in limits),
        rules=tuple(rules),
        backend_isolation=isolation,
        weights=Weights(**weights),
        kernel_sources=sources,
        traces=traces,
        origins=origins,
        _parsed=parsed,
        _known=known,
        **given,
    )
    return replace(policy, hash=_hash(policy)), []


def _limit(key: str, patterns: tuple[str, ...], origin: str) -> Limit:
    verb, _, subject = key.partition("_")
    return Limit(key, verb == "allow", _SUBJECTS[subject], patterns, origin)


def _rule(rule: RuleValues, origin: str, rank: int) -> Rule:
    given = [(key, getattr(rule, key)) for key in _RULE_LISTS]
    return Rule(
        tuple(parse_condition(name, written) for name, written in rule.match.items()),
        origin,
        rank,
        tuple(_limit(key, patterns, origin) for key, patterns in given if patterns is not None),
        rule.prefer or (),
        PREFER_BONUS if rule.bonus is None else rule.bonus,
        rule.lock or "",
    )


def _hash(policy: Policy) -> str:
    """A hash of all of a policy that decisions depend on: its values, and which lock goes before which. Origins are not
    part of it."""
    of_rules = [Lock("", rule.lock, rule.origin, rule.layer) for rule in policy.rules if rule.lock]
    order = [(lock.pattern, lock.kernel) for lock in sorted((*policy.locks, *of_rules), key=Lock.rank)]
    text = json.dumps([policy._rows(), order], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nbytes(value: Any) -> int:
    """About what plain values take when they are packed; counting ends beyond what an overlay may have."""
    total, stack = 0, [value]
    while stack and total <= MAX_OVERLAY_BYTES:
        one = stack.pop()
        total += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            stack += one.keys()
            stack += one.values()
        elif isinstance(one, list | tuple):
            stack += one
    return total


def _overlay_layers(overlay: Mapping[str, Any]) -> list[Layer]:
    nbytes = _nbytes(overlay)
    if nbytes > MAX_OVERLAY_BYTES:
        raise InvalidArgument(f"a policy overlay of {nbytes:,} bytes or more; allowed: {MAX_OVERLAY_BYTES:,}")
    written = overlay.get("layers")
    if set(overlay) != {"layers"} or not isinstance(written, list) or len(written) > MAX_OVERLAY_LAYERS:
        raise InvalidArgument(f"a policy overlay is {{'layers': list of at most {MAX_OVERLAY_LAYERS}}}")
    layers = []
    for one in written:
        if not (isinstance(one, Mapping) and set(one) == {"origin", "values"} and isinstance(one["origin"], str)):
            raise InvalidArgument(f"a layer of a policy overlay is {{'origin': text, 'values': map}}, not {one!r:.200}")
        wide = [key for key in BROKER_WIDE if isinstance(one["values"], Mapping) and key in one["values"]]
        if wide:
            raise InvalidArgument(
                f"{one['origin']:.80}: {wide[0]} holds for the whole broker; set it in the policy file or in the "
                "broker's environment"
            )
        layers.append(Layer(one["origin"][:200], one["values"]))
    return layers


_SUBJECTS: Mapping[str, Subject] = {"sources": "source", "kernels": "kernel", "": "name"}
_SCALARS = (
    "strict_mode",
    "plan_mode",
    "allow_adaptation",
    "allow_jit_compile",
    "requires_deterministic",
    "memory_headroom_bytes",
    "shadow_rate",
    "tune_budget",
    "dispatch_table",
)
