"""A broker of one's own for a test: its folder, its environment, the processes it started, and how to end them all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import zmq
from tests.backends.toy import FEW
from tests.process import forks

import layerzero as lz
from layerzero.client.connection import arena, retained, start
from layerzero.ipc.transport import control, messages, wire

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "tests" / "backends"
PREFIX = f"lz{os.getpid()}-"  # of all our runtime folders: it tells this process's brokers from other test runs'
FIXED_PRIORITY = "weights: {perfdb: 0, reliability: 0}\n"  # else noise in times and past faults decide who serves
PATIENCE_S = 120.0  # far more than anything takes here, even on a machine with ten processes for each core
_never = threading.Event()


def wait_until(predicate: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Poll until `predicate()` is true; returns its value. All waiting without an event to wait for happens here. The
    longer it takes, the more rarely it is asked: predicates that call take cores from what they wait for."""
    start_s = time.monotonic()
    while not (value := predicate()):
        waited_s = time.monotonic() - start_s
        assert waited_s < timeout_s, f"not true within {timeout_s:g} s: {predicate}"
        _never.wait(min(max(0.002, waited_s / 20), 0.02))
    return value


def made_on(path: str, call: Callable[[], T]) -> T:
    """Make the call until its report has this path; the result of that."""
    results: list[T] = []

    def is_on() -> bool:
        results[:] = [call()]
        report = lz.last_report()
        return report is not None and report.path == path

    try:
        wait_until(is_on)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; its report: {lz.last_report()}") from None
    return results[0]


def in_threads(count: int, work: Callable[[], object]) -> None:
    """At once; raises what one of them raises."""
    with ThreadPoolExecutor(count) as threads:
        for one in [threads.submit(work) for _ in range(count)]:
            one.result()


def state_of(pid: int) -> str:
    """What the kernel calls it: S for one that waits, T for one that was stopped, Z for one that has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    """False for an ended process, also when nobody has reaped it."""
    try:
        return state_of(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_paused(pid: int) -> bool:
    """It has been stopped, or has stopped itself."""
    return state_of(pid) == "T"


def wait_ended(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Return when the process has ended, however it ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert control.is_readable(fd, timeout_s), f"process {pid} goes on"
    finally:
        os.close(fd)


def processes(folder: Path) -> dict[int, str]:
    """Pids and command lines of the running processes whose log or arguments lie in `folder`."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_ours = str(folder) in command or os.readlink(f"/proc/{pid}/fd/2").startswith(str(folder))
            if is_ours and pid != os.getpid() and is_running(pid):
                found[pid] = command
    return found


def open_files() -> Counter[str]:
    """What this process's descriptors are, arenas left out: the pool keeps empty ones."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(entry)] += 1
    return Counter({name: count for name, count in found.items() if not name.startswith("/memfd:layerzero")})


def arena_files() -> int:
    """How many arenas this process has open."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return names.count("/memfd:layerzero (deleted)")


def other_arenas() -> int:
    """Files of arenas that are not the pool's, as tests of units may have left."""
    of_pool = arena.pool.stats()["arenas"]  # first: it closes those that nobody needs
    return arena_files() - of_pool


def bare_client(site: Site, context: zmq.Context[Any]) -> tuple[socket.socket, zmq.Socket[bytes]]:
    """A welcomed client without any of our client code: its control socket and its DEALER."""
    sock = control.connect(site.endpoints.control, timeout_s=5)
    control.send(sock, messages.Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
    welcome, _ = control.receive(sock, messages.Welcome)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, welcome.identity)
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    dealer.connect(welcome.endpoint)
    return sock, dealer


class Site:
    """A runtime folder with at most one broker at a time. `settings` are broker settings by name."""

    live: list[Site] = []

    def __init__(self, store: Path, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.manifests = self.folder / "backends"
        self.environ = {
            "LAYERZERO_RUNTIME_DIR": str(self.folder),
            "LAYERZERO_STORE": str(store),
            "LAYERZERO_MANIFEST_DIRS": str(BACKENDS),
            "LAYERZERO_PERF_DB": str(self.folder / "perf.db"),  # no times of another test
            "XDG_CONFIG_HOME": str(self.folder),  # no settings of the user
            **{f"LAYERZERO_{name.upper()}": str(value) for name, value in settings.items()},
        }
        (self.folder / "layerzero").mkdir()
        self.set_policy()
        self.endpoints = start.endpoints(self.folder)
        self.live.append(self)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Our variables and no other LAYERZERO_ ones, for what is started meanwhile."""
        with mock.patch.dict(os.environ):
            for name in [n for n in os.environ if n.startswith("LAYERZERO_")]:
                del os.environ[name]
            os.environ.update(self.environ)
            yield

    def start(self) -> Site:
        """Start a broker that stays."""
        with self.environment(), mock.patch.object(start, "subprocess", forks):
            start.ensure_broker(self.endpoints, stays=True)
        return self

    def connect(self) -> lz.Session:
        with self.environment():
            return lz.connect(runtime_dir=self.folder)

    def python(self, code: str, **pipes: Any) -> subprocess.Popen[str]:
        """Run code in another Python that finds this broker. Its stdout is piped."""
        with self.environment():
            return subprocess.Popen(
                [sys.executable, "-c", f"import layerzero as lz\n{code}", str(self.folder)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
                **pipes,
            )

    # --- looking

    @property
    def broker_pid(self) -> int | None:
        return start.broker_pid(self.endpoints)

    def backend(self, name: str) -> dict[str, Any]:
        """Its entry of lz.status()."""
        return next(b for b in lz.status()["backends"] if b["name"] == name)

    def wait_ready(self, *names: str) -> list[int]:
        """Return the workers' pids when all of them can take calls; asks for those that are not needed yet."""
        absent = [name for name in names if self.backend(name)["state"] == "absent"]
        for call in [lz.submit("null", backend=name) for name in absent]:
            call.result()
        wait_until(lambda: all(self.backend(name)["state"] == "ready" for name in names))
        return [self.backend(name)["pid"] for name in names]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Lines of the broker's log with this event."""
        lines = [json.loads(line) for line in self.endpoints.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def worker_pids(self) -> list[int]:
        return [pid for pid, command in processes(self.folder).items() if "layerzero.workers" in command]

    def set_policy(self, text: str = "") -> None:
        """Write the policy file, beside what every site has in it; a broker looks at it within a second."""
        (self.folder / "layerzero" / "policy.yaml").write_text(FIXED_PRIORITY + text)

    def use_store(self, folder: Path) -> None:
        """A store of its own, which has nothing but the verdicts of probes so far: no backend is probed again."""
        probes = Path(self.environ["LAYERZERO_STORE"]) / "probes"
        if probes.is_dir():
            shutil.copytree(probes, folder / "probes")
        self.environ["LAYERZERO_STORE"] = str(folder)

    # --- faults

    def add_backend(
        self,
        name: str,
        *,
        priority: int = 70,
        ndim: int | None = None,
        provider: str = "",
        twice: str = "",
        env: Mapping[str, str] | None = None,
        **claims: object,
    ) -> None:
        """Before the start: one more toy backend, or as BACKEND@VERSION a version of one. `ndim`: it takes arrays of so
        many dimensions only. `provider`:
        Python source instead of the toy's. `twice`: an op with a second kernel, NAME.OP.again, of a lower
        priority. `env`: more variables of its worker. `claims`: more fields of its silu
        kernel."""
        self.manifests.mkdir(exist_ok=True)
        # What is given may be the toy with other lines in its silu of arrays.
        source = provider.replace(f"\nFEW = {FEW} ", "\nFEW = -1 ") or (BACKENDS / "toy.py").read_text()
        (self.manifests / f"{name}.py").write_text(source)
        kernel: dict[str, Any] = {"source": "test", "priority": priority, "deterministic": True}
        silu = {**kernel, "kernel_id": f"{name}.silu", "dtypes": ["float32"], **claims}
        if ndim is not None:
            silu |= {"min_ndim": ndim, "max_ndim": ndim}
        descriptor: dict[str, Any] = {
            "schema_version": "1.0",
            "backend": name,
            "backend_version": "1",
            "platform": "cpu",
            "ops": {"silu": [silu], "null": [{**kernel, "kernel_id": f"{name}.null", "priority": 0}]},
        }
        if twice:
            [first] = descriptor["ops"][twice]
            descriptor["ops"][twice].append({**first, "kernel_id": f"{name}.{twice}.again", "priority": priority - 1})
        (self.manifests / f"{name}.json").write_text(json.dumps(descriptor))
        manifest = f'summary = "test"\nprovider = "{name}.py"\ndescriptor = "{name}.json"\ninterpreter = "host"\n'
        manifest += f'version_of = "{name.partition("@")[0]}"\n' if "@" in name else ""
        variables = "".join(f'{key} = "{value}"\n' for key, value in {"LZ_TOY_NAME": name, **(env or {})}.items())
        (self.manifests / f"{name}.toml").write_text(f"{manifest}[env]\n{variables}")
        self.environ["LAYERZERO_MANIFEST_DIRS"] = f"{BACKENDS}:{self.manifests}"

    def stop(self) -> None:
        """End the broker if it runs; nothing of it may be left."""
        self.live.remove(self)
        pid = self.broker_pid
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
            wait_ended(pid)
        wait_until(lambda: not processes(self.folder))
        retained._quarantine.clear()  # the processes that could have written there are gone
        if pid is not None:
            assert [path.name for path in self.folder.iterdir() if path.is_socket()] == []
        shutil.rmtree(self.folder)
