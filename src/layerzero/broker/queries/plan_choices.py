"""Choices of execution plans, asked for and told by clients."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from typing import Any

from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.storage.plan_choices import PlanChoice
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.version import __version__

_DIGEST = re.compile(r"[0-9a-f]{64}")


def plan_choice(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """The choice that was kept for a plan under the policy in force: `found`, None for none, with `chosen`, `us` and
    `made_s`; `ignored`: why one that is there does not count; `policy`: its hash, for `keep_plan_choice`.

    plan: the client's digest of function, program and overlay, 64 hexadecimal digits.
    """
    policy = server.policy.policy.hash
    key = _key(params.get("plan"), policy)
    found, ignored = server.plan_choices.find(key, _identities(server))
    told = None if found is None else {"chosen": found.chosen, "us": dict(found.us), "made_s": found.made_s}
    return {"found": told, "ignored": ignored, "policy": policy}


def keep_plan_choice(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a client chose for a plan. `problem`: why it is not kept, "" where it is.

    plan, policy: as of `plan_choice`; chosen: a backend, "" for each call's own best; us: map of candidates to
    microseconds; what: function and arguments, for people.
    """
    policy, us, what = params.get("policy"), params.get("us"), params.get("what")
    chosen = params.get("chosen")
    if not isinstance(us, dict) or not all(isinstance(text, str) for text in (policy, what, chosen)):
        raise InvalidArgument("keep_plan_choice needs `us`, a map, and `policy`, `what` and `chosen`, texts")
    key = _key(params.get("plan"), str(policy))
    if policy != server.policy.policy.hash:
        return {"problem": "the policy has changed since its runs were timed"}
    known = _identities(server)
    unknown = [str(name)[:40] for name in us if name and name not in known]
    if unknown:
        return {"problem": f"it is not known what times of {', '.join(unknown[:4])} depend on"}
    its = {name: known[name] for name in us if name}
    choice = PlanChoice(str(chosen), us, its, str(what), time.time())
    try:
        choice.check()
    except ValueError as exc:
        raise InvalidArgument(f"keep_plan_choice: {exc}") from None
    return {"problem": server.plan_choices.add(key, choice)}


def _key(plan: object, policy: str) -> str:
    if not isinstance(plan, str) or not _DIGEST.fullmatch(plan):
        raise InvalidArgument(f"plan is {plan!r:.80}; needed: 64 hexadecimal digits")
    return hashlib.sha256(f"{plan} {policy} {__version__}".encode()).hexdigest()


def _identities(server: BrokerView) -> dict[str, str]:
    """Of each backend that has been looked at, the hash of what its times depend on."""
    return {backend: identity.hash for backend, identity in server.identities.items()}
