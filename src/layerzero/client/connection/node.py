"""The broker of the node that this process is on, in a cluster whose nodes have an agent each (docs/cluster.md)."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_NODE_CHARS = 12  # of a node's id: as many as tell nodes apart, and leave room for the names of sockets


def short(node: str) -> str:
    """A node's id as people read it, and as its folder is called."""
    return node[:MAX_NODE_CHARS]


def folder_of(node: str, base: Path) -> Path:
    """The runtime folder of a node's broker, of its own where several nodes are on one machine."""
    return base / f"node-{short(node)}"


def lock_of(folder: Path) -> Path:
    """Locked by the agent as long as it lives; there until it is told to end."""
    return folder / "agent.lock"


def has_agent(folder: Path) -> bool:
    """Whether an agent starts the broker of this folder, so that nobody else does."""
    return lock_of(folder).exists()


def here() -> str | None:
    """The id of the node that Ray has this process on; None where it is no part of a cluster. Does not import Ray."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # one that is just being imported lacks it
    if ray is None or is_initialized is None or not is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())


def broker_folder(base: Path) -> Path | None:
    """The runtime folder of this node's broker; None where its node has no agent."""
    node = here()
    if node is None:
        return None
    folder = folder_of(node, base)
    return folder if has_agent(folder) else None
