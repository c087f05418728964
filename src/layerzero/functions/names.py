"""What a name of an environment is: asked of its worker."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

from layerzero.functions.calling import MIN_ROOM, Arguments
from layerzero.functions.calls import UNKNOWN_NS, Call
from layerzero.functions.environment import FunctionEnv
from layerzero.functions.options import Options
from layerzero.functions.places import Candidate, Places
from layerzero.ipc.errors import BackendError, ProtocolError, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame
from layerzero.ipc.functions.surface import Surface

_root_logger = logging.getLogger()


class _Name:
    """What a question belongs to."""

    def __init__(self, code: Code, where: FunctionEnv, options: Options) -> None:
        self._places = Places([Candidate(where, code)], options.workers)
        self._env, self._options, self._label = where, options, code.label
        self._tree = code.to_tree()
        self._room, self._kernel_ns = MIN_ROOM, UNKNOWN_NS
        self._last = threading.local()


class _Question(Call):
    def __init__(self, owner: _Name) -> None:
        options = replace(owner._options, idempotent=True)
        super().__init__(owner, Arguments((), {}, owner._places.backends), (), {}, options)
        self._tree = owner._tree

    def _frame(self, given: Arguments) -> Frame:
        return Frame([frames.NAME, self._tree, _root_logger.level])


def look_up(code: Code, where: FunctionEnv, options: Options) -> list[Any]:
    """What a name of the environment is: [VALUE, value], [FUNCTION, whether it is a generator function, whether it is a
    coroutine function], [CLASS, surface] or [MODULE]. Raises AttributeError where there is none, and as a call does."""
    try:
        found = _Question(_Name(code, where, options)).finish()
    except RemoteError as exc:
        if exc.facts.get("type") == "AttributeError":
            raise AttributeError(f"{code.label}: {exc.facts['message']}", name=code.label.rpartition(".")[2]) from exc
        raise
    try:
        match found:
            case [frames.CLASS, *rest]:
                return [frames.CLASS, Surface.from_tree(rest)]
            case [frames.MODULE] | [frames.FUNCTION, bool(), bool()] | [frames.VALUE, _]:
                return list(found)
    except ProtocolError:
        pass
    text = f"{code.label} in {where.name}: its worker's answer says nothing of a name: {found!r:.100}"
    raise BackendError(text, backend=where.backend)
