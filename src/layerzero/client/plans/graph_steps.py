"""The steps of a plan on a GPU, done one after the other: as calls, or while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.connection.record import kernel_of
from layerzero.client.connection.report import IN_PROCESS, LIFTED
from layerzero.client.gpu.capture import Captured
from layerzero.client.plans.graph_library import GraphLibrary
from layerzero.client.plans.passes import FIXED, Program
from layerzero.client.plans.recording import Step, Use
from layerzero.client.plans.traced import map_leaves
from layerzero.client.session.session import Session
from layerzero.ipc.errors import LayerZeroError

HERE = (LIFTED, IN_PROCESS)
NO_WISHES: Mapping[int, Overlay] = MappingProxyType({})
SLOT_PATH = "worker"


class NotCapturable(Exception):
    """A step that no CUDA graph can hold, in words for a person."""


@dataclass(frozen=True)
class Served:
    """What ran a call: `path` is "lifted", "in_process" or "worker"; `note` names library and version. `why`: of a call
    in a worker, why it is not lifted, "" where that is not known yet."""

    path: str
    kernel_id: str
    note: str = ""
    why: str = ""

    @property
    def is_here(self) -> bool:
        """Whether this process launches it itself."""
        return self.path in HERE


class GraphSteps:
    """Of one program and one session. For one thread at a time."""

    def __init__(
        self,
        session: Session,
        program: Program,
        library: GraphLibrary,
        wishes: Mapping[int, Overlay] = NO_WISHES,
    ) -> None:
        """`wishes`: what calls ask of selection besides, by their step."""
        self._session, self._program, self._library, self._wishes = session, program, library, wishes
        self._outputs = {value.number for value in program.outputs()}
        self._over = self._last_uses()
        self.served: dict[int, Served] = {}
        self._found: dict[int, Any] = {}
        self.waiting = ""  # the first step of own code that was seen to wait for the GPU, and how

    def run(self, inputs: Sequence[Any], *, is_strict: bool = False, is_captured: bool = False) -> dict[int, Any]:
        """The arrays of the function's result by value. `is_strict`: it is noted which step of own code waits for the
        GPU. Raises what the steps raise, NotCapturable in a capture."""
        for _ in self.walk(inputs, is_strict=is_strict, is_captured=is_captured):
            pass
        found, self._found = self._found, {}
        return found

    def walk(
        self, inputs: Sequence[Any], *, is_strict: bool = False, is_captured: bool = False
    ) -> Iterator[tuple[Step, tuple[Any, ...]]]:
        """As `run`, step by step: each with its results."""
        recording = self._program.recording
        found = self._found = dict(zip(recording.inputs, inputs, strict=True))
        for step in self._program.steps:
            try:
                self._do(step, found, is_strict=is_strict)
            except (LayerZeroError, RuntimeError) as exc:
                if not is_captured:
                    raise
                text = exc.message if isinstance(exc, LayerZeroError) else f"{type(exc).__name__}: {exc}"
                first = text.strip().splitlines()[0] if text.strip() else type(exc).__name__
                raise NotCapturable(f"{step.where} {step.name}: no CUDA graph can hold it: {first[:300]}") from exc
            yield step, tuple(self._array(found, self._program.value(number).number) for number in step.made)
            for number in self._over.get(step.number, ()):
                found.pop(number, None)

    def _do(self, step: Step, found: dict[int, Any], *, is_strict: bool) -> None:
        def filled(leaf: Any) -> Any:
            return self._array(found, self._program.value(leaf).number) if isinstance(leaf, Use) else leaf

        args, kwargs = map_leaves((step.args, step.kwargs), filled)
        if step.request is not None:
            wish = self._wishes.get(step.number)
            with contextlib.nullcontext() if wish is None else Scope(wish):
                result = self._session.run(replace(step.request, args=args, out=kwargs.get("out")))
            self.served[step.number] = served_by(self._session.last_record)
        else:
            assert step.function is not None
            result = self._strictly(step, args, kwargs) if is_strict else step.function(*args, **kwargs)
        self._keep(found, step.result, result)

    def _strictly(self, step: Step, args: Any, kwargs: Any) -> Any:
        assert step.function is not None
        try:
            with self._library.strict():
                return step.function(*args, **kwargs)
        except RuntimeError as exc:
            if "synchronizing" not in str(exc):
                raise
            self.waiting = self.waiting or f"{step.where} {step.name} waits for the GPU, which no CUDA graph can"
        return step.function(*args, **kwargs)

    def _keep(self, found: dict[int, Any], made: Any, result: Any) -> None:
        if isinstance(made, (list, tuple)):
            for one, part in zip(made, result, strict=True):
                self._keep(found, one, part)
        elif isinstance(made, dict):
            for name, one in made.items():
                self._keep(found, one, result[name])
        elif isinstance(made, Use):
            found[self._program.value(made).number] = result

    def _array(self, found: dict[int, Any], number: int) -> Any:
        array = found.get(number)
        if array is None:
            value = self._program.value(number)
            assert self._program.homes[value.storage.number] == FIXED, "a step that was left out is needed"
            array = value.obj
        return array

    def _last_uses(self) -> dict[int, list[int]]:
        """Which arrays are let go after each step: their memory serves later ones."""
        last: dict[int, int] = {}
        for step in self._program.steps:
            for number in (*step.made, *step.reads):
                last[self._program.value(number).number] = step.number
        over: dict[int, list[int]] = {}
        for number, step_number in last.items():
            if number not in self._outputs and number not in self._program.recording.inputs:
                over.setdefault(step_number, []).append(number)
        return over


def _why(route: Any) -> str:
    waits = f"not known yet whether it may be lifted: {route.awaits}" if route.awaits else ""
    return str(route.not_lifted or waits)


def served_by(record: Any) -> Served:
    """A thread's last call, by its record (Session.last_record)."""
    kernel_id, path, _ = kernel_of(record)
    if path in HERE:
        return Served(path, kernel_id, str(record[8]))
    if isinstance(record, Captured):
        kernel_id = next((d.kernel_id for d in record.route.decisions.values()), "")
    with contextlib.suppress(AttributeError):
        return Served(SLOT_PATH, kernel_id, "", _why(record.route))
    return Served(SLOT_PATH, kernel_id)
