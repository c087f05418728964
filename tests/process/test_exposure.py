"""What others on the machine see of a broker and its workers: no secret, and no socket outside the runtime folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import Site

from layerzero.ipc.transport import secret


@pytest.fixture
def pids(new_site: Callable[..., Site], tmp_path: Path) -> list[int]:
    """Of a broker with a secret and of a worker that serves."""
    secret.create(tmp_path / "secret")
    site = new_site(secret_file=tmp_path / "secret").start()
    site.connect()
    site.wait_ready("alpha")
    assert site.broker_pid is not None
    return [site.broker_pid, *site.worker_pids()]


def test_secrets_are_in_no_argument_and_no_variable(pids: list[int], tmp_path: Path) -> None:
    """Arguments are for all users to see, variables for what a library starts and for crash reports."""
    text = (tmp_path / "secret").read_bytes().strip()
    assert len(pids) >= 2
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert text not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_no_socket_is_in_the_abstract_namespace(pids: list[int]) -> None:
    """There, no folder's permissions hold: any user could connect, or take the name first."""
    abstract = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("@"):
            abstract.add(f"socket:[{fields[6]}]")
    for pid in pids:
        links = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        assert any(link.startswith("socket:[") for link in links)
        assert not links & abstract
