"""From manifests to what the core and the supervisor need: capabilities, reasons, probes, launches."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace

from layerzero.broker.configuration import kernel_sources
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core import actions as act
from layerzero.broker.processes import imported, presence
from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.broker.processes.imported import ImportedBackend
from layerzero.broker.processes.supervisor import Launch
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs import descriptors, functions, profiles
from layerzero.envs.build import build, stage
from layerzero.envs.build.base import inspect
from layerzero.envs.build.env import Env
from layerzero.envs.build.environ import worker_environ
from layerzero.envs.compile_caches import carrying, keeping
from layerzero.envs.compile_caches.carrying import Opened
from layerzero.envs.compile_caches.keeping import Bounds
from layerzero.envs.lifted.imports import Imports
from layerzero.envs.manifest import NAME_PATTERN, EnvManifest, Problem, Source, load
from layerzero.envs.probe import caches, compilation, probe
from layerzero.envs.trust import third_party
from layerzero.envs.trust.allowed import Allowed
from layerzero.envs.versions import declaration
from layerzero.envs.versions.declaration import Wanted
from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.errors import ConfigError, EnvChanged, EnvError, LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.vocabulary import pools

# So long `facts` are taken as they were: to look at every environment's files takes a millisecond, and to look for a
# Python that is not here, ten.
FACTS_S, PROBLEM_S = 0.2, 5.0
MAX_BACKENDS = 1000


class Launcher:
    """Reads all manifests and descriptors once; a broken one disables its own backend and is a problem. Environments of
    functions and versions that are declared later are learned when they are asked for.

    `probe` and `compile` may be called from other threads; the rest only from the broker's own.
    """

    def __init__(self, settings: Settings, gpus: Gpus | None = None, accelerators: tuple[DeviceSpec, ...] = ()) -> None:
        """`gpus`: NVIDIA's of this machine; None where nobody has looked. `accelerators`: those of others."""
        self._settings = settings
        self._gpus = gpus
        self.accelerators = accelerators
        self.profile = profiles.read(settings.profile, settings.store)
        self.has_mps = gpus is not None and gpus.has_mps  # workers share their GPU
        self._started: dict[str, str] = {}  # ids of the environments that workers were started in last
        self._held: dict[str, ExitStack] = {}
        self._plans: dict[str, Env] = {}
        self._facts: dict[str, tuple[float, dict[str, object]]] = {}  # and until when they hold
        self._joined_envs: dict[str, str] = {}
        self.imported: dict[str, ImportedBackend] = {}
        self._checked: set[str] = set()  # of their files, for the start that follows
        self._allowed: Mapping[str, Allowed] = {}
        self._read_allowed()
        found, problems = self._discover()
        self.manifests: dict[str, EnvManifest] = {}
        self.capabilities: dict[str, Capability] = {}
        self.unusable: dict[str, Rejection] = {}
        self.problems = [problem.message for problem in problems]
        if settings.overlay is not None:
            try:
                inspect(settings.overlay)
            except EnvError as exc:
                self.problems.append(exc.message)
        # A worker that joins with sources that are not allowed is turned away like one that nobody expects.
        expected = _joined(settings.joined, found) | {name for name, one in found.items() if one.image is not None}
        self._awaited = expected - found.keys()  # environments of functions that nobody has declared yet
        self.joined = frozenset(name for name in expected - self._awaited if found[name].is_allowed)
        for name in sorted(expected - self._awaited - self.joined):
            source = found[name].source
            if source is not None and settings.joined.strip() != ALL:  # all: those that may be used
                text = f"joined: {name} cannot join: {source.refusal}; repair: {source.repair}, then lz down"
                self.problems.append(text)
        capabilities, self.refused = descriptors.read_all(found)
        self.problems += [f"{exc.reason.value}: {exc.message}" for exc in self.refused.values()]
        for name, capability in capabilities.items():
            self.manifests[name] = found[name]
            self.capabilities[name] = capability
            if name in self.joined:
                self.unusable[name] = self.absence(name)
            elif (missing := self.missing(name)) is not None:
                self.unusable[name] = missing
        self._take_imports(found)

    def _take_imports(self, found: Mapping[str, EnvManifest]) -> None:
        """Backends whose environments are not here, and whose lifted calls were imported."""
        imports, problems = Imports(self._settings.store).all()
        chosen, more = imported.choose(imports, self._gpus)
        self.problems += [*problems, *more]
        owners = {kernel for capability in self.capabilities.values() for kernel in capability.kernel_ids}
        for name, one in chosen.items():
            backend = one
            if name in self.manifests:
                lacks = self.unusable.get(name)
                if name in self.joined or lacks is None or lacks.code is not Reason.NOT_INSTALLED:
                    continue
                backend = imported.for_descriptor(backend, self.capabilities[name], self._gpus)
            elif name in found or (taken := owners.intersection(backend.exported.capability.kernel_ids)):
                why = "its descriptor was refused here" if name in found else f"{min(taken)} is another backend's"
                self.problems.append(f"import {backend.source.name}: {name} is not served: {why}")
                continue
            else:
                self.capabilities[name] = backend.exported.capability
                owners.update(backend.exported.capability.kernel_ids)
            self.imported[name] = backend
            missing = self.missing(name)
            assert missing is not None
            self.unusable[name] = missing

    def learn(self, backend: str) -> tuple[Capability, Rejection | None, str] | None:
        """An environment of functions, a further worker of one, or a version, that was declared since the start: its
        descriptor, why it cannot be used as it is, and its lock hash. None for any other. Raises ConfigError, EnvError
        where its files cannot be read, or where there are too many."""
        store, is_version = self._settings.store, Wanted.of(backend) is not None
        name = backend if is_version else pools.environment_of(backend)
        path = (declaration.folder(store) if is_version else functions.folder(store)) / f"{name}.toml"
        if not re.fullmatch(NAME_PATTERN, backend) or name in self.refused or not path.is_file():
            return None
        if len(self.capabilities) >= MAX_BACKENDS:
            raise EnvError(f"this broker has {MAX_BACKENDS} backends, the most that it takes; run: lz down")
        manifest = load(path)
        capabilities, refused = descriptors.read_all({name: manifest})
        if refused or not (manifest.version_of in self.manifests if is_version else functions.is_ours(manifest)):
            return None
        capability = capabilities[name] if name == backend else functions.of_worker(capabilities[name], backend)
        if any(not set(capability.kernel_ids).isdisjoint(other.kernel_ids) for other in self.capabilities.values()):
            return None
        self.manifests[backend], self.capabilities[backend] = manifest, capability
        if self.joins(name):
            self.joined |= {backend}
        missing = self.absence(backend) if backend in self.joined else self.missing(backend)
        return capability, missing, self.env_ids().get(backend, "")

    def joins(self, backend: str) -> bool:
        """Whether the workers of such a backend join, known or not: those of a pool do as its first one."""
        name = pools.environment_of(backend)
        if backend not in pools.members(name, pools.MAX_WORKERS):
            return False
        is_said = name in self.joined | self._awaited or self._settings.joined.strip() == ALL
        return is_said or functions.is_of_image(name, self._settings.store)

    def new_versions(self) -> list[str]:
        """Versions that were declared since the start, of backends that are here."""
        paths = declaration.folder(self._settings.store).glob("*@*.toml")
        found = [path.stem for path in sorted(paths) if path.stem not in self.capabilities]
        return [name for name in found if name.partition("@")[0] in self.manifests and name not in self.refused]

    def stand_in(self, backend: str) -> ImportedBackend | None:
        """What serves in the place of this backend's environment; None where that is built."""
        found = self.imported.get(backend)
        if found is None or backend not in self.manifests:
            return found
        with suppress(EnvError, ConfigError):
            return None if self._plan(backend).is_built else found
        return found

    def is_renewed(self, backend: str) -> bool:
        """Whether it runs in an interpreter of the user's that was built in another state since its worker has
        started."""
        if self.manifests[backend].interpreter != "existing":
            return False
        self._plans.pop(backend, None)
        with suppress(EnvError, ConfigError):
            env = self._plan(backend)
            return env.is_built and self._started.get(backend, env.id) != env.id
        return False

    def _read_allowed(self) -> None:
        with suppress(ConfigError):  # a broken policy file leaves the policy as it was, and lets no broker start
            self._allowed = kernel_sources.allowed(self._settings)

    def _discover(self) -> tuple[dict[str, EnvManifest], list[Problem]]:
        settings = self._settings
        return third_party.discover(
            settings.manifest_dirs, backends=settings.backends_dir, store=settings.store, allowed=self._allowed
        )

    def _refusal(self, backend: str) -> Source | None:
        """Why a backend from outside may not be used, as its sources and the policy are now; None when it may."""
        known = self.manifests[backend].source
        if known is None:
            return None
        self._read_allowed()
        settings = self._settings
        try:
            source = third_party.judge_now(
                backend, backends=settings.backends_dir, store=settings.store, allowed=self._allowed
            )
        except ConfigError as exc:
            text = f"backend {backend!r} is no longer what the broker has read: {exc.message}"
            return Source(known.origin, known.sha256, text, "install or add it again, then lz down", is_changed=True)
        if source.refusal:
            return source
        if source.sha256 != known.sha256:
            text = f"the sources of backend {backend!r} have changed since the broker started, and are allowed"
            return Source(source.origin, source.sha256, text, "lz down", is_changed=True)
        self.manifests[backend] = self.manifests[backend].model_copy(update={"source": source})
        return None

    def _demand_allowed(self, backend: str) -> None:
        """Raises EnvError with cause and repair for sources that may not be run."""
        refused = self._refusal(backend)
        if refused is not None:
            raise EnvError(refused.refusal, env=backend, cause=refused.refusal, repair=refused.repair)

    def _plan(self, backend: str) -> Env:
        """What the manifest and its lock describe; read again by `missing`, so after every reset."""
        env = self._plans.get(backend)
        if env is None:
            settings = self._settings
            env = build.find(
                self.manifests[backend],
                variant=settings.variant,
                store=settings.store,
                base=settings.overlay,
                wheelhouse=settings.wheelhouse,
            )
            self._plans[backend] = env
        return env

    def missing(self, backend: str, *, files: bool = False) -> Rejection | None:
        """Why this backend cannot be used as it is, with the command that builds or allows it; None if it can. Its
        files are looked at with `files`, and when a worker starts."""
        stands_in = self.imported.get(backend)
        if stands_in is not None and backend not in self.manifests:
            return self._lacks_device(backend) or stands_in.rejection()
        refused = self._refusal(backend)
        if refused is not None:
            reason = Reason.SOURCE_CHANGED if refused.is_changed else Reason.SOURCE_NOT_ALLOWED
            return Rejection(reason, refused.refusal, refused.repair)
        missing = self._lacks_device(backend) or self._unbuilt(backend, files)
        if missing is not None and missing.code is Reason.NOT_INSTALLED and stands_in is not None:
            return stands_in.rejection(missing.repair)
        return self._unproved(backend, missing) if self.capabilities[backend].not_run else missing

    def _lacks_device(self, backend: str) -> Rejection | None:
        return presence.absence(self.capabilities[backend].platform, self._gpus, self.accelerators)

    def _unproved(self, backend: str, missing: Rejection | None) -> Rejection | None:
        """Of a backend that no machine of this project has run: why it is left alone here, which is no fault. It
        serves where its probe has passed, and that is never tried unasked."""
        if missing is None and (record := self.record(backend)) is not None and record.ok:
            return None
        if missing is not None and missing.code is not Reason.NOT_INSTALLED:
            return missing
        tried = "its probe has not passed here" if missing is None else missing.detail
        command = f"lz env {'probe' if missing is None else 'build'} {backend}"
        text = f"no machine of this project has run it, and {tried}; to try it: {command}, then lz restart {backend}"
        return Rejection(Reason.NOT_RUN, text)

    def absence(self, backend: str) -> Rejection:
        """Why a backend cannot serve whose worker the broker does not start, when none has registered."""
        where = f"run where it is installed: {join_command(backend)}"
        return self._lacks_device(backend) or Rejection(Reason.NOT_JOINED, "no worker has joined", where)

    def _unbuilt(self, backend: str, files: bool) -> Rejection | None:
        self._plans.pop(backend, None)
        self._facts.pop(backend, None)
        manifest, variant = self.manifests[backend], self._settings.variant
        if manifest.variants and manifest.variant_for(variant) not in manifest.variants:
            text = f"it is not made for the variant {variant!r}, which this broker uses; {backend} has: "
            wanted = next(iter(manifest.variants))
            repair = f"export LAYERZERO_VARIANT={wanted}, then lz env build {backend}, lz down and lz up"
            return Rejection(Reason.NOT_INSTALLED, text + ", ".join(manifest.variants), repair)
        try:
            env = self._plan(backend)
            changed = build.drift(env) if files else build.base_drift(env)
        except (EnvError, ConfigError) as exc:
            return Rejection(Reason.NOT_INSTALLED, exc.message, str(exc.facts.get("repair") or "lz env list"))
        if not changed and env.is_built:
            return None
        return Rejection(Reason.NOT_INSTALLED, changed or "its environment is not built", build.command("build", env))

    def records(self) -> dict[str, ProbeRecord]:
        """The probes that are known without running one, by backend; of imported ones, where they were exported."""
        found = {name: one.exported.record for name, one in self.imported.items() if self.stand_in(name)}
        for backend in self.manifests.keys() - self.joined:
            if (record := self.record(backend)) is not None:
                found[backend] = record
        return found

    def record(self, backend: str) -> ProbeRecord | None:
        """The probe of a backend that is built here, if it is known without running one."""
        with suppress(EnvError, ConfigError):  # no lock for this platform, say; `unusable` tells
            env = self._plan(backend)
            return probe.cached_probe(env, self.manifests[backend], self.profile) if env.is_built else None
        return None

    def probe(self, backend: str) -> ProbeRecord:
        """What the environment's probe has shown; runs it where that is not known. It may have failed.

        Raises EnvError with cause and repair when there is nothing to probe, EnvChanged when it is not what was
        built, ConfigError.
        """
        self._demand_allowed(backend)
        env = self._plan(backend)
        if not env.is_built:
            repair = build.command("build", env)
            raise EnvError("its environment is not built", env=backend, repair=repair)
        build.check(env)  # here, beside the broker's own thread; a restart is checked by `launch`
        self._checked.add(backend)
        stage.stage(env.store)
        record = probe.probe_cached(
            self._with_caches(env),
            self.manifests[backend],
            timeout_s=self._settings.start_timeout_s,
            profile=self.profile,
        )
        return record

    def compiled(self) -> dict[str, list[Unit]]:
        """What kernels are compiled for in the environments as they are, by backend."""
        found = {}
        for backend, manifest in self.manifests.items():
            if backend in self.joined:
                continue
            with suppress(EnvError, ConfigError):
                env = self._plan(backend)
                found[backend] = [Unit(*unit) for unit in self._compiled(env, manifest)] if env.is_built else []
        return found

    def compile(self, action: act.Compile, on_start: Callable[[int], None]) -> str:
        """Compile a kernel in a process of its environment, whose pid `on_start` gets. Returns why it failed, or "".
        Raises LayerZeroError."""
        env = self._with_caches(self._plan(action.backend))
        if not env.is_built:
            return f"its environment is not built; run: {build.command('build', env)}"
        timeout_s = self._settings.compile_timeout_s
        manifest = self.manifests[action.backend]
        failure = compilation.compile_kernel(
            env, manifest, action.unit, action.body, timeout_s=timeout_s, on_start=on_start
        )
        self._bound_caches()
        return failure

    def env(self, backend: str) -> Env:
        """What its manifest and lock describe here, built or not. Raises EnvError, ConfigError."""
        return self._plan(backend)

    def _compiled(self, env: Env, manifest: EnvManifest) -> list[tuple[str, str]]:
        """What is known to be compiled here, or where the caches come from that a worker will take over."""
        if not self._settings.keep_compiled:
            return []
        shared = self._shared(env)
        if shared is not None and shared.exported.key == probe.probe_key(env, manifest):
            return list(shared.exported.units)
        return list(compilation.compiled(env, manifest))

    def _shared(self, env: Env) -> Opened | None:
        """What the fleet's folder has for this environment, of which nothing is here yet."""
        settings = self._settings
        if settings.shared_cache is None or not settings.keep_compiled:
            return None
        try:
            return carrying.shared(settings.shared_cache, env, settings.keys)
        except ConfigError as exc:
            log("cache.shared_refused", backend=env.name, cause=exc.message)
            return None

    def _with_caches(self, env: Env) -> Env:
        """With what the settings tell its processes of their compilers' caches."""
        told = {} if self._settings.keep_compiled or not env.place else {"LAYERZERO_KEEP_COMPILED": "0"}
        if (shared := self._shared(env)) is not None:
            told["LAYERZERO_CACHE_SHARED"] = f"{shared.sha256}:{shared.folder.absolute()}"
        return replace(env, environ={**env.environ, **told}) if told else env

    def _bound_caches(self) -> None:
        """Remove caches that were not used for longest, where there are too many; from a thread."""
        settings = self._settings
        with suppress(OSError):
            for one in keeping.collect(settings.store, Bounds(settings.cache_mib << 20, settings.cache_entries)):
                log("cache.evicted", folder=str(one.folder), bytes=one.nbytes)

    @staticmethod
    def failure(record: ProbeRecord) -> EnvError | None:
        """The error of a backend whose probe failed, with cause and repair; None when it passed."""
        if record.ok:
            return None
        return (EnvChanged if record.kind == "changed" else EnvError)(
            f"the probe of {record.env} failed: {record.cause}",
            env=record.env,
            cause=record.message,
            missing=record.missing,
            wheel=record.wheel,
            repair=record.repair,
            stderr_tail=record.stderr_tail[-1000:],
        )

    def launch(self, backend: str) -> Launch:
        """How to start the worker. Its environment is kept from being collected from now on. Raises LayerZeroError,
        for one EnvChanged."""
        self._demand_allowed(backend)
        env = self._plan(backend)
        stage.stage(env.store)
        if backend in self._held:
            self._held.pop(backend).close()
        is_checked = backend in self._checked
        self._checked.discard(backend)
        self._held[backend] = build.hold(env, checks=not is_checked)
        caches.make_folder(env)
        self._started[backend] = env.id
        manifest = self.manifests[backend]
        environ = dict(self._with_caches(env).environ)
        if functions.is_ours(manifest):  # several workers have one environment
            environ[functions.VARIABLE] = backend
        return Launch(
            env.python,
            worker_environ(environ, os.environ, has_mps=self.has_mps),
            manifest.provider_target,
            lifts=self.capabilities[backend].platform == "cuda",
        )

    def env_ids(self) -> dict[str, str]:
        """What is locked for each backend, as the name of its environment."""
        ids = dict(self._joined_envs)
        ids |= {name: one.exported.env for name, one in self.imported.items() if self.stand_in(name)}
        for backend in self.manifests.keys() - ids.keys():
            with suppress(LayerZeroError):
                ids[backend] = self._plan(backend).id
        return ids

    def note_joined(self, backend: str, env: str) -> None:
        """What is installed where the worker of this backend runs from now on."""
        self._joined_envs[backend] = env
        self._facts.pop(backend, None)

    def facts(self, backend: str) -> dict[str, object]:
        """For `lz status`: what this backend is and where it runs. What is built is up to FACTS_S old, and what
        keeps an environment from being there, PROBLEM_S."""
        until_s, facts = self._facts.get(backend, (0.0, {}))
        now_s = time.monotonic()
        if now_s >= until_s:
            facts = self._read_facts(backend)
            self._facts[backend] = (now_s + (PROBLEM_S if "error" in facts else FACTS_S), facts)
        return facts

    def _read_facts(self, backend: str) -> dict[str, object]:
        stands_in = self.stand_in(backend)
        if stands_in is not None:
            summary = self.manifests[backend].summary if backend in self.manifests else stands_in.text
            facts = {"env": stands_in.exported.env, "built": False, "imported": stands_in.facts}
            return {"summary": summary, **facts}
        manifest = self.manifests[backend]
        if backend in self.joined:
            return {"summary": manifest.summary, "env": self._joined_envs.get(backend), "built": None, "joined": True}
        try:
            env = self._plan(backend)
            return {
                "summary": manifest.summary,
                "env": env.id,
                "built": env.is_built,
                "on_host": env.on_host,
                "overlay": str(env.base) if env.base else None,
                "interpreter": str(env.python) if env.existing else None,
                "cache": self._cache_facts(env),
            }
        except LayerZeroError as exc:
            return {"summary": manifest.summary, "env": None, "built": False, "error": exc.message}

    @staticmethod
    def _cache_facts(env: Env) -> dict[str, object] | None:
        """Of its compilers' caches: what was found in them that was not as it was sealed."""
        if not env.place:
            return None
        return {"folder": str(env.cache), "set_aside": folders.aside_count(env.cache)}


ALL = "all"  # of the setting `joined`


def join_command(backend: str) -> str:
    return f"python -m layerzero.workers.join --backend {backend}"


def _joined(setting: str, manifests: Mapping[str, EnvManifest]) -> frozenset[str]:
    """The backends that `joined` names. Raises ConfigError."""
    if setting.strip() == ALL:
        return frozenset(manifests)
    names = frozenset(filter(None, (name.strip() for name in setting.split(","))))
    unknown = sorted(name for name in names - manifests.keys() if not pools.is_environment(name))
    if unknown:
        known = ", ".join(sorted(manifests))
        raise ConfigError(
            f"setting joined (LAYERZERO_JOINED): {unknown[0]!r:.60}; allowed: {ALL}, or names of: {known}"
        )
    return names
