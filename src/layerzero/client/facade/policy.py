"""Calls that tell the broker what this process wants of selection: lz.lock, lz.prefer and so on. docs/policy.md.

Each is checked by the broker first: an unknown kernel, op, backend or key is InvalidArgument with the nearest name.
All of them need lz.connect().
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.client.connection import overlay
from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.facade import default_session
from layerzero.ipc.errors import InvalidArgument


def lock(op: str, kernel_id: str) -> None:
    """Let calls of `op` run on `kernel_id` only, in all threads, until lz.unlock.

    Both may be globs; "attention.causal" and "attention.full" are ops of their own here. A call that the kernel cannot
    take is NoBackend, and its report names the lock.
    """
    _checked({"origin": "lz.lock", "values": {"locks": {op: kernel_id}}})
    overlay.change(lambda old: replace(old, locks={**old.locks, op: kernel_id}))


def unlock(op: str | None = None) -> None:
    """Take back lz.lock(op, ...), or all locks that lz.lock has set. Those of files and variables stay."""
    locks = overlay.process().locks
    if op is not None and op not in locks:
        raise InvalidArgument(f"lz.lock has set no lock on {op!r:.80}; its locks: {', '.join(locks) or 'none'}")
    kept = {} if op is None else {name: kernel for name, kernel in locks.items() if name != op}
    overlay.change(lambda old: replace(old, locks=kept))


def prefer(*names: str, only: bool = False) -> Scope:
    """Choose these backends or kernels (globs allowed) before others wherever they accept a call; others remain as
    fallback unless `only`.

    `with lz.prefer("torch"):` holds for the block. Without `with` it holds until its `end()`. Either way in this thread
    or asyncio task, and in tasks that it starts, not in other threads.
    """
    return _scope("lz.prefer", {"allow" if only else "prefer": list(names)})


def avoid(*names: str) -> Scope:
    """Use none of these backends or kernels (globs allowed); for how long as with lz.prefer."""
    return _scope("lz.avoid", {"avoid": list(names)})


def configure(**keys: Any) -> None:
    """Set keys of the policy for this process, in all threads: lz.configure(strict_mode=True). None takes a key back.

    All keys of docs/policy.md but those of the broker as a whole.
    """
    given = {key: value for key, value in keys.items() if value is not None}
    _checked({"origin": "lz.configure", "values": given or dict.fromkeys(keys)})
    overlay.change(
        lambda old: replace(old, settings={k: v for k, v in {**old.settings, **keys}.items() if v is not None})
    )


def policy() -> dict[str, Any]:
    """The policy that holds for a call here: `values` maps each key to its value and origin, `known` has the names that
    a policy may use, `problem` says why a changed file is not in force."""
    asked = overlay.current()
    answer: dict[str, Any] = default_session.session().ask("policy", overlay={} if asked is None else asked.to_wire())
    return answer


def _scope(origin: str, rule: dict[str, list[str]]) -> Scope:
    if not all(rule.values()):
        raise InvalidArgument(f"{origin} takes at least one backend or kernel")
    return Scope(_checked({"origin": origin, "values": {"rules": [rule]}}))


def _checked(layer: overlay.Layer) -> Overlay:
    """The layer by itself, found to be right by the broker. Raises InvalidArgument."""
    found = Overlay.of(layer)
    default_session.session().routes.check_policy(found)
    return found
