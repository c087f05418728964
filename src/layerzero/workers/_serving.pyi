"""What workers/_serving.c has. The arguments and their meaning: workers/serving.py."""

from collections.abc import Callable
from typing import Any

LAYOUT: tuple[int, ...]

class Line:
    last_call: int
    def __new__(
        cls,
        page: Any,
        ready: dict[Any, Any],
        lane: Any,
        end: Callable[..., None] | None,
        address: int,
        mark: int,
        doorbell: int,
        answer: int,
        /,
    ) -> Line: ...
    def tell(self, call: int, /) -> None: ...

class Server:
    def __new__(
        cls,
        serve: Callable[[Any, Any], bool],
        finish: Callable[[Any, int, int, int, Any], None],
        mute: Callable[[Any], None],
        may_spin: Callable[[], bool],
        write: Callable[[int, int], None] | None,
        page: int,
        spin_ns: int,
        dealer: int,
        control: int,
        /,
    ) -> Server: ...
    def add(self, line: Line, /) -> None: ...
    def remove(self, line: Line, /) -> None: ...
    def serve(self) -> list[tuple[int, int]]: ...
