"""Whether a process is ending, of real ones. One that is long in it: tests/process/test_groups.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from layerzero.groups.ending import is_ending

ALONE = """
import ctypes, os, threading
threading.Thread(target=lambda: (print("there", flush=True), input())).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_one_that_runs_or_was_stopped_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_ending(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_ending(child.pid)
    child.kill()
    child.communicate()


def test_one_that_has_ended_is_until_somebody_asks_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(child.pid)
    child.wait()
    assert not is_ending(child.pid)  # nobody has that number now


def test_one_whose_first_thread_has_ended_alone_is_not() -> None:
    """Others of it run the program."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", ALONE], **pipes)
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    with open(f"/proc/{child.pid}/stat") as stat:
        while stat.read().rpartition(")")[2].split()[0] != "Z":  # of the first thread
            stat.seek(0)
    assert not is_ending(child.pid)
    child.kill()
    child.communicate()
