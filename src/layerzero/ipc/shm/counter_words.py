"""What is counted of calls that pass the broker by, and how: the words of a page of counters, without the page."""

from __future__ import annotations

from typing import NamedTuple

PATHS = ("broker", "express", "ring", "lifted", "in_process", "graph")
"""How a call that a row is of was made; of `broker` rows nothing is counted that the broker sees itself."""

CODES = (
    "OTHER",
    "INVALID_ARGUMENT",
    "NOT_CONNECTED",
    "NO_BACKEND",
    "BACKEND_ERROR",
    "DEADLINE",
    "UNREACHABLE",
    "POISON",
    "OUTPUT_TOO_SMALL",
    "DIGEST_REQUIRED",
    "ADAPTATION_REQUIRED",
    "RUN_IN_PROCESS",
    "BUSY",
    "CANCELLED",
    "BROKER_LOST",
    "VERSION_MISMATCH",
    "BAD_MESSAGE",
    "NOT_ALLOWED",
    "ENV_BROKEN",
    "ENV_CHANGED",
    "NO_MEMORY",
    "CUDA",
    "CUDA_GRAPH_UNSAFE",
    "NO_TRANSPORT",
    "REMOTE_EXCEPTION",
    "CONFIG",
    "GROUP_BROKEN",
    "RANKS_DISAGREE",
)
"""What a word of errors or of fallbacks is of, by its place: codes of ipc/errors.py. It only grows at its end."""

BUCKETS = 26  # how long calls took: at most 2**n us, and in the last one longer
MAX_CODES = 32


class Label(NamedTuple):
    """What the calls of a row have in common. `path`: one of PATHS."""

    op: str
    kernel_id: str
    path: str


class Growth(NamedTuple):
    """What a row has grown by since it was read last: calls that ended well by how long they took (BUCKETS of them),
    their ns in all, bytes copied for them; errors and fallbacks by code."""

    label: Label
    buckets: list[int]
    sum_ns: int
    copied_bytes: int
    errors: dict[str, int]
    fallbacks: dict[str, int]


REST = Label("", "", "")
"""Of the last row: calls of which there was no row to be had any more."""


def bucket_of(ns: int) -> int:
    """Which of the BUCKETS a call of so many ns is in."""
    return min(max((ns + 999) // 1000 - 1, 0).bit_length(), BUCKETS - 1)
