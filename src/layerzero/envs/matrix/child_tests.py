"""Environments for `pytest --lz-matrix`, and a test of the user's in one of them.

An environment is kept under a key of its lock, and built once however many processes of xdist ask for it; what nobody
has used for a week goes when the next one is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import pytest

from layerzero.envs.build import interpreters, store
from layerzero.envs.build.installers import Runner, ToolFailed, Uv
from layerzero.envs.build.interpreters import Python
from layerzero.envs.matrix import kept
from layerzero.envs.matrix.inside import lz_matrix_inside
from layerzero.envs.matrix.resolver import Refused, Resolved, resolve, the_uv
from layerzero.envs.matrix.subjects import choose
from layerzero.envs.matrix.target import pytest_version
from layerzero.envs.matrix.trier import test_environ
from layerzero.envs.probe.child import Ended, run_process
from layerzero.ipc.errors import EnvError

_TAIL = 4000


@dataclass(frozen=True)
class Outcome:
    """`kind`: passed, failed, skipped or xfailed; `text`: the reason or the failure as the child's pytest shows it."""

    kind: str
    text: str = ""
    sections: Sequence[tuple[str, str]] = ()


@dataclass
class Environments:
    """Those that one pytest process uses. Their locks are held until `close`, so that nobody removes them."""

    config: pytest.Config
    folder: Path
    tool: Uv
    _built: dict[str, Path | EnvError] = field(default_factory=dict)
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def open(cls, config: pytest.Config) -> Environments:
        root = Path(os.environ.get("LAYERZERO_STORE") or platformdirs.user_cache_path("layerzero"))
        return cls(config, kept.tests(root.absolute()), the_uv())

    def close(self) -> None:
        self._held.close()

    def run(self, word: str, nodeid: str) -> Outcome:
        """Run one test in the environment that `word` names. Blocks up to --lz-timeout."""
        try:
            prefix = self._environment(word)
        except EnvError as exc:
            return Outcome("failed", f"there is no environment for {word!r}:\n{exc.facts['cause']}")
        settings = {key: value for one in choose([word]) for key, value in one.env.items() if "{" not in value}
        with tempfile.TemporaryDirectory(prefix="lz-matrix-") as folder:
            report = Path(folder) / "report"
            environ = test_environ({**settings, lz_matrix_inside.REPORT_VARIABLE: str(report)})
            environ["PYTHONPATH"] = str(Path(lz_matrix_inside.__file__).parent)
            timeout_s = float(self.config.getoption("lz_timeout"))
            cwd = str(self.config.invocation_params.dir)
            ended = run_process(self._command(prefix, nodeid), environ=environ, timeout_s=timeout_s, cwd=cwd)
            lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
        return outcome(word, [json.loads(line) for line in lines], ended, timeout_s)

    def _command(self, prefix: Path, nodeid: str) -> list[str]:
        """pytest without the user's ini file, which may ask for plugins that are not there."""
        root, option = str(self.config.rootpath), self.config.getoption
        paths = shlex.join(map(str, self.config.getini("pythonpath")))
        return [
            *(str(prefix / "bin" / "python"), "-X", "faulthandler", "-m", "pytest", f"{root}/{nodeid}"),
            *("-p", lz_matrix_inside.__name__.rpartition(".")[2], "-p", "no:cacheprovider", "-c", os.devnull),
            *("--rootdir", root, "--confcutdir", root, "-o", f"pythonpath={paths}"),
            *(f"--import-mode={option('importmode')}", f"--tb={option('tbstyle')}"),
        ]

    def _environment(self, word: str) -> Path:
        if word not in self._built:
            try:
                self._built[word] = self._build(word)
            except EnvError as exc:
                self._built[word] = exc
        found = self._built[word]
        if isinstance(found, EnvError):
            raise found
        return found

    def _build(self, word: str) -> Path:
        (subject,) = choose([word])
        python = interpreters.find(subject.python, word)
        wanted = [*subject.requirements, *subject.needs, f"pytest=={pytest_version()}"]
        resolved = resolve(self.tool, wanted, python)
        if isinstance(resolved, Refused):
            raise EnvError(f"{word} does not resolve", env=word, cause=resolved.message, repair="other requirements")
        key = hashlib.sha256(f"{python.version} {python.path}\n{resolved.text}".encode()).hexdigest()[:16]
        target = self.folder / key
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self._hold(target):
            # Whoever uses it holds its lock until the session ends: only a builder may want it for itself alone.
            with store.locked_unless(target, (target / kept.BUILT).is_file) as lock_fd:
                if lock_fd is not None and not (target / kept.BUILT).is_file():
                    kept.collect_tests(self.folder)
                    self._install(word, target, python, resolved, Runner(self.folder, lock_fd))
        return target

    def _hold(self, target: Path) -> bool:
        """Keep an environment from being removed until `close`. False when it is not there."""
        held = store.open_lock(target, shared=True)
        try:
            os.utime(target / kept.BUILT)
        except FileNotFoundError:
            os.close(held)
            return False
        self._held.callback(os.close, held)
        return True

    def _install(self, word: str, target: Path, python: Python, resolved: Resolved, run: Runner) -> None:
        try:
            with store.built_aside(target) as aside, tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
                lock.write(resolved.text)
                lock.flush()
                self.tool.create(aside, python.path, run)
                self.tool.install(aside, Path(lock.name), run)
                (aside / kept.BUILT).touch()
        except ToolFailed as exc:
            raise EnvError(f"{word} cannot be installed", env=word, cause=str(exc), repair="see above") from exc


def outcome(word: str, phases: Sequence[dict[str, object]], ended: Ended, timeout_s: float) -> Outcome:
    """What the child's reports and its end mean. pytest's summary has the beginning of the text, which is the cause."""
    sections = [(_stream(title), str(text)) for phase in phases[-1:] for title, text in _pairs(phase["sections"])]
    err = _last_words((ended.out + ended.err).decode(errors="replace"))
    if ended.code is None:
        return Outcome("failed", f"no end within {timeout_s:g} s, inside {word}\n{err}", sections)
    if ended.death:
        return Outcome("failed", f"died of {ended.death}, inside {word}\n{err}", sections)
    for phase in phases:
        if phase["outcome"] == "failed":
            crash = str(phase["crash"]).partition("\n")[0] or "failed"
            return Outcome("failed", f"{crash}, inside {word}, {phase['when']}\n{phase['text']}", sections)
    for phase in phases:
        if phase["outcome"] == "skipped":
            xfail = phase["xfail"]
            return Outcome(
                "skipped" if xfail is None else "xfailed", str(phase["text"] if xfail is None else xfail), sections
            )
    if not phases or phases[-1]["when"] != "teardown" or ended.code != 0:
        return Outcome(
            "failed", f"pytest ended with exit code {ended.code} and no result, inside {word}\n{err}", sections
        )
    return Outcome("passed", "", sections)


def _last_words(text: str) -> str:
    """The end of the output, or of a crash the top of Python's stacks, where the culprit is."""
    _, fatal, stacks = text.partition("Fatal Python error")
    return (fatal + stacks)[:_TAIL] if fatal else text[-_TAIL:]


def _stream(title: object) -> str:
    """The part of "Captured stdout call" that pytest wants when it is to say this."""
    return str(title).removeprefix("Captured ").rpartition(" ")[0]


def _pairs(value: object) -> list[tuple[object, object]]:
    assert isinstance(value, list)
    return [(title, text) for title, text in value]
