"""An op call, or that of a capsule, tried with one version of a backend after the other, beside a reference."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from layerzero.client.capsules.form import Capsule
from layerzero.client.cli.bisect import list_versions
from layerzero.client.cli.matrix import ending_on_sigterm
from layerzero.client.cli.output import note
from layerzero.client.cli.trying import Versions
from layerzero.client.cli.tune import parse_calls
from layerzero.client.facade import default_session
from layerzero.client.session.shadow import REFERENCES
from layerzero.client.tools.calls import Call
from layerzero.client.tools.compare import compare_call
from layerzero.client.tools.compare_report import Compared
from layerzero.client.tools.replay import SETTINGS, is_far, lay_out, outcome_on, where
from layerzero.client.tools.replay import Outcome as ReplayOutcome
from layerzero.envs import functions
from layerzero.envs.build import interpreters
from layerzero.envs.build import store as locks
from layerzero.envs.build.build import ensure
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import Uv
from layerzero.envs.build.progress import Lines
from layerzero.envs.manifest import EnvManifest, discover
from layerzero.envs.matrix.bisect import Outcome, Range, Tried
from layerzero.envs.probe.probe import probe_cached
from layerzero.envs.versions import choice, declaration
from layerzero.envs.versions.declaration import Wanted
from layerzero.ipc.errors import ConfigError, EnvError, InvalidArgument

BUDGET_S = 0.2  # of timed runs of each version
GONE_S = 10.0  # so long a broker's worker may take to end


Try: TypeAlias = Callable[[str], tuple[Outcome, str]]
"""What came of a call on the backend of this name, and why."""


class Trial(Protocol):
    """`backend`: whose versions. `reference`: a backend to compare with; None: chosen by the trial. `keeps`: versions
    that are built now stay. `settings`: variables of its broker."""

    @property
    def backend(self) -> str: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def keeps(self) -> bool: ...
    @property
    def settings(self) -> Mapping[str, str]: ...

    def begin(self, session: Any) -> Try:
        """With the broker that is there now. Raises InvalidArgument, EnvError."""


@dataclass(frozen=True)
class OpTrial:
    """`words`: the op and its arrays, as `lz run` has them. Compared with the most trusted backend that serves the
    call."""

    words: Sequence[str]
    params: Sequence[str]
    backend: str
    reference: str | None
    keeps: bool
    settings: Mapping[str, str] = field(default_factory=dict)

    def begin(self, session: Any) -> Try:
        call, *_ = parse_calls(self.words, self.params, None)
        reference = self.reference or _reference(call, self.backend)
        note(f"compared with {reference}")
        return lambda name: _judge(compare_call(call, [reference, name], call.arguments(), budget_s=BUDGET_S).rows[0])


@dataclass(frozen=True)
class CapsuleTrial:
    """The call of a capsule, with its arguments or random ones. Compared with the backend that answered then, where
    that gives an answer now."""

    capsule: Capsule
    data: Sequence[bytes]
    backend: str
    reference: str | None
    keeps: bool
    times: int
    seed: int
    device: str
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)  # several versions may die of it

    def begin(self, session: Any) -> Try:
        capsule = self.capsule
        ordinal = where(capsule, self.device)
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, self.data, self.seed, device=ordinal)
        reference, results = self.reference or capsule.served_by.partition(".")[0], None
        if reference:
            first = ReplayOutcome(reference)
            results = outcome_on(session, capsule, arguments, first, 1, None, None)
            told = "" if first.is_right else f", which gives no answer here: {', '.join(first.runs)}"
            note(f"compared with {reference}{told}")
        if results is None:
            note("compared with nothing: a version fails that gives no answer")

        def run(name: str) -> tuple[Outcome, str]:
            outcome = ReplayOutcome(name)
            outcome_on(session, capsule, arguments, outcome, self.times, None, results)
            return judge_replay(outcome, capsule)

        return run


@contextlib.contextmanager
def op_trier(
    trial: Trial,
    wanted: Range,
    store: Path,
    folders: Sequence[Path],
    tool: Uv,
    wheelhouse: Path | None,
    timeout_s: float,
) -> Iterator[Versions]:
    """Has a broker of its own, which ends with this. Raises InvalidArgument, EnvError, ConfigError."""
    if any(name.startswith(f"{trial.backend}@") for name in ("", trial.reference or "")):
        raise InvalidArgument(f"--reference {trial.reference}: is one of those that are tried; name another backend")
    manifests = discover(functions.folders(store, folders))[0]
    base = choice.template(Wanted(trial.backend, wanted.first), manifests)
    if (main := choice.main_requirement(base, "cpu")).name != wanted.name:
        raise InvalidArgument(f"versions of {base.name} are those of {main.name}, not of {wanted.name}")
    versions = list_versions(tool, wanted, interpreters.find(base.pythons[0], base.name))
    os.environ.update({"LAYERZERO_STORE": str(store.absolute()), **trial.settings})  # of the broker that is started now
    made: list[Env] = []
    with tempfile.TemporaryDirectory(prefix="lz-bisect-") as folder, ending_on_sigterm():
        session = default_session.connect(runtime_dir=Path(folder))
        try:
            attempt = trial.begin(session)

            def run(version: str) -> Tried:
                start_s = time.monotonic()
                try:
                    name = _build(base, version, manifests, store, tool, wheelhouse, timeout_s, made)
                except (EnvError, ConfigError) as exc:
                    return Tried(version, Outcome.SKIPPED, exc.message.partition("\n")[0], exc.message)
                session.ask("learn")
                outcome, why = attempt(name)
                return Tried(version, outcome, why, "", round(time.monotonic() - start_s, 2))

            yield Versions(versions, run)
        finally:
            default_session.disconnect()
            if not trial.keeps:
                forget(made, store, declaration.remove)


def _reference(call: Call, backend: str) -> str:
    """The most trusted backend that serves the call; raises InvalidArgument where none does."""
    for name in REFERENCES:
        if name != backend and call.explain(name).kernel_id is not None:
            return name
    raise InvalidArgument(f"{call.label}: none of {', '.join(REFERENCES)} serves it; name a backend with --reference")


def _build(
    base: EnvManifest,
    version: str,
    manifests: Mapping[str, EnvManifest],
    store: Path,
    tool: Uv,
    wheelhouse: Path | None,
    timeout_s: float,
    made: list[Env],
) -> str:
    """The name of the version, built and probed. What was not declared before goes into `made`."""
    wanted = Wanted.of(f"{base.name}@{version.partition('+')[0]}")
    if wanted is None:
        raise ConfigError(f"{base.name}@{version} cannot be named so")
    known = declaration.folder(store) / f"{wanted.backend}@{wanted.version}.toml"
    was_there = known.is_file()
    manifest = choice.declare(wanted, manifests, store, tool=tool)
    env = ensure(manifest, store=store, progress=Lines(), wheelhouse=wheelhouse)
    if not was_there:
        made.append(env)
    probe_cached(env, manifest, timeout_s=timeout_s)  # what it refuses, the call is told
    return manifest.name


def _judge(row: Compared) -> tuple[Outcome, str]:
    if row.failures:
        why = next(iter(row.failures)).partition(": ")[2]
        return (Outcome.SKIPPED if "NOT_INSTALLED" in why else Outcome.FAILED), why
    error = f"error {row.error:.2g}, allowed {row.allowed:g}"
    speed = "" if row.speedup is None else f", {row.speedup:.2f} times as fast as {row.baseline}"
    return (Outcome.FAILED if row.is_beyond else Outcome.PASSED), error + speed


def judge_replay(outcome: ReplayOutcome, capsule: Capsule) -> tuple[Outcome, str]:
    """Of the runs of a capsule's call with one version."""
    why = ", ".join(f"{what} {count}" for what, count in outcome.runs.items())
    if is_far(outcome, capsule):
        return Outcome.FAILED, outcome.difference or f"error {outcome.error:.2g}"
    if outcome.is_right:
        error = "" if outcome.error is None else f", error {outcome.error:.2g}"
        return Outcome.PASSED, why + error
    detail = next((told for what, told in outcome.details.items() if what != "ok"), "")
    told = f"{why}: {detail.partition(chr(10))[0]}" if detail else why
    return (Outcome.SKIPPED if "NOT_INSTALLED" in detail else Outcome.FAILED), told


def forget(made: Sequence[Env], store: Path, remove: Callable[[str, Path], object]) -> None:
    """Versions that were declared for this alone, and their environments; `lz env gc` has what is still in use."""
    end_s = time.monotonic() + GONE_S
    for env in made:
        remove(env.name, store)
        while time.monotonic() < end_s:
            with suppress(locks.InUse), locks.locked_now(env.lock_target):
                locks.discard(env.prefix)
                shutil.rmtree(env.cache, ignore_errors=True)
                break
            time.sleep(0.05)
