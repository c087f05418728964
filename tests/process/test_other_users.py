"""Several users of one broker (`--allow-uid`): each has a broker, and so workers, of his own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.harness import Site, is_running, processes, wait_ended, wait_until
from tests.process.join_site import Agent

import layerzero as lz
from layerzero.ipc.transport import secret

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root: processes of another user")

USERS = (65533, 65534)
PROGRAM = """
import importlib, json, os, pkgutil, sys
import numpy as np
import layerzero.client, layerzero.ipc
for package in (layerzero.client, layerzero.ipc):  # files that the other user may not read, maybe
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".client.cli" not in module.name:
            importlib.import_module(module.name)
os.setuid(int(os.environ["TEST_UID"]))
def tell(**facts):
    print(json.dumps(facts), flush=True)
def look():
    x = np.linspace(-3, 3, 8, dtype=np.float32)
    y = lz.silu(x)
    status = lz.status()
    report = lz.last_report()
    return dict(
        broker=status["broker"]["pid"],
        worker=next(b["pid"] for b in status["backends"] if b["name"] == report.backend),
        clients=len(status["clients"]),
        users=status["users"],
        error=float(np.abs(y - x / (1 + np.exp(-x.astype(np.float64)))).max()),
    )
for line in sys.stdin:
    try:
        lz.connect(runtime_dir=sys.argv[1], secret_file=os.environ["TEST_SECRET"], start=False)
        tell(**look())
    except lz.LayerZeroError as exc:
        tell(code=exc.code, message=exc.message)
"""


class User:
    """A program of another user, which calls when it is told to."""

    def __init__(self, site: Site, uid: int, key: Path) -> None:
        own = site.folder / f"secret-{uid}"
        shutil.copyfile(key, own)
        own.chmod(0o600)
        os.chown(own, uid, uid)
        site.environ |= {"TEST_UID": str(uid), "TEST_SECRET": str(own)}
        self.program = site.python(PROGRAM, stdin=subprocess.PIPE)

    def call(self) -> dict[str, Any]:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        found: dict[str, Any] = json.loads(self.program.stdout.readline())
        return found

    def leave(self) -> None:
        self.program.communicate(timeout=60)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    secret.create(tmp_path / "secret")
    return tmp_path / "secret"


@pytest.fixture
def shared(new_site: Callable[..., Site], key: Path) -> Site:
    site = new_site(secret_file=key, allow_uids=",".join(map(str, USERS)))
    site.folder.chmod(0o711)
    return site.start()


@pytest.fixture
def users(shared: Site, key: Path) -> Iterator[list[User]]:
    found = [User(shared, uid, key) for uid in USERS]
    yield found
    for user in found:
        user.leave()


def owner_status(site: Site, key: Path) -> dict[str, Any]:
    lz.connect(runtime_dir=site.folder, secret_file=key)
    return lz.status()


def test_each_user_has_a_broker_and_workers_of_his_own(shared: Site, key: Path, users: list[User]) -> None:
    first, second = (user.call() for user in users)
    status = owner_status(shared, key)
    lz.silu(np.ones(8, np.float32))
    report = lz.last_report()
    assert report is not None
    own_worker = shared.backend(report.backend)["pid"]
    assert len({first["broker"], second["broker"], status["broker"]["pid"]}) == 3
    assert len({first["worker"], second["worker"], own_worker}) == 3
    assert first["error"] < 1e-6 > second["error"]
    assert first["clients"] == second["clients"] == 1
    assert first["users"] == second["users"] == []
    assert {user["uid"]: user["pid"] for user in status["users"]} == {
        USERS[0]: first["broker"],
        USERS[1]: second["broker"],
    }


def test_a_users_broker_is_found_again(shared: Site, users: list[User]) -> None:
    before = users[0].call()
    users[0].leave()
    again = User(shared, USERS[0], Path(shared.environ["LAYERZERO_SECRET_FILE"]))
    users[0] = again
    assert again.call()["broker"] == before["broker"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_users_brokers_end_with_the_one_that_started_them(shared: Site, users: list[User], how: signal.Signals) -> None:
    found = users[0].call()
    assert shared.broker_pid is not None
    os.kill(shared.broker_pid, how)
    wait_ended(found["broker"])
    wait_ended(found["worker"])
    wait_until(lambda: not processes(shared.folder / f"user-{USERS[0]}"))


def test_a_users_broker_that_is_killed_costs_nobody_else_anything(shared: Site, users: list[User]) -> None:
    first, second = (user.call() for user in users)
    os.kill(first["broker"], signal.SIGKILL)
    wait_ended(first["broker"])
    wait_ended(first["worker"])
    anew = users[0].call()
    assert anew["broker"] != first["broker"]
    assert anew["error"] < 1e-6
    assert users[1].call()["worker"] == second["worker"]
    assert is_running(second["broker"])


def test_a_users_broker_that_cannot_start_says_why(shared: Site, users: list[User]) -> None:
    (shared.folder / f"user-{USERS[0]}").symlink_to("/tmp")
    refused = users[0].call()
    assert refused["code"] == "CONFIG"
    assert refused["message"].startswith("remove ")
    assert users[1].call()["error"] < 1e-6


def test_workers_that_register_themselves_serve_all_users(new_site: Callable[..., Site], key: Path) -> None:
    """Who runs them decides what they may see."""
    site = new_site(secret_file=key, allow_uids=",".join(map(str, USERS)), joined="alpha")
    site.folder.chmod(0o711)
    site.start()
    agent = Agent(site, "alpha", secret_file=key)
    users = [User(site, uid, key) for uid in USERS]
    try:
        owner_status(site, key)
        wait_until(lambda: site.backend("alpha")["state"] == "ready")
        first, second = (user.call() for user in users)
        assert first["broker"] == second["broker"] == site.broker_pid
    finally:
        for user in users:
            user.leave()
        agent.end()
