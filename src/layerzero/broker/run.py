"""From settings to a running broker: the lock that makes it the only one, its parts, the loop."""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time

import msgpack

from layerzero.broker.configuration import settings as knobs
from layerzero.broker.configuration.policy_source import PolicySource
from layerzero.broker.io import fd_reserve
from layerzero.broker.io.authentication import Authentication
from layerzero.broker.processes import imported
from layerzero.broker.processes.cuda_driver import detect_gpus
from layerzero.broker.processes.host import detect_cpu
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.recording.recorder import RecordedState, Recorder
from layerzero.broker.recording.start import Start
from layerzero.broker.selection.policy_values import Known
from layerzero.broker.server import Server
from layerzero.envs import accelerators
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.logs import keep_in, log
from layerzero.ipc.transport.endpoints import open_endpoints
from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary.ops import OPS


def run(
    *,
    runtime_dir: str | None,
    stays: bool,
    ready_fd: int | None,
    owns_log: bool = False,
    for_uid: int | None = None,
) -> int:
    """Run one broker until it ends. `for_uid`: for this user, in the name of the broker that has started us
    (processes/user_brokers.py). Returns the exit code: 1 when another one holds the lock, or settings or policy are
    wrong."""
    try:
        settings = knobs.load(runtime_dir=runtime_dir)
        if for_uid is not None:  # questions over tcp are for the broker that others know
            kept = settings.rollout_file.with_suffix(f".{for_uid}.json")
            off = {"remote": "", "metrics": "", "history": False, "record": None}
            own = {"allow_uids": str(for_uid), "rollouts": kept, **off}
            settings = settings.model_copy(update=own)
        gate = Authentication.of(settings)
        endpoints = open_endpoints(settings.runtime_dir, is_shared=gate.is_shared)
    except LayerZeroError as exc:
        return _refuse(exc, ready_fd)
    lock_fd = os.open(endpoints.broker_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _lock(lock_fd):
        pid = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        print(
            f"error: a broker runs already: pid {pid}, socket {endpoints.control}; end it with lz down", file=sys.stderr
        )
        return 1
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
    for stale in (*endpoints.folder.glob("client-*"), *endpoints.folder.glob("worker-*")):
        if stale.is_socket():  # of a broker that was killed
            stale.unlink(missing_ok=True)
    fd_reserve.raise_limit()
    if owns_log:  # a daemon's stderr is the log; one in the foreground writes to a terminal
        keep_in(endpoints.log)
    gpus = detect_gpus()
    try:
        launcher = Launcher(settings, gpus, accelerators.detect())
        policy = _policy(settings, launcher)
    except LayerZeroError as exc:
        return _refuse(exc, ready_fd)
    start = Start(
        seed=random.SystemRandom().getrandbits(63),
        limits=settings.limits(),
        capabilities=launcher.capabilities,
        refused={name: error.message for name, error in launcher.refused.items()},
        envs=launcher.env_ids(),
        device=detect_cpu(),
        gpus=tuple(gpus.devices),
        no_gpus=gpus.reason,
        policy=policy.policy,
        unusable=launcher.unusable,
        joined=tuple(sorted(launcher.joined)),
        records=launcher.records(),
        times=tuple(imported.times(launcher.imported, gpus, time.monotonic())),
        compiled={name: tuple(units) for name, units in launcher.compiled().items()},
        lifted=tuple(sorted(launcher.imported)),
        profile=launcher.profile,
    )
    recorder = None
    try:
        if settings.record is not None:
            recorder = Recorder(settings.record.absolute(), settings.record_mib << 20)
    except LayerZeroError as exc:
        return _refuse(exc, ready_fd)
    state = start.state() if recorder is None else RecordedState(recorder, start)
    try:
        parts_users = gate.is_shared and for_uid is None and not settings.joined.strip()
        server = Server(settings, endpoints, state, launcher, policy, gate, stays=stays, parts_users=parts_users)
    except LayerZeroError as exc:
        return _refuse(exc, ready_fd)
    for problem in launcher.problems:
        log("backend.unusable", detail=problem)

    def started() -> None:
        log("broker.started", pid=os.getpid(), package=__version__, backends=sorted(launcher.capabilities))
        if ready_fd is not None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)

    server.run(started)
    if recorder is not None:
        recorder.close()
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, b"ended", 0)  # a watchdog starts no other
    log("broker.ended", pid=os.getpid())
    return 0


def _refuse(error: LayerZeroError, ready_fd: int | None) -> int:
    """Say why no broker starts, to the log and to the client that waits for it. Returns the exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if ready_fd is not None:
        os.write(ready_fd, msgpack.packb(error.to_wire()))
    return 1


def _policy(settings: knobs.Settings, launcher: Launcher) -> PolicySource:
    file, is_optional = settings.policy_file()
    known = Known.of(launcher.capabilities, OPS)
    return PolicySource(
        file,
        is_optional=is_optional,
        variables=settings.policy_variables(),
        known=known,
        record=settings.source_record(),
    )


def _lock(fd: int) -> bool:
    """Take the broker's lock; False when another broker has it. Those who only ask for its pid hold it for a moment."""
    for _ in range(50):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False
