"""What client/gpu/_fastpath.c has. Keyword arguments and their meaning: client/gpu/fastpath.py."""

from typing import Any

from layerzero.client.connection.call import Request

LAYOUT: tuple[int, ...]
LIMITS: tuple[int, ...]

class CallSite:
    def __new__(cls, **told: Any) -> CallSite: ...

class Repeats:
    def __new__(cls, **told: Any) -> Repeats: ...
    def run(self, request: Request, start_ns: int, /) -> Any: ...
    def key(self, request: Request, /) -> bytes | None: ...
    def learn(self, **types: Any) -> None: ...
