"""What clients ask besides calls. An answer that takes as long as a call is made in steps, with calls in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

from layerzero.broker.io import frame_codec
from layerzero.broker.queries import methods
from layerzero.ipc.errors import LayerZeroError

MAX_OPEN = 256  # answers in the making; beyond, the oldest one is finished first


class IncrementalAnswers:
    """`begin`: as requests.begin, of a server. `send` takes a client and a frame for it; `fail` a client and what a
    step of its answer raised that is no answer."""

    def __init__(
        self,
        begin: Callable[[str, Mapping[str, Any], bytes], Any],
        send: Callable[[bytes, bytes], None],
        fail: Callable[[bytes, Exception], None],
    ) -> None:
        self._begin = begin
        self._send = send
        self._fail = fail
        self._open: deque[tuple[bytes, int, methods.Steps]] = deque()

    def __bool__(self) -> bool:
        """Some are in the making."""
        return bool(self._open)

    def take(self, client: bytes, asked: frame_codec.Asked) -> None:
        try:
            begun = self._begin(asked.request.method, asked.request.params, client)
        except LayerZeroError as exc:
            self._send(client, frame_codec.refused_request(asked.seq, exc))
            return
        if not isinstance(begun, Generator):
            self._answer(client, asked.seq, begun)
            return
        self._open.append((client, asked.seq, begun))
        while len(self._open) > MAX_OPEN:
            self.go_on()

    def go_on(self) -> None:
        """The next step of the oldest one."""
        if not self._open:
            return
        client, seq, steps = self._open[0]
        try:
            next(steps)
        except StopIteration as end:
            self._open.popleft()
            self._answer(client, seq, end.value)
        except LayerZeroError as exc:
            self._open.popleft()
            self._send(client, frame_codec.refused_request(seq, exc))
        except Exception as exc:
            self._open.popleft()
            self._fail(client, exc)

    def _answer(self, client: bytes, seq: int, answer: object) -> None:
        try:
            frame = frame_codec.response(seq, answer)
        except LayerZeroError as exc:
            frame = frame_codec.refused_request(seq, exc)
        self._send(client, frame)
