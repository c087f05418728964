"""One attempt: resolve, install aside, look who owns which file, import and compute in both orders, remove it all.

Every library runs in a throw-away process. What came of it is kept under a key of the lock and of all that takes part,
so that only what has changed is tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerzero.envs.build import interpreters, store
from layerzero.envs.build.environ import worker_environ
from layerzero.envs.build.installers import Runner, ToolFailed, Uv
from layerzero.envs.build.interpreters import Python
from layerzero.envs.matrix import bytecode, kept
from layerzero.envs.matrix.owners import Shared, modules, shared_files
from layerzero.envs.matrix.resolver import Refused, Resolved, resolve
from layerzero.envs.matrix.subjects import FOLDER, Subject
from layerzero.envs.matrix.verdict import Kind, Verdict, judge
from layerzero.envs.probe.child import Ended, kill_group, run_process
from layerzero.ipc import files
from layerzero.ipc.errors import EnvError

VERSION = 2  # of what is kept; raise it when a trial says more or something else
RUNNER = FOLDER / "runner.py"
_STDERR_TAIL = 3000
_STANDARD_LIBRARY = re.compile(r'(?<=")[^"\n]*(?=/lib/python3\.\d+/(?!site-packages))')
_MANY = 8  # files named in evidence


class Stopped(Exception):
    """The run was given up; nothing of it is kept."""


@dataclass
class Lab:
    """Where trials happen. Use as a context manager: its folder and processes are gone afterwards. `stop` may be called
    from any thread, and by a signal handler."""

    store: Path
    tool: Uv
    timeout_s: float
    is_fresh: bool = False  # ask nothing that is kept
    folder: Path = Path()
    _lock_fd: int = -1
    _pids: set[int] = field(default_factory=set)
    _tools: list[subprocess.Popen[str]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _count: int = 0
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Lab:
        work = kept.work(self.store.absolute())
        work.mkdir(parents=True, exist_ok=True)
        kept.collect_work(work)
        self.folder = work / f"{os.getpid()}-{threading.get_ident()}"
        self._lock_fd = store.open_lock(self.folder)
        self.folder.mkdir()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        store.lock_path(self.folder).unlink(missing_ok=True)
        os.close(self._lock_fd)

    def stop(self) -> None:
        """End all processes; trials under way raise Stopped."""
        self._stopped.set()
        for pid in list(self._pids):
            kill_group(pid)
        for tool in list(self._tools):
            tool.kill()

    def _note_tool(self, process: subprocess.Popen[str]) -> None:
        """Of an installer, which may be at it for minutes."""
        self._tools.append(process)
        if self._stopped.is_set():  # between the last check and now
            process.kill()

    def check(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    @contextlib.contextmanager
    def environment(self, resolved: Resolved, python: Python) -> Iterator[Path]:
        """A venv with what the lock lists, removed afterwards. Raises ToolFailed."""
        with self._mutex:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        try:
            lock = folder.with_suffix(".txt")
            lock.write_text(resolved.text, encoding="utf-8")
            run = Runner(self.folder, self._lock_fd, on_start=self._note_tool)
            self.tool.create(folder, python.path, run)
            self.check()
            self.tool.install(folder, lock, run)
            self.check()
            site, shelf = site_packages(folder), self.folder / "bytecode"
            bytecode.restore(site, resolved.versions, shelf)
            yield folder
            bytecode.keep(site, resolved.versions, shelf)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, argv: Sequence[str], environ: Mapping[str, str], data: bytes = b"") -> Ended:
        self.check()
        started: list[int] = []

        def on_start(pid: int) -> None:
            started.append(pid)
            self._pids.add(pid)
            if self._stopped.is_set():  # between the check above and now
                kill_group(pid)

        try:
            ended = run_process(argv, environ=environ, timeout_s=self.timeout_s, data=data, on_start=on_start)
        finally:
            self._pids.difference_update(started)
        self.check()
        return ended


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def attempt(lab: Lab, subjects: Sequence[Subject], *, with_care: bool) -> Verdict:
    """Let the subjects share one environment; `with_care`, with what each needs beyond its metadata."""
    lab.check()
    pythons = {subject.python for subject in subjects}
    if len(pythons) > 1:
        return Verdict(Kind.PYTHON, "; ".join(f"{one.name} needs Python {one.python}" for one in subjects))
    python = interpreters.find(pythons.pop(), subjects[0].name)
    requirements = [text for one in subjects for text in (*one.requirements, *(one.needs if with_care else ()))]
    resolved = resolve(lab.tool, requirements, python)
    if isinstance(resolved, Refused):
        return Verdict(Kind.RESOLVER, resolved.summary, evidence=resolved.message)
    settings = {name: value for one in subjects for name, value in one.env.items()} if with_care else {}
    if any(settings[name] != value for one in subjects for name, value in one.env.items() if name in settings):
        return Verdict(Kind.ERROR, "their settings contradict each other: " + ", ".join(sorted(settings)))
    cell = kept.cells(lab.store.absolute()) / f"{_key(subjects, resolved, python, settings)}.json"
    if not lab.is_fresh and (known := _read(cell)) is not None:
        return known
    start = time.monotonic()
    verdict = replace(
        _try(lab, subjects, resolved, python, settings),
        versions=resolved.versions,
        lock_hash=hashlib.sha256(resolved.text.encode()).hexdigest(),
        seconds=round(time.monotonic() - start, 2),
    )
    if not verdict.is_lasting:
        return verdict
    cell.parent.mkdir(parents=True, exist_ok=True)
    files.put(cell, json.dumps(verdict.to_json()))
    return verdict


def _try(
    lab: Lab, subjects: Sequence[Subject], resolved: Resolved, python: Python, settings: Mapping[str, str]
) -> Verdict:
    try:
        with lab.environment(resolved, python) as folder:
            site = site_packages(folder)
            places = {"{store}": str(folder), "{cache}": str(folder / "cache"), "{site}": str(site)}
            return _use(lab, subjects, folder, site, {key: _fill(text, places) for key, text in settings.items()})
    except ToolFailed as exc:
        lab.check()  # it may have been ended
        return Verdict(Kind.INSTALL, str(exc).strip().splitlines()[-1], evidence=str(exc))
    except OSError as exc:  # a full disk says nothing about the libraries
        cause = f"{exc.strerror or exc} ({exc.filename or lab.folder})"
        raise EnvError(f"a trial failed: {cause}", env="", cause=cause, repair="free space in the store") from exc


def _fill(text: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def _use(lab: Lab, subjects: Sequence[Subject], folder: Path, site: Path, settings: Mapping[str, str]) -> Verdict:
    forward = [
        {
            "name": one.name,
            "imports": one.imports or modules(site, one.distributions),
            "probe": str(one.probe) if one.probe else None,
        }
        for one in subjects
    ]
    (folder / "tmp").mkdir()
    environ = worker_environ({**settings, "TMPDIR": str(folder / "tmp")}, os.environ)
    orders, failure = [], None
    for order in [forward, forward[::-1]][: len(forward)]:
        verdict = _run(lab, folder, order, environ)
        names = [one["name"] for one in order]
        orders.append({"order": names, "kind": verdict.kind.value, "summary": verdict.summary})
        if failure is None and not verdict.ok:
            failure = verdict
    clash = _clash(shared_files(site))
    if clash is not None:
        evidence = "\n\n".join(filter(None, [clash.evidence, failure.evidence if failure else ""]))
        return replace(clash, evidence=evidence, orders=orders)
    return replace(failure or Verdict(Kind.OK, _worked(subjects)), orders=orders)


def _worked(subjects: Sequence[Subject]) -> str:
    """What was tried and went well."""
    imported = "imported in both orders" if len(subjects) > 1 else "imported"
    probed, others = ([one.name for one in subjects if bool(one.probe) is has] for has in (True, False))
    if not others:
        return f"{imported} and computed right"
    computed = f"; computed right: {', '.join(probed)}" if probed else ""
    return f"{imported}{computed}; no op is known for {'it' if len(subjects) == 1 else ', '.join(others)}"


def _run(lab: Lab, folder: Path, order: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> Verdict:
    task = json.dumps({"parent": os.getpid(), "subjects": order}).encode()
    ended = lab.run([str(folder / "bin" / "python"), "-I", str(RUNNER)], environ, task)
    lines = [json.loads(line) for line in ended.out.decode(errors="replace").splitlines() if line.endswith("}")]
    err = ended.err.decode(errors="replace")[-_STDERR_TAIL:]
    verdict = judge(lines, death=ended.death, timeout_s=lab.timeout_s if ended.code is None else None, err=err)
    # A report goes to others, and says the same on every machine.
    places = {str(folder): "ENV", str(FOLDER): "MATRIX", str(Path.home()): "~"}
    evidence = _STANDARD_LIBRARY.sub("PYTHON", _fill(verdict.evidence, places))
    return replace(verdict, summary=_fill(verdict.summary, places), evidence=evidence)


def _clash(shared: Sequence[Shared]) -> Verdict | None:
    """Files that one distribution wrote over another's."""
    clashes = [one for one in shared if one.different]
    if not clashes:
        return None
    first = clashes[0]
    count, owners = len(first.different), " and ".join(first.owners)
    evidence = [
        f"{len(one.different)} files of {', '.join(one.owners)} differ, {len(one.same)} are the same; "
        f"on disk is what {one.winner or 'none of them'} brought: "
        + ", ".join(one.different[:_MANY])
        + (" ..." if len(one.different) > _MANY else "")
        for one in clashes
    ]
    summary = f"{owners} both own {first.different[0]}" + (f" and {count - 1} more files" if count > 1 else "")
    return Verdict(Kind.FILES, summary, missing=first.different[0], evidence="\n".join(evidence))


def _key(subjects: Sequence[Subject], resolved: Resolved, python: Python, settings: Mapping[str, str]) -> str:
    facts = [VERSION, python.implementation, python.version, python.platform, sorted(settings.items()), resolved.text]
    facts += [[one.name, one.imports, one.probe.read_text(encoding="utf-8") if one.probe else ""] for one in subjects]
    return hashlib.sha256(json.dumps([*facts, RUNNER.read_text(encoding="utf-8")]).encode()).hexdigest()[:24]


def _read(path: Path) -> Verdict | None:
    """A kept verdict; None when there is none that holds, or one of another form."""
    try:
        known = Verdict.from_json(json.loads(path.read_text(encoding="utf-8")))
        if known.is_lasting:
            with contextlib.suppress(OSError):
                os.utime(path)  # gc removes what was not used for long
            return known
        return None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
