"""lz.connect and lz.disconnect: the session that calls use."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from layerzero.client.connection import arena, node, overlay
from layerzero.client.connection import start as starting
from layerzero.client.session import settings_check
from layerzero.client.session.checked import CheckedSession
from layerzero.client.session.session import Session
from layerzero.ipc.errors import BrokerLost, InvalidArgument, NotConnected
from layerzero.ipc.version import __version__

_session: Session | None = None
_arguments: dict[str, Any] = {}  # of the last connect()
_lock = threading.Lock()
ENDING_POLL_S = 0.1


def connect(
    *,
    runtime_dir: str | os.PathLike[str] | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    start: bool | None = None,
    cluster: str | None = None,
) -> Session:
    """Connect this process to the user's broker, starting one if none runs.

    A broker started here ends with its last client; `lz up` starts one that stays. Calling again returns the same
    session while its broker lives, and a new one after it was lost. All threads share the session; a forked child
    connects anew at its first call.
    runtime_dir: folder of the broker's sockets; default: in Ray's tasks and actors that of the node's broker, where
    lz cluster up has started one, else LAYERZERO_RUNTIME_DIR or the platform's runtime folder.
    secret_file: the secret of a broker that asks for one (lz keys secret); default LAYERZERO_SECRET_FILE.
    start: whether to start a broker where none runs, in place of waiting for one; default: unless there is a secret
    file, for then the broker is another container's, or a node's agent, which starts it.
    cluster: "ray": the backends of the cluster's other nodes are candidates, too, with a price (docs/cluster.md).
    Raises BrokerLost when no broker can be started, VersionMismatch when one of another version runs.
    """
    global _session, _arguments
    made = _class_of(cluster)
    key = starting.secret_key(None if secret_file is None else Path(secret_file))
    folder = node.broker_folder(starting.runtime_dir()) if runtime_dir is None else Path(runtime_dir)
    where = starting.endpoints(folder, is_shared=key is not None)
    starts = key is None and not node.has_agent(where.folder) if start is None else start
    with _lock:
        _arguments = {"runtime_dir": runtime_dir, "secret_file": secret_file, "start": start, "cluster": cluster}
        if _session is not None:
            if _session.is_alive and _session.path == where.control and type(_session) is made:
                return _session
            _session.close()
            _session = None
        deadline_s = time.monotonic() + starting.START_TIMEOUT_S
        while True:
            is_ours = starts and starting.ensure_broker(where, stays=False)
            overlay.set_environment(starting.policy_layers())
            try:
                _session = made(where.control, __version__, key)
                break
            except TimeoutError as exc:
                raise BrokerLost(f"the broker on {where.control} does not answer; end it with lz down") from exc
            except (FileNotFoundError, ConnectionRefusedError, BrokerLost) as exc:
                if time.monotonic() > deadline_s:
                    why = f"no broker answers on {where.control}: {exc}"
                    if node.has_agent(where.folder):
                        why = f"lz cluster status says what became of this node's broker: {why}"
                    raise BrokerLost(why) from exc
                if starts:  # the last client left just now, and the broker with it
                    starting.wait_for_end(where, ENDING_POLL_S)
                else:
                    time.sleep(ENDING_POLL_S)
        settings_check.warn_of_variables()
        if not is_ours and key is None:  # one that has a secret is started with settings of its own, elsewhere maybe
            settings_check.warn_of_broker(_session)
        return _session


def _class_of(cluster: str | None) -> type[Session]:
    """Of the session that is asked for; this process is part of the cluster then."""
    checks = bool(arena.pool.band_bytes)
    if cluster is None:
        return CheckedSession if checks else Session
    if cluster != "ray":
        raise InvalidArgument(f"cluster is {cluster!r:.40}; allowed: None, 'ray'")
    if checks:
        raise InvalidArgument(
            "unset LAYERZERO_DEBUG, or connect without cluster=: calls of other nodes are not checked"
        )
    from layerzero.cluster import ray_link
    from layerzero.cluster.calls.session import ClusterSession

    ray_link.attach()
    return ClusterSession


def ensure_connected() -> Session:
    """The session of lz.connect(), wherever that led; a new one there where its broker was lost, and of the user's
    broker where nobody has connected. For integrations, which must not move a program to another broker."""
    current = _session
    return current if current is not None and current.is_alive else connect(**_arguments)


def disconnect() -> None:
    """Close the session. A broker that lz.connect() started ends when its last client has left."""
    global _session, _arguments
    with _lock:
        _arguments = {}
        if _session is not None:
            _session.close()
            _session = None


def session() -> Session:
    """The session of lz.connect(). Raises NotConnected."""
    current = _session
    if current is None:
        raise NotConnected("not connected; call lz.connect() first")
    return current
