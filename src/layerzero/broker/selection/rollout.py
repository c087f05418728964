"""Rollout: a new version of a backend beside the old one, on a share of the calls, and the rules by which it goes on or
back. Plain values, as they are asked for, kept and shown. Pure."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from layerzero.broker.selection.policy import VERSION_MARK
from layerzero.ipc.errors import InvalidArgument

RUNNING, PROMOTED, ROLLED_BACK = "running", "promoted", "rolled back"
STATES = (RUNNING, PROMOTED, ROLLED_BACK)
MAX_STEPS = 16
MAX_TEXT = 2000  # characters of `why`
MAX_NAME = 64
MAX_CALLS = 10**9
MAX_AFTER_S = 30 * 86_400.0
MAX_STARTED_S = 1e11  # of the year 5138: no clock says more


@dataclass(frozen=True, slots=True)
class Rules:
    """What ends a rollout: more errors or mismatches than these, or a p99 of kernel times above the old version's by
    more than this ratio. A step is over after so many calls, or, where that is 0, after so many seconds."""

    max_errors: int = 0
    max_mismatches: int = 0
    max_p99: float = 1.2
    after_calls: int = 1000
    after_s: float = 0.0

    def check(self) -> None:
        """Raises InvalidArgument."""
        for name in ("max_errors", "max_mismatches", "after_calls"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_CALLS:
                raise InvalidArgument(f"{name} is {value!r:.80}; allowed: an integer from 0 to {MAX_CALLS:,}")
        if not _is_number(self.max_p99) or not 1.0 <= self.max_p99 <= 1e6:
            raise InvalidArgument(f"max_p99 is {self.max_p99!r:.80}; allowed: a ratio of 1 or more, such as 1.2")
        if not _is_number(self.after_s) or not 0.0 <= self.after_s <= MAX_AFTER_S:
            raise InvalidArgument(f"after_s is {self.after_s!r:.80}; allowed: 0 to {MAX_AFTER_S:,.0f} seconds")
        if (self.after_calls > 0) == (self.after_s > 0):
            raise InvalidArgument("a step ends after calls or after a time: give one of the two, and 0 of the other")


@dataclass(frozen=True, slots=True)
class Rollout:
    """From `backend` to its version `to`. `shares`: of the steps, each 0 to 1, ascending; `step` is the present one.
    `shadow_rate`: the share of calls that are compared with the other version. `started_s`: since 1970. `why`: of a
    state that is not running."""

    backend: str
    to: str
    shares: tuple[float, ...]
    rules: Rules = Rules()
    shadow_rate: float = 0.0
    started_s: float = 0.0
    step: int = 0
    state: str = RUNNING
    why: str = ""

    @classmethod
    def of(cls, value: object) -> Rollout:
        """From what `to_wire` has made, or a client has written. Raises InvalidArgument."""
        if not isinstance(value, Mapping):
            raise InvalidArgument(f"a rollout is a map, not {type(value).__name__}")
        given = dict(value)
        rules = given.pop("rules", {})
        for what, kind in ((given, cls), (rules, Rules)):
            known = {field.name for field in fields(kind)}
            if not isinstance(what, Mapping) or not set(what) <= known:
                raise InvalidArgument(f"a rollout has a wrong part: {what!r:.80}; known: {', '.join(sorted(known))}")
        shares = given.pop("shares", None)
        if not isinstance(shares, list | tuple):
            raise InvalidArgument(f"shares are {shares!r:.80}; allowed: a list of numbers above 0, up to 1")
        try:
            made = cls(**given, shares=tuple(shares), rules=Rules(**rules))
        except TypeError as exc:
            raise InvalidArgument(f"a rollout needs backend, to and shares: {exc}") from exc
        made.check()
        return made

    def check(self) -> None:
        """Raises InvalidArgument."""
        for name in ("backend", "to"):
            value = getattr(self, name)
            if type(value) is not str or not 0 < len(value) <= MAX_NAME or not value.isprintable():
                raise InvalidArgument(f"{name} is {value!r:.80}; allowed: a backend's name")
        if VERSION_MARK in self.backend or not self.to.startswith(f"{self.backend}{VERSION_MARK}"):
            raise InvalidArgument(
                f"name a backend and a version of it, such as onnxruntime onnxruntime@1.16; "
                f"{self.to!r:.80} is no version beside {self.backend!r:.80}"
            )
        _check_shares(self.shares)
        if not _is_number(self.shadow_rate) or not 0.0 <= self.shadow_rate <= 1.0:
            raise InvalidArgument(f"shadow_rate is {self.shadow_rate!r:.80}; allowed: 0 (never) to 1 (every call)")
        if not _is_number(self.started_s) or not 0.0 <= self.started_s <= MAX_STARTED_S:
            raise InvalidArgument(f"started_s is {self.started_s!r:.80}; allowed: seconds since 1970")
        if type(self.step) is not int or not 0 <= self.step < len(self.shares):
            raise InvalidArgument(f"step is {self.step!r:.80}; allowed: 0 to {len(self.shares) - 1}")
        if self.state not in STATES:
            raise InvalidArgument(f"state is {self.state!r:.80}; allowed: {', '.join(STATES)}")
        if type(self.why) is not str or len(self.why) > MAX_TEXT or self.why != _shown(self.why):
            raise InvalidArgument(
                f"why is {self.why!r:.80}; allowed: a text of at most {MAX_TEXT} characters that can be shown"
            )
        self.rules.check()

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self), "shares": list(self.shares)}

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def is_standing(self) -> bool:
        """The new version serves calls for it."""
        return self.state != ROLLED_BACK

    @property
    def share(self) -> float:
        """Of the calls that name no version: what the new one serves, 0 to 1."""
        return {RUNNING: self.shares[self.step], PROMOTED: 1.0, ROLLED_BACK: 0.0}[self.state]

    def takes(self, process: int, bucket: str) -> bool:
        """Whether calls of this bucket, from this process, go to the new version. A greater share only adds some."""
        return self.is_standing and _place(self.to, process, bucket) < self.share

    def ended(self, state: str, why: str) -> Rollout:
        return replace(self, state=state, why=_shown(why[:MAX_TEXT]))

    def __str__(self) -> str:
        how = f"{100 * self.share:g} %" if self.is_running else self.state
        return f"rollout: {self.backend} -> {self.to}, {how}"


def pair_of(rollout: Rollout, kernel_id: str) -> tuple[str, bool] | None:
    """What a kernel is called within its backend, and whether it is the new version's; None for one of others."""
    for backend, is_new in ((rollout.to, True), (rollout.backend, False)):
        if kernel_id.startswith(f"{backend}."):
            return kernel_id[len(backend) + 1 :], is_new
    return None


def _check_shares(shares: Sequence[float]) -> None:
    is_good = 0 < len(shares) <= MAX_STEPS and all(_is_number(share) and 0.0 < share <= 1.0 for share in shares)
    if not is_good or any(before >= after for before, after in itertools.pairwise(shares)):
        raise InvalidArgument(
            f"shares are {list(shares)!r:.80}; allowed: one to {MAX_STEPS} numbers above 0 and up to 1, ascending"
        )


def _shown(text: str) -> str:
    """With a space in the place of what a terminal would obey, or what has no bytes: kernels write such texts."""
    return "".join(one if one.isprintable() or one == "\n" else " " for one in text)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _place(to: str, process: int, bucket: str) -> float:
    """Where calls stand in the order in which a growing share takes them: 0 to 1, and always the same."""
    digest = hashlib.blake2b(f"{to}\0{process}\0{bucket}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)
