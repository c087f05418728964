"""Landlock: a process that runs a library keeps out of the memory of others, whoever's user it is.

A process in a domain may trace, and so read or change through /proc/PID/mem, process_vm_readv and pidfd_getfd, those of
its own domain and those below it alone: not the broker, no client, no other worker. From Linux 6.12 on it can signal no
others, either. Files are as open to it as before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

VARIABLE = "LAYERZERO_WORKER_CONFINED"
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, by these numbers everywhere
_WANTS_VERSION = 1
_PATH_BENEATH = 1
_REFER = 1 << 13  # moving files between folders, which every domain forbids that has no rule for it
_SIGNALS = 1 << 1
_PR_SET_NO_NEW_PRIVS = 38
_OLDEST, _WITH_NETWORK = 2, 4  # versions: rules for _REFER; the ruleset has a second word
WITH_SCOPES = 6  # and a third, for signals
_NUMBERS = {"0": False, "1": True}


def version() -> int:
    """Of this kernel's Landlock; 0 when it has none, has it switched off, or has one that could not be used."""
    found = int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, _WANTS_VERSION))
    return found if found >= _OLDEST else 0


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Raises ValueError for what is neither 0 nor 1."""
    text = environ.get(VARIABLE) or "1"
    if text not in _NUMBERS:
        raise ValueError(f"{VARIABLE}={text!r}; allowed: 0 or 1")
    return _NUMBERS[text]


def confine() -> None:
    """From here on this process, and all that it starts, is in a domain of its own, without a way back; it must
    not have other threads yet. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = version()
    if not found:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock")
    words = (_REFER, 0, _SIGNALS)[: 3 if found >= WITH_SCOPES else 2 if found >= _WITH_NETWORK else 1]
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            _checked(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", _REFER, root), 0))
        finally:
            os.close(root)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
