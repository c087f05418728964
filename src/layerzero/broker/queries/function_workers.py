"""What clients ask about workers of functions: to be learned of, and to be kept for one object."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.policy_values import Known
from layerzero.broker.selection.signature import unknown_backend
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import OPS


def learn(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Look again for an environment of functions, or a version: one that was declared, or built, after this broker had
    looked; for its first `workers`, 1 if left out; without a name for all versions. `serves`: these can be used now,
    whoever's question this broker has learned of them by. Where it `is_built` says no, one whose worker joins alone is
    learned."""
    name, count = params.get("backend"), params.get("workers", 1)
    if name is None:
        learned = [_learn(server, one) for one in server.launcher.new_versions()]
        return {"serves": any(learned)}
    if not isinstance(name, str) or not (params.get("is_built", True) or server.launcher.joins(name)):
        raise _unknown(server, name)
    several = pools.members(name, count) if count != 1 else (name,)
    serve = [_learn(server, one) for one in several]  # each is looked for
    return {"serves": all(serve)}


def learn_joined(server: BrokerView, name: str) -> None:
    """An agent has come, of a further worker of an environment that joins, and nobody has called that yet."""
    if server.launcher.joins(name):
        with suppress(LayerZeroError):
            _learn(server, name)


def _learn(server: BrokerView, name: str) -> bool:
    if name not in server.state.workers:
        found = server.launcher.learn(name)
        if found is None:
            raise _unknown(server, name)
        capability, missing, env = found
        server.handle(ev.BackendLearned(name, capability, missing, env, name in server.joined.names))
        policy = server.policy.set_known(Known.of(server.launcher.capabilities, OPS))
        server.handle(ev.PolicyChanged(policy))
        return missing is None
    renew(server, name)
    reason = server.state.unavailable_at(time.monotonic()).get(name)
    is_late = reason is not None and reason.code is Reason.NOT_INSTALLED and name not in server.joined.names
    if is_late and server.launcher.missing(name) is None:
        server.handle(ev.BackendReset(name, None))
        return True
    return reason is None


def renew(server: BrokerView, name: str) -> None:
    """Where the interpreter of this environment was built in another state since its worker has started, end that."""
    if server.launcher.is_renewed(name):
        server.state.engine.note_env(name, server.launcher.env_ids().get(name, ""))
        server.function_workers.renew(name)


def reserve(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """A worker of an environment of functions, for one object of the client with this `identity`: its name, and a
    token for `free`."""
    name, identity = params.get("backend"), params.get("identity")
    if not isinstance(name, str) or pools.environment_of(name) != name:
        raise _unknown(server, name)
    if not isinstance(identity, bytes) or identity not in server.state.clients:
        raise InvalidArgument("reserve needs `identity`: of a client that is there")
    backend, token = server.function_workers.reserve(name, identity)
    try:
        _learn(server, backend)
    except Exception:
        server.function_workers.free(backend, token)
        raise
    return {"backend": backend, "token": token}


def free(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """The object is gone that a worker was reserved for."""
    backend, token = params.get("backend"), params.get("token")
    if not isinstance(backend, str) or type(token) is not int:
        raise InvalidArgument("free needs `backend` and `token`, as `reserve` gave them")
    server.function_workers.free(backend, token)
    return {}


def _unknown(server: BrokerView, name: object) -> InvalidArgument:
    engine = server.state.engine
    return InvalidArgument(unknown_backend(name, engine.capabilities, engine.refused.get(str(name), "")))
