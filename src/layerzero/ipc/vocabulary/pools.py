"""Names of backends that are workers of one environment of functions, and what calls say of several backends.

The first worker of an environment has its name, the others a number behind it: `old-numpy.5f3a9c21.2`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from layerzero.ipc.errors import InvalidArgument

MAX_WORKERS = 64  # of an environment
MAX_PINNED = 256  # backends that a call may name
_ENVIRONMENT = r"[a-z0-9][a-z0-9_-]*\.[0-9a-f]{8}"
_MEMBER = re.compile(rf"(?P<environment>{_ENVIRONMENT})\.(?P<number>[1-9][0-9]{{0,5}})")


def member(environment: str, number: int) -> str:
    """The backend of an environment's worker, counted from 1."""
    return environment if number == 1 else f"{environment}.{number}"


def members(environment: str, count: int) -> tuple[str, ...]:
    """Those of its first workers. Raises InvalidArgument."""
    demand_workers(count)
    return tuple(member(environment, number) for number in range(1, count + 1))


def demand_workers(count: object) -> None:
    """Raises InvalidArgument for a number of workers that no environment can have."""
    if type(count) is not int or not 1 <= count <= MAX_WORKERS:
        raise InvalidArgument(f"workers is {count!r:.80}; allowed: an integer from 1 to {MAX_WORKERS}")


def is_environment(name: str) -> bool:
    """Whether an environment of functions may be called so."""
    return re.fullmatch(_ENVIRONMENT, name) is not None


@functools.lru_cache(maxsize=4096)
def environment_of(backend: str) -> str:
    """The environment that a worker is of; any other backend is its own."""
    found = _MEMBER.fullmatch(backend)
    return backend if found is None else found["environment"]


def joined(backends: Sequence[str]) -> str:
    """What a call names as its backends, the one that it would have first."""
    return ",".join(backends)


def named(text: str) -> tuple[str, ...]:
    """The backends that a call names."""
    return tuple(text.split(",")) if text else ()
