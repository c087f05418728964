"""A user's script, test or function in a throw-away environment that has given requirements."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from layerzero.envs.build import stage
from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import ToolFailed
from layerzero.envs.build.interpreters import Python
from layerzero.envs.matrix import kept
from layerzero.envs.matrix.bisect import Outcome, Range, Tried
from layerzero.envs.matrix.resolver import Refused, Resolved, resolve
from layerzero.envs.matrix.subjects import Subject
from layerzero.envs.matrix.target import Target
from layerzero.envs.matrix.trial import Lab
from layerzero.envs.probe.child import Ended
from layerzero.ipc import files

_TAIL = 3000


def trier(lab: Lab, wanted: Range, beside: Sequence[Subject], target: Target, python: Python) -> Callable[[str], Tried]:
    """A function that tries one version: `target` beside what `beside` requires. An exit code other than 0 fails, and
    so do a signal and no end in time. What the same lock and the same sources gave before is kept (`Lab.is_fresh`)."""
    requirements = [text for one in beside for text in (*one.requirements, *one.needs)]
    requirements += target.requirements
    settings = {key: value for one in beside for key, value in one.env.items() if "{" not in value}
    if target.kind == "function":
        settings["PYTHONPATH"] = str(stage.stage(lab.store.absolute()))
    sources = target.digest()

    def run(version: str) -> Tried:
        start = time.monotonic()
        resolved = resolve(lab.tool, [f"{wanted.name}=={version}", *requirements], python)
        if isinstance(resolved, Refused):
            return Tried(version, Outcome.SKIPPED, resolved.summary, resolved.message)
        path = kept.tries(lab.store.absolute()) / f"{_key(resolved, python, sources, settings)}.json"
        before = None if lab.is_fresh else _kept(path, version)
        if before is not None:
            return before
        try:
            with lab.environment(resolved, python) as folder:
                ended = lab.run(target.command(folder), test_environ(settings))
        except ToolFailed as exc:
            lab.check()  # it may have been ended
            return Tried(version, Outcome.SKIPPED, str(exc).strip().splitlines()[-1], str(exc))
        tried = _judge(version, ended, lab.timeout_s, round(time.monotonic() - start, 2))
        if ended.code is not None and ended.death != "SIGKILL":  # a busy machine or its killer may be behind those
            _keep(path, tried)
        return tried

    return run


def test_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """A user's test may need the user's variables; pytest's own state is the outer run's."""
    passed = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return tool_environ(passed, {"PYTHONNOUSERSITE": "1", **settings})


def _key(resolved: Resolved, python: Python, sources: str, settings: Mapping[str, str]) -> str:
    facts = [resolved.text, python.version, str(python.path), sources, sorted(settings.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _kept(path: Path, version: str) -> Tried | None:
    """What was found before; its file is used now."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        data = json.loads(path.read_text(encoding="utf-8"))
        tried = Tried(**{**data, "outcome": Outcome(data["outcome"])})
        os.utime(path)
        return replace(tried, is_kept=True) if tried.version == version else None
    return None


def _keep(path: Path, tried: Tried) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.put(path, json.dumps({**asdict(tried), "outcome": tried.outcome.value}))


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
