"""lz.env: an environment for functions, by what it requires."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.envs import sources
from layerzero.envs.declared import Declared
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary import pools

if TYPE_CHECKING:
    from layerzero.envs.conflicts import Conflicts

HERE = f"3.{sys.version_info[1]}"  # this interpreter's Python


def join_command(backend: str) -> str:
    """Of the agent of a worker that joins."""
    return f"python -m layerzero.workers.join --backend {backend}"


class FunctionEnv:
    """An environment that functions run in: packages and a Python. Made by `lz.env`; nothing is built by that."""

    def __init__(
        self,
        name: str,
        requires: Sequence[str],
        python: str,
        workers: int = 1,
        from_interpreter: str | os.PathLike[str] | None = None,
        lock: str | os.PathLike[str] | None = None,
        image: str | None = None,
    ) -> None:
        self._declared = Declared.of(name, requires, python, from_interpreter, lock, image)
        pools.demand_workers(workers)
        self._workers = workers

    @property
    def _store(self) -> Path:
        from layerzero.envs.functions import default_store

        return default_store(os.environ)

    @property
    def name(self) -> str:
        return self._declared.name

    @property
    def requires(self) -> tuple[str, ...]:
        return self._declared.requires

    @property
    def python(self) -> str:
        """Such as "3.11"; empty where `interpreter` is the one."""
        return self._declared.python

    @property
    def interpreter(self) -> str:
        """The path of an existing interpreter, or of the folder of one, that it was declared with; else empty."""
        return self._declared.interpreter

    @property
    def lock(self) -> str | None:
        """The absolute path of the lock file that it holds to; None without one."""
        return self._declared.lock or None

    @property
    def image(self) -> str:
        """Of the containers that its workers join from; empty where the broker starts them."""
        return self._declared.image

    @property
    def workers(self) -> int:
        """How many workers its functions have, unless they say so themselves."""
        return self._workers

    def options(self, *, workers: int) -> FunctionEnv:
        """The same environment whose functions have so many workers. Raises InvalidArgument."""
        its = (self.interpreter or None, self.lock, self.image or None)
        return FunctionEnv(self.name, self.requires, self.python or HERE, workers, *its)

    @property
    def backend(self) -> str:
        """What `lz status`, `lz logs`, `lz env` and policies call it: the name, and a hash of what is required."""
        return self._declared.backend

    @property
    def is_built(self) -> bool:
        from layerzero.envs import functions

        return functions.built(self._declared, self._store) is not None

    @property
    def build_command(self) -> str:
        return f"lz env build {self.backend}"

    def build(self, *, quiet: bool = False, force: bool = False) -> FunctionEnv:
        """Resolve, lock, build and probe it where that has not been done; says on stderr what it does, unless `quiet`.
        Cheap when nothing is to do. `force` builds again.

        Raises EnvError with what the resolver or the installer said, ConfigError, InvalidArgument for one of an image.
        """
        self._demand_ours("nothing is built for it")
        from layerzero.envs import functions
        from layerzero.envs.build.progress import Lines, Quiet

        functions.build(self._declared, self._store, Quiet() if quiet else Lines(), force=force)
        return self

    def is_served(self, ask: Any, workers: int = 1) -> bool:
        """Have the broker look for it again, which may have been built after the broker's start. Whether it serves now,
        by so many workers; one that is not built here may have workers that join. `ask`: of the session."""
        from layerzero.envs import functions

        is_built = self.is_built
        try:
            if not is_built:
                functions.declare(self._declared, self._store)
            return ask("learn", backend=self.backend, workers=workers, is_built=is_built)["serves"] is True
        except LayerZeroError:
            return False

    def explain_failure(self, error: LayerZeroError, ask: Any) -> LayerZeroError:
        """Why a call did not come to this environment: not built, unknown to the broker, or `error`. `ask`: of the
        session."""
        state = self._state(ask)
        unready = None if state.get("joins") else self.unready()
        if unready is not None:
            return unready
        try:
            state = state or ask("health", backend=self.backend)
        except InvalidArgument:
            text = (
                "run: lz down, then start the program again\n"
                f"the broker does not know environment {self.name} ({self.backend}): built after its start"
            )
            return EnvError(text, env=self.backend, cause="unknown to the broker", repair="lz down")
        except LayerZeroError:
            return error
        if not state["ok"]:
            cause, _, told = str(state["detail"]).partition("; repair: ")
            is_late = "NOT_INSTALLED" in cause  # it was built since the broker has looked
            repair = f"lz restart {self.backend}" if is_late or not told else told
            cause = "it was built after the broker had looked for it" if is_late else cause
            head = repair if repair.startswith("run ") else f"run: {repair}"  # "run where it is installed"
            text = f"{head}\nenvironment {self.name} cannot serve: {cause}"
            return EnvError(text, env=self.backend, cause=cause, repair=repair)
        return error

    def _state(self, ask: Any) -> dict[str, Any]:
        """What the broker says of it; nothing where it cannot be asked, or does not know it."""
        try:
            return dict(ask("health", backend=self.backend))
        except LayerZeroError:
            return {}

    def unready(self) -> EnvError | None:
        """Why it cannot be used as it is on disk: not built, or changed since."""
        from layerzero.envs import functions, locked

        if self.image:
            return None
        try:
            locked.demand(self._declared)
        except EnvError as exc:
            functions.declare(self._declared, self._store)  # the command must find it
            return exc
        try:
            asked = ", ".join(self.requires) or HERE
            asked = functions.found(self._declared, self._store) or asked
            cause = functions.changed(self._declared, self._store) if self.is_built else "not built"
        except EnvError as exc:
            exc.facts["env"] = self.backend
            return exc
        if not cause:
            return None
        functions.declare(self._declared, self._store)
        told = f"is not built ({asked})" if cause == "not built" else f"has changed: {cause}"
        text = f"run: {self.build_command}\nenvironment {self.name} {told}"
        return EnvError(text, env=self.backend, cause=cause, repair=self.build_command)

    def conflicts(self) -> Conflicts:
        """Why it cannot be this process's own environment: a Conflict (`requirement`, `here`, `needs`) for each
        requirement, of it or of what it leads to, that does not hold here, and for another Python; none where all hold.
        As text a table of 80 columns. Who refuses a version that it has is known once it is locked, or where
        that is exact. Raises InvalidArgument for one of an image."""
        self._demand_ours("its packages cannot be seen from here")
        from layerzero.envs import conflicts, functions

        pins = functions.pins(self._declared, self._store)
        return conflicts.find(self.requires, self.python, self.interpreter, pins)

    def _demand_ours(self, what: str) -> None:
        if self.image:
            text = f"{self.name}: {what}: it is what image {self.image} has; start its worker there"
            raise InvalidArgument(f"{text}: {join_command(self.backend)}")

    def found(self) -> str:
        """Its existing interpreter as it is now: path, Python, how many distributions, and a hash of what is installed;
        empty where it has one of its own. Raises EnvError where that interpreter cannot be used."""
        from layerzero.envs import functions

        return functions.found(self._declared, self._store)

    def locked(self) -> list[str]:
        """What it has, as requirements with versions; nothing where it has no lock. Raises EnvError, ConfigError."""
        from layerzero.envs import functions

        pins = {} if self.image else functions.pins(self._declared, self._store)
        return [f"{name}=={version}" for name, version in sorted(pins.items())]

    def __repr__(self) -> str:
        asked = ", ".join(self.requires) or "no packages"
        where = f"Python {self.python}" if self.python else self.interpreter or f"image {self.image}"
        return f"<lz.env {self.backend}: {where}, {asked}>"


class Environments:
    """`lz.env(...)`, and environments from files."""

    def __call__(
        self,
        name: str,
        *,
        requires: Sequence[str] = (),
        python: str | None = None,
        build: str | None = None,
        workers: int = 1,
        from_interpreter: str | os.PathLike[str] | None = None,
        lock: str | os.PathLike[str] | None = None,
        image: str | None = None,
    ) -> FunctionEnv:
        """An environment with these packages. Nothing is built, unless `build="now"`: a call into one that is not
        built is an error that says the command.

        name: for people, [a-z0-9_-]. requires: requirements such as "numpy<2"; wheels alone are installed. python: such
        as "3.11"; this interpreter's when left out. from_interpreter: the path of a Python, or of the folder of a venv
        or conda environment, that is used as it is: nothing is installed there, and `requires` is what it must have.
        workers: how many processes its functions have, so that calls run
        side by side; each is started when it is needed. lock: the path of a lock file, which `lz env lock` writes: the
        environment has what that says, and is not resolved; one that is missing, or not for these requirements, this
        Python or platform, is an EnvError of the first call. image: the name of one whose containers you start: its
        workers join, and LayerZero neither pulls nor builds anything. Raises InvalidArgument, ConfigError for a lock
        that cannot be read, and with build="now" EnvError.
        """
        if from_interpreter is not None and python is not None:
            raise InvalidArgument("lz.env: python and from_interpreter are both named; that interpreter has its Python")
        if image is not None and (python is not None or build is not None):
            raise InvalidArgument("lz.env: an image has its Python, and nothing is built; leave python and build out")
        asked = HERE if python is None else python
        found = FunctionEnv(name, requires, asked, workers, from_interpreter, lock, image)
        if build is None:
            return found
        if build != "now":
            raise InvalidArgument(f'lz.env: build is {build!r:.80}; allowed: "now", or leave it out')
        return found.build()

    def from_requirements(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        python: str | None = None,
        lock: str | os.PathLike[str] | None = None,
    ) -> FunctionEnv:
        """From a requirements file: its requirements, one a line. Options (-r, -e, --hash ...) are refused: the lock
        has hashes of its own."""
        asked = sources.of_requirements(path)
        return self(name or asked.name, requires=asked.requires, python=python, lock=lock)

    def from_pyproject(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        extras: Sequence[str] = (),
        python: str | None = None,
        lock: str | os.PathLike[str] | None = None,
    ) -> FunctionEnv:
        """From the `dependencies` of a pyproject.toml, and those of its optional `extras`; the project itself is not
        installed."""
        asked = sources.of_pyproject(path, extras)
        return self(name or asked.name, requires=asked.requires, python=python, lock=lock)

    def from_script(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        python: str | None = None,
        lock: str | os.PathLike[str] | None = None,
    ) -> FunctionEnv:
        """From the inline metadata of a script (PEP 723): its `dependencies`. `requires-python` is compared with the
        Python that is used."""
        asked = sources.of_script(path, HERE if python is None else python)
        return self(name or asked.name, requires=asked.requires, python=python, lock=lock)


env = Environments()


def env_of(where: object, name: str) -> FunctionEnv:
    """What lz.env gave, or an environment with these requirements and this name. Raises InvalidArgument."""
    if isinstance(where, FunctionEnv):
        return where
    if isinstance(where, (list, tuple)):
        if any(isinstance(one, FunctionEnv) for one in where):
            text = "a list of environments is for functions that are decorated with @lz.isolated"
            raise InvalidArgument(f"{name}: {text}; allowed: one environment, or a list of requirements")
        name = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("_-")
        return env(name[:40] or "function", requires=list(where))
    raise InvalidArgument(
        f"lz.isolated: the environment is {where!r:.80}; allowed: what lz.env gives, or a list of requirements"
    )
