"""client/capsules/kernel_log.py: lines that name a process, of a device that gives one record a read."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.client.capsules import kernel_log

RECORDS = (
    b"6,1,100,-;python[4711]: segfault at 0 ip 0 sp 0 error 4\n SUBSYSTEM=x\n",
    b"3,2,101,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n",
    b"3,3,102,-;NVRM: Xid (PCI:0000:01:00): 31, pid=4711, name=python, MMU Fault\x1b[31m\n",
    b"6,4,103,-;python[47110]: segfault at 0\n",
    b"6,5,104,-;eth0: link 4711 is up\n",
)


def test_lines_of_a_process_are_found_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, left = tmp_path / "kmsg", list(RECORDS)
    device.touch()

    def read(_: int, __: int) -> bytes:
        if not left:
            raise BlockingIOError
        return left.pop(0)

    monkeypatch.setattr(kernel_log.os, "read", read)
    assert kernel_log.lines_of({4711, 0}, device) == [
        "python[4711]: segfault at 0 ip 0 sp 0 error 4",
        "Out of memory: Killed process 4711 (python) total-vm:1kB",
        "NVRM: Xid (PCI:0000:01:00): 31, pid=4711, name=python, MMU Fault?[31m",
    ]


def test_who_may_not_read_it_is_told(tmp_path: Path) -> None:
    assert kernel_log.lines_of({1}, tmp_path / "none") == "not known: No such file or directory"
    assert kernel_log.lines_of({0}, tmp_path / "none") == []
