"""A user's test in a throw-away environment that has given requirements: a script, or a file for pytest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

from layerzero.envs.build import interpreters
from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import ToolFailed
from layerzero.envs.matrix.bisect import Outcome, Range, Tried
from layerzero.envs.matrix.resolver import Refused, resolve
from layerzero.envs.matrix.subjects import Subject
from layerzero.envs.matrix.trial import Lab
from layerzero.envs.probe.child import Ended

_TAIL = 3000


def is_for_pytest(test: str) -> bool:
    """A file named as pytest wants it, or a node in one; anything else is a script."""
    return "::" in test or Path(test).name.startswith("test_") or test.endswith("_test.py")


def trier(lab: Lab, wanted: Range, beside: Sequence[Subject], test: str) -> Callable[[str], Tried]:
    """A function that tries one version: `test` beside what `beside` requires. An exit code other than 0 fails, and so
    do a signal and no end in time."""
    python = interpreters.find(next((one.python for one in beside), interpreters.host().minor), wanted.name)
    requirements = [text for one in beside for text in (*one.requirements, *one.needs)]
    settings = {key: value for one in beside for key, value in one.env.items() if "{" not in value}
    if is_for_pytest(test):
        requirements.append(f"pytest=={pytest_version()}")

    def run(version: str) -> Tried:
        start = time.monotonic()
        resolved = resolve(lab.tool, [f"{wanted.name}=={version}", *requirements], python)
        if isinstance(resolved, Refused):
            return Tried(version, Outcome.SKIPPED, resolved.summary, resolved.message)
        try:
            with lab.environment(resolved, python) as folder:
                ended = lab.run(_command(folder, test), test_environ(settings))
        except ToolFailed as exc:
            lab.check()  # it may have been ended
            return Tried(version, Outcome.SKIPPED, str(exc).strip().splitlines()[-1], str(exc))
        return _judge(version, ended, lab.timeout_s, round(time.monotonic() - start, 2))

    return run


def pytest_version() -> str:
    """Of the running process, so that a test means the same there. PackageNotFoundError where there is none."""
    return installed_version("pytest")


def test_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """A user's test may need the user's variables; pytest's own state is the outer run's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return tool_environ(kept, {"PYTHONNOUSERSITE": "1", **settings})


def _command(folder: Path, test: str) -> list[str]:
    python = str(folder / "bin" / "python")
    if is_for_pytest(test):
        return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(test)]
    return [python, str(test)]


def _judge(version: str, ended: Ended, timeout_s: float, seconds: float) -> Tried:
    said = (ended.out + ended.err).decode(errors="replace").strip()[-_TAIL:]
    if ended.code is None:
        return Tried(version, Outcome.FAILED, f"no end within {timeout_s:g} s", said, seconds)
    if ended.death:
        return Tried(version, Outcome.FAILED, f"died of {ended.death}", said, seconds)
    if ended.code != 0:
        last = next(iter(said.splitlines()[-1:]), "")
        return Tried(version, Outcome.FAILED, f"exit code {ended.code}: {last}", said, seconds)
    return Tried(version, Outcome.PASSED, "exit code 0", "", seconds)
