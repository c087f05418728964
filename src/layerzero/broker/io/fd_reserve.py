"""The file descriptors of this process: how many are left, and how many newcomers may not have.

libzmq ends the process when it cannot accept a connection for lack of one. So newcomers are turned away before that.
"""

from __future__ import annotations

import os
import resource

MOST = 1 << 16  # more connections than that are a matter of memory, which nothing else bounds
_LEAST_RESERVE, _MOST_RESERVE = 128, 4096
_OWN = "/proc/self/fd"
_inherited: list[int] = []  # the soft limit that we came with


def raise_limit() -> None:
    """Take as many as the hard limit allows, up to MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _inherited.append(soft)


def hand_down(pid: int) -> None:
    """Give a child the soft limit that we came with: libraries may use select(), which knows none above 1023."""
    if _inherited:
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_inherited[0], hard))
        except (OSError, ValueError):
            return  # it has ended, or lowered its hard limit itself


def limit() -> int:
    """How many this process may have, as of now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def free() -> int:
    """How many it can still open."""
    used = os.stat(_OWN).st_size or len(os.listdir(_OWN))  # Linux before 6.2 does not count them
    return limit() - used


def reserve() -> int:
    """So many are not for new clients: those who are there open some, and ZeroMQ accepts connections on its own until
    it is told not to."""
    least = min(_LEAST_RESERVE, limit() // 2)
    return min(max(limit() // 4, least), _MOST_RESERVE)


def for_workers() -> int:
    """As `reserve`, for new workers, which those clients need who are there."""
    return reserve() // 2


def per_client() -> int:
    """How many of a client's arenas may be open here."""
    return max(limit() - reserve(), 0) // 2


def shortage(kept: int) -> str:
    """Why nobody new gets any when `kept` are not for them, or ""."""
    left = free()
    if left >= kept:
        return ""
    return f"the broker has {left} of {limit()} file descriptors left; raise its limit (ulimit -n), or end some clients"
