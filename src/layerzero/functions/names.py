"""What a name of an environment is: asked of its worker."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

from layerzero.functions.calling import MIN_ROOM, Arguments
from layerzero.functions.calls import Call, Options
from layerzero.functions.environment import FunctionEnv
from layerzero.ipc.errors import BackendError, ProtocolError, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame
from layerzero.ipc.functions.surface import Surface

_root_logger = logging.getLogger()


class _Name:
    """What a question belongs to."""

    def __init__(self, code: Code, where: FunctionEnv, options: Options) -> None:
        self._env, self._tree, self._options, self._label = where, code.to_tree(), options, code.label
        self._room = MIN_ROOM
        self._last = threading.local()


class _Question(Call):
    def _frame(self, given: Arguments) -> Frame:
        return Frame([frames.NAME, self.owner._tree, _root_logger.level])


def look_up(code: Code, where: FunctionEnv, options: Options) -> list[Any]:
    """What a name of the environment is: [VALUE, value], [FUNCTION, whether it is a generator], [CLASS, surface] or
    [MODULE]. Raises AttributeError where there is none, and as a call does."""
    try:
        found = _Question(
            _Name(code, where, options), Arguments((), {}, where.backend), (), {}, replace(options, idempotent=True)
        ).finish()
    except RemoteError as exc:
        if exc.facts.get("type") == "AttributeError":
            raise AttributeError(f"{code.label}: {exc.facts['message']}", name=code.label.rpartition(".")[2]) from exc
        raise
    try:
        match found:
            case [frames.CLASS, *rest]:
                return [frames.CLASS, Surface.from_tree(rest)]
            case [frames.MODULE] | [frames.FUNCTION, bool()] | [frames.VALUE, _]:
                return list(found)
    except ProtocolError:
        pass
    text = f"{code.label} in {where.name}: its worker's answer says nothing of a name: {found!r:.100}"
    raise BackendError(text, backend=where.backend)
