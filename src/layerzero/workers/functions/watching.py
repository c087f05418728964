"""Machine code in a worker of functions: it is watched from the first function on that may be lifted (docs/lifting.md),
since CUPTI allows one subscriber, which elsewhere may be a profiler of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.workers.gpu.lifting.modules import Modules

NOT_BEGUN = "no function with lift=True was imported here; it is said where the function is decorated"
_known: list[Modules] = []


def modules() -> Modules:
    """What this process has loaded; its `problem` says why nobody has seen that."""
    if not _known:
        from layerzero.workers.gpu.lifting.modules import Modules

        _known.append(Modules(NOT_BEGUN))
    return _known[0]


def begin() -> None:
    """A module that has such a function is being imported: none of its kernels was loaded yet."""
    from layerzero.workers.gpu.lifting.modules import watch

    found = modules()
    if found.problem == NOT_BEGUN:
        watch(into=found)
