"""The agent as Ray runs it: an actor of one node. Its methods take and give bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerzero.client.connection import node as nodes
from layerzero.client.connection import start
from layerzero.cluster.agent import handing_out, served
from layerzero.cluster.agent.supervision import NodeBroker
from layerzero.ipc.cuda.usage import GpuUsage
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.version import __version__

ASK_S = 5.0  # so long the broker may take to answer the agent
SEEN_S = 2.0  # and to whoever looks again and again
# Ray sets these in its workers by what an actor asks for, which is nothing: the broker's workers are not Ray's.
_OF_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class NodeAgent:
    """Of one node. Threads call it: questions are answered while calls run."""

    def __init__(self, node: bytes) -> None:
        self._node = node.decode()
        _as_the_node_has_it(os.environ, os.getppid())
        self._broker = NodeBroker(nodes.folder_of(self._node, start.runtime_dir()))
        self._files = handing_out.Received()
        self._usage = GpuUsage()
        self._methods: dict[str, Callable[..., Any]] = {
            "state": self._state,
            "seen": self._seen,
            "stop": self._stop,
            "explain": self._explain,
        }

    def answer(self, question: bytes) -> bytes:
        """The answer to a method and its params, or the error."""
        try:
            method, params = unpack_body(question)
            function = self._methods.get(method)
            if function is None:
                raise InvalidArgument(f"an agent has no method {method!r:.40}; it is layerzero {__version__}")
            return pack_body({"value": function(**params)})
        except LayerZeroError as exc:
            return pack_body({"error": exc.to_wire()})

    def _state(self, within_s: float = ASK_S) -> dict[str, Any]:
        """What `lz cluster status` shows of this node."""
        state = {
            "node": self._node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "package": __version__,
            "runtime_dir": str(self._broker.where.folder),
            "restarts": self._broker.restarts,
            "problem": self._broker.problem,
            "broker": None,
        }
        try:
            state["broker"] = self._broker.session(within_s).ask("status", within_s=within_s)
        except LayerZeroError as exc:
            state["problem"] = state["problem"] or exc.message
        return state

    def _seen(self) -> dict[str, Any]:
        """The state, what the broker has counted, and its workers' part of GPUs' memory: for metrics and the page."""
        seen = {**self._state(SEEN_S), "metrics": None, "gpu_bytes": {}}
        if seen["broker"] is not None:
            try:
                metrics = self._broker.session(SEEN_S).ask("metrics", within_s=SEEN_S)
            except LayerZeroError as exc:
                return {**seen, "problem": seen["problem"] or exc.message}
            seen.update(metrics=metrics, gpu_bytes=self._usage.of(metrics["pids"]))
        return seen

    def call(self, head: bytes, *memory: bytes) -> list[bytes]:
        """A call of another node (served.py)."""
        try:
            session = self._broker.session(ASK_S)
        except LayerZeroError as exc:
            return served.failed(head, exc)
        return served.serve(session, head, memory)

    def receive(self, head: bytes, data: bytes) -> bytes:
        """A piece of an environment (handing_out.py)."""
        return handing_out.receive(self._files, head, data, self._broker.where.folder)

    def echo(self, data: bytes) -> bytes:
        """For whoever measures the way."""
        return data

    def _explain(self, route: bytes) -> Any:
        """As the broker's `explain`."""
        return self._broker.session(ASK_S).ask("explain", within_s=ASK_S, route=route)

    def _stop(self) -> None:
        """End the broker. Ray ends the actor after that."""
        self._broker.stop()


def _as_the_node_has_it(environ: Any, raylet: int) -> None:
    """Variables that Ray has set for this actor become what the node's own processes have."""
    own = _environment(raylet)
    for name in _OF_RAY:
        if name in own:
            environ[name] = own[name]
        else:
            environ.pop(name, None)


def _environment(pid: int) -> Mapping[str, str]:
    """A process's variables as it was started; none where they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (line.decode(errors="replace").partition("=") for line in lines if line)
    return {name: value for name, _, value in pairs}
