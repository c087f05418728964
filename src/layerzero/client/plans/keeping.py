"""What a plan chose by timing whole runs, kept by the broker for later processes (docs/plans.md).

Kept is the choice, not the plan: a plan's steps are the caller's own functions and arrays, so each process records its
own, twice as ever, and finds by a digest of what it recorded what an earlier one has chosen for it.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.client.connection import overlay
from layerzero.client.plans.choices import Candidate, Choices
from layerzero.client.plans.passes import Program
from layerzero.client.plans.recording import Use, Value
from layerzero.client.plans.traced import map_leaves
from layerzero.client.session.session import Session
from layerzero.ipc import files
from layerzero.ipc.errors import LayerZeroError

MAX_SOURCE_BYTES = 16 << 20
MAX_TEXT = 200  # of what is told of a plan for people
WAIT_S = 5.0  # for the broker's answer; a busy one need not hold up a plan
REUSED, KEPT, IGNORED = "reused", "kept", "ignored"
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


class KeptChoice:
    """Of one variant of a plan. `notes` say for `explain` what came of it; `states` are for counters."""

    def __init__(self, function: Callable[..., Any], program: Program, label: str) -> None:
        self.notes: list[str] = []
        self.states: list[str] = []
        name = getattr(function, "__qualname__", type(function).__name__)
        self._what = f"{name}({label})"[:MAX_TEXT]
        self._policy = ""
        self._digest = ""
        try:
            self._digest = digest_of(function, program)
        except (OSError, TypeError) as exc:
            self.notes.append(f"the choice is not kept: the function's source is in no file that can be read ({exc})")

    def look(self, session: Session, choices: Choices) -> None:
        """Take what an earlier process has chosen, if that was among all that is to be tried here."""
        if not self._digest:
            return
        try:
            told = session.ask("plan_choice", within_s=WAIT_S, plan=self._digest)
            self._policy, found = told["policy"], told["found"]
        except LayerZeroError as exc:
            self._digest = ""
            self.notes.append(f"the choice is not kept: {exc.message}")
            return
        ignored, kept = told["ignored"], dict[str, float]() if found is None else found["us"]
        missing = [one.backend for one in choices.candidates if found is not None and one.backend not in kept]
        if missing:
            ignored = f"{', '.join(missing)} was not tried for it"
        if ignored:
            self.states.append(IGNORED)
            self.notes.append(f"a choice that was kept is ignored: {ignored}")
        if found is None or missing:
            return
        choices.settle([Candidate(name, us) for name, us in kept.items()], found["chosen"])
        hours = max(time.time() - found["made_s"], 0.0) / 3600
        self.states.append(REUSED)
        self.notes.append(f"the choice was made and kept {hours:,.1f} hours ago; lz cache clear forgets it")

    def tell(self, session: Session, choices: Choices) -> None:
        """Have what was chosen here kept."""
        if not self._digest:
            return
        us = {one.backend: float(one.us) for one in choices.candidates}
        its = {"plan": self._digest, "policy": self._policy, "chosen": choices.chosen.backend, "us": us}
        try:
            problem = session.ask("keep_plan_choice", within_s=WAIT_S, what=self._what, **its)["problem"]
        except LayerZeroError as exc:
            problem = exc.message
        self.states += [] if problem else [KEPT]
        self.notes.append(f"the choice is not kept: {problem}" if problem else "the choice is kept for later processes")


def digest_of(function: Callable[..., Any], program: Program) -> str:
    """Of the function's source file, its name in it, what was recorded of it, and the policy that its caller asks for:
    64 hexadecimal digits. Raises OSError and TypeError where there is no file."""
    policy = overlay.current()
    source = files.read(Path(_file_of(function)), MAX_SOURCE_BYTES)
    digest = hashlib.sha256(hashlib.sha256(source).digest())
    name = getattr(function, "__qualname__", type(function).__qualname__)
    for line in (name, "" if policy is None else policy.text, *_lines(program)):
        digest.update(f"{line}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _file_of(function: Any) -> str:
    """Where a function, a method, or what a callable object or a model runs is written."""
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__func__", function)
    if getattr(found, "__code__", None) is None:
        found = getattr(type(found), "forward", None) or type(found).__call__
    code = getattr(found, "__code__", None)
    if code is None:
        raise TypeError(f"{type(function).__name__} is not written in Python")
    return str(code.co_filename)


def _lines(program: Program) -> list[str]:
    """The program without its numbers: its steps in order, and the arrays between them."""
    shown: dict[int, str] = {}

    def name(leaf: Any) -> Any:
        if isinstance(leaf, Use):
            value = program.value(leaf)
            shown[value.number] = _described(program, value)
            return f"%{value.number}"
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__

    lines = []
    for step in program.steps:
        asked: Any = ()
        if step.request is not None:
            params = {key: name(value) for key, value in sorted(step.request.params.items())}
            asked = (step.request.backend, params, step.number in program.chained)
        used = map_leaves((step.args, step.kwargs), name)
        lines.append(repr((step.name, asked, used, map_leaves(step.result, name))))
    lines.append(repr(map_leaves(program.recording.output, name)))
    return [*lines, *(f"%{number} {text}" for number, text in sorted(shown.items()))]


def _described(program: Program, value: Value) -> str:
    if value.array is None:
        spec = f"{value.obj.dtype}{list(value.obj.shape)}"
    else:
        spec = f"{value.array.kind} {value.array.spec} {value.array.spec.strides}"
    return f"{spec} {value.storage.number} {value.offset} {program.homes[value.storage.number]}"
