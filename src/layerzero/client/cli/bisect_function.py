"""The call of a function's capsule, tried with one version after the other of a library in its environment."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerzero.client.capsules.form import WRONG, Capsule
from layerzero.client.cli.bisect import list_versions
from layerzero.client.cli.bisect_op import forget, judge_replay
from layerzero.client.cli.matrix import ending_on_sigterm
from layerzero.client.cli.trying import Versions
from layerzero.envs import functions
from layerzero.envs import manifest as manifests
from layerzero.envs.build import interpreters
from layerzero.envs.build.build import ensure
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import Uv
from layerzero.envs.build.lock import find_lock
from layerzero.envs.build.lock import lock as write_lock
from layerzero.envs.build.progress import Lines
from layerzero.envs.declared import Declared
from layerzero.envs.matrix.bisect import Outcome, Range, Tried
from layerzero.envs.matrix.target import without
from layerzero.envs.probe.probe import probe_cached
from layerzero.functions import replaying
from layerzero.ipc.errors import ConfigError, EnvError, InvalidArgument


@dataclass(frozen=True)
class FunctionTrial:
    """`beside`, `python`: what else its environment has; None: as it was declared. `file`: where the function's file is
    now. `is_trusted`: as of replaying.replay."""

    capsule: Capsule
    data: Sequence[bytes]
    beside: Sequence[str] | None
    python: str | None
    keeps: bool
    times: int
    seed: int
    file: Path | None
    is_trusted: bool


@contextlib.contextmanager
def function_trier(
    trial: FunctionTrial, wanted: Range, store: Path, tool: Uv, wheelhouse: Path | None, timeout_s: float
) -> Iterator[Versions]:
    """Each version is an environment of its own, and each try has a broker. Raises InvalidArgument, EnvError,
    ConfigError."""
    function = trial.capsule.function
    assert function is not None
    os.environ["LAYERZERO_STORE"] = str(store.absolute())
    env = function.targets[0].env
    told = replaying.function_memory(trial.capsule, trial.data, trial.seed)  # before anything is built
    replaying.code_to_call(function, env, trial.file, told, is_trusted=trial.is_trusted)
    beside, python = _declared(env, wanted, store, trial)
    versions = list_versions(tool, wanted, interpreters.find(python, wanted.name))
    is_wrong, made = trial.capsule.failed.outcome == WRONG, list[Env]()

    def run(version: str) -> Tried:
        start_s = time.monotonic()
        try:
            asked = Declared.of(env.rpartition(".")[0], (f"{wanted.name}=={version}", *beside), python)
            name = _build(asked, store, tool, wheelhouse, timeout_s, made)
        except (EnvError, ConfigError) as exc:
            return Tried(version, Outcome.SKIPPED, exc.message.partition("\n")[0], exc.message)
        found = replaying.replay(
            trial.capsule,
            trial.data,
            backends=[*([trial.capsule.served_by] if is_wrong else []), name],
            times=trial.times,
            timeout_s=timeout_s,
            seed=trial.seed,
            file=trial.file,
            is_trusted=trial.is_trusted,
        )
        outcome, why = judge_replay(found[-1], trial.capsule)
        return Tried(version, outcome, why, "", round(time.monotonic() - start_s, 2))

    with ending_on_sigterm():
        try:
            yield Versions(versions, run)
        finally:
            if not trial.keeps:
                forget(made, store, functions.remove)


def _declared(env: str, wanted: Range, store: Path, trial: FunctionTrial) -> tuple[list[str], str]:
    """What else is required, and the Python."""
    path = functions.folder(store) / f"{env}.toml"
    declared = functions.declared_by(manifests.load(path)) if path.is_file() else None
    if declared is None or declared.interpreter or declared.image:
        if trial.beside is None or trial.python is None:
            what = "is not declared here" if declared is None else "has an interpreter or an image of its own"
            raise InvalidArgument(f"say what it requires by --with, and its --python: environment {env} {what}")
        return list(trial.beside), trial.python
    beside = without(wanted.name, declared.requires) if trial.beside is None else list(trial.beside)
    return beside, trial.python or declared.python


def _build(asked: Declared, store: Path, tool: Uv, wheelhouse: Path | None, timeout_s: float, made: list[Env]) -> str:
    """The name of the environment, built and probed. What was not declared before goes into `made`."""
    was_there = functions.manifest_path(asked, store).is_file()
    manifest = functions.declare(asked, store)
    try:
        if find_lock(manifest, "cpu") is None:
            write_lock(manifest, "cpu", installer=tool)
        env = ensure(manifest, store=store.absolute(), progress=Lines(), wheelhouse=wheelhouse)
    except EnvError:
        if not was_there:
            functions.remove(asked.backend, store)
        raise
    if not was_there:
        made.append(env)
    record = probe_cached(env, manifest, timeout_s=timeout_s)
    if not record.ok:
        raise EnvError(f"its probe failed: {record.cause}", env=env.name)
    return asked.backend
