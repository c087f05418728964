"""Probe an environment: load its provider in a throw-away process there and keep the verdict.

Metadata lies: an environment is usable when its library imported, computed and gave right numbers (workers/probe.py).
A crash, a hang or a missing symbol ends the probe's process and is a verdict like any other.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.profiles import ALL, Profile
from layerzero.envs import accelerators
from layerzero.envs.build import integrity
from layerzero.envs.build.build import command, drift
from layerzero.envs.build.env import Env
from layerzero.envs.build.environ import worker_environ
from layerzero.envs.build.stage import stage
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.probe.child import Ended, run, run_process
from layerzero.ipc import files

DEFAULT_TIMEOUT_S = 120.0  # the first import of torch from a cold disk takes most of a minute on a slow one
_STDERR_TAIL = 4000
OF_PROFILE = "+"  # in the name of a verdict's file: what follows is the hash of its profile
_MENDED_BY_BUILDING = frozenset({"import", "abi", "version", "crash", "protocol"})

# What extensions print when they then raise an ImportError without a word.
_ABI_WORDS = re.compile(r"A module that was compiled using NumPy 1.*|.*_ARRAY_API not found.*")


def probe_key(env: Env, manifest: EnvManifest) -> str:
    """Everything the verdict depends on: what is installed, our code, the descriptor, the provider, the variables, and
    the machine."""
    source = manifest.source.sha256 if manifest.source is not None else ""
    facts = [env.id, env.source_hash, manifest.env, source, _machine()]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    provider = Path(manifest.provider_target)
    for path in (manifest.descriptor_path, provider if provider.suffix == ".py" else None):
        if path is not None and path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@functools.cache
def _machine() -> list[str]:
    """The processor, since libraries choose kernels by what it can, and the drivers and models of GPUs and the like. A
    store may be shared by machines, and outlive a driver."""
    facts = {}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part"):
            facts[name] = value
    driver = _text(Path("/proc/driver/nvidia/version")).partition("\n")[0]
    gpus = sorted(_text(path).partition("\n")[0] for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    others = sorted(f"{one.device_name} {one.driver_version} {one.roc_version}" for one in accelerators.detect())
    return [*map(str, sorted(facts.items())), driver, *gpus, *others]


def _text(path: Path) -> str:
    """What a file of the kernel says; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def probe(
    env: Env,
    manifest: EnvManifest,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    verify: bool = False,
    profile: Profile = ALL,
) -> ProbeRecord:
    """Run the probe now, on the calls of a profile. Blocks until it ends, or is in one case for `timeout_s`; the
    process and its group are gone when this returns. `verify` hashes every file; an environment of which one has
    changed since its build has failed, whatever it computes."""
    start = time.monotonic()
    if env.existing is not None:
        _compile_workers(env, timeout_s)
    calls = profile.to_json()
    told = () if calls is None else (json.dumps(calls),)
    targets = (manifest.provider_target, str(manifest.descriptor_path), *told)
    ended = run(env, "layerzero.workers.probe", *targets, timeout_s=timeout_s)
    seconds = round(time.monotonic() - start, 3)
    key = probe_key(env, manifest)
    record = judge(ended, env.name, key, seconds, timeout_s, lambda kind, at: _repair(env, manifest, kind, at))
    if told:
        record = replace(record, profile=profile.name)
    return record if env.on_host else _with_files(record, env, drift(env, verify=verify))


def _compile_workers(env: Env, timeout_s: float) -> None:
    """Bytecode of our worker code, for an interpreter whose workers write none: each start would compile it anew,
    which takes some 60 ms. Where that fails, it does."""
    folder = str(stage(env.store))
    argv = [str(env.python), "-I", "-m", "compileall", "-q", folder]
    run_process(argv, environ=worker_environ({}, os.environ), timeout_s=timeout_s)


def _with_files(record: ProbeRecord, env: Env, changed: str) -> ProbeRecord:
    """With what the environment's files say: what has changed, and the distribution that a failure is about."""
    if record.ok and not changed:
        return record
    said = "\n".join((record.message, record.traceback, record.stderr_tail))
    found = integrity.changes(env.prefix) if changed else []
    wheel = next((one.dist for one in found if one.dist), "") or integrity.owner(env.prefix, record.missing, said)
    if not changed:
        return replace(record, wheel=wheel)
    message, kind = (changed, "changed") if record.ok else (f"{record.message}; {changed}", record.kind)
    # What only `verify` sees a plain build does not see either: it would find nothing to do.
    repair = command("build", env, *(() if drift(env) else ("--force",)))
    return replace(record, ok=False, kind=kind, message=message, wheel=wheel, changed=changed, repair=repair)


def judge(
    ended: Ended, name: str, key: str, seconds: float, timeout_s: float, repair: Callable[[str, str], str]
) -> ProbeRecord:
    """The verdict of a probe's process, whoever ran it. `repair` says what to do, of the kind of failure and the kernel
    in which a process died or hung."""
    failure: dict[str, Any] = {}
    where, kernel_id = ("", "") if ended.code is not None and not ended.death else _position(ended.out)
    if ended.code is None:
        failure = {"kind": "timeout", "message": f"the probe did not get on within {timeout_s:g} s{where}"}
    elif ended.death:
        failure = {"kind": "crash", "message": f"the probe's process died of {ended.death}{where}"}
    verdict = failure or _parse(ended.out) or _no_answer(ended.code, ended.err)
    if verdict.get("kind") == "import" and (words := _ABI_WORDS.search(ended.err.decode(errors="replace"))):
        verdict |= {"kind": "abi", "message": f"{verdict['message'].rstrip(': ')}: {words[0]}"}
    ok = not verdict.get("kind")
    return ProbeRecord(
        env=name,
        key=key,
        ok=ok,
        seconds=seconds,
        stderr_tail="" if ok else ended.err.decode(errors="replace")[-_STDERR_TAIL:],
        repair="" if ok else repair(verdict["kind"], kernel_id),
        **verdict,
    )


def cached_probe(env: Env, manifest: EnvManifest, profile: Profile = ALL) -> ProbeRecord | None:
    """The verdict on exactly this environment and code, or None. One on all calls is one on those of a profile, too."""
    return cached_record(record_path(env, manifest)) or cached_record(record_path(env, manifest, profile))


def cached_record(path: Path) -> ProbeRecord | None:
    """The verdict in a file, or None."""
    try:
        return parse_record(path.read_bytes())
    except FileNotFoundError:
        return None


def parse_record(text: bytes) -> ProbeRecord | None:
    """What ProbeRecord.to_json made; None for what was cut short, or is of another version of us."""
    try:
        data = json.loads(text)
        return ProbeRecord(**data) if _is_certificate(data["certified"], data["failures"]) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def probe_cached(
    env: Env,
    manifest: EnvManifest,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    refresh: bool = False,
    verify: bool = False,
    profile: Profile = ALL,
) -> ProbeRecord:
    """The kept verdict, or a new one that is then kept. `refresh` probes in any case."""
    record = None if refresh else cached_probe(env, manifest, profile)
    if record is None or record.kind == "timeout":  # the machine may have been busy then
        record = probe(env, manifest, timeout_s=timeout_s, verify=verify, profile=profile)
        if not record.changed:  # else it is no verdict on what the key names
            keep_record(record_path(env, manifest, profile), record)
    return record


def keep_record(path: Path, record: ProbeRecord) -> None:
    """For `cached_record`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.put(path, json.dumps(record.to_json()))


def record_path(env: Env, manifest: EnvManifest, profile: Profile = ALL) -> Path:
    of_profile = f"{OF_PROFILE}{profile.hash}" if profile.hash else ""
    return env.store / "probes" / f"{env.name}-{probe_key(env, manifest)}{of_profile}.json"


def _position(out: bytes) -> tuple[str, str]:
    """Where the probe was when it ended without a verdict (workers/probe.py), as words; and in which kernel."""
    try:
        match json.loads(out.decode().rpartition("\n")[2]):
            case {"at": []}:
                return " while it loaded the provider", ""
            case {"at": [str(kernel_id), str(dtype), str(case)]}:
                return f" in {kernel_id:.80}, {dtype:.20}, case {case!r:.120}", kernel_id
    except (ValueError, RecursionError):
        pass  # it died before it began, or wrote to something that is no file
    return "", ""


def _repair(env: Env, manifest: EnvManifest, kind: str, kernel_id: str) -> str:
    """Building again mends a damaged environment; it mends no provider, descriptor or numerics."""
    if kernel_id and manifest.provider.endswith(".py"):
        return (
            f"mend {kernel_id} in {manifest.provider_target}, or take it out of {manifest.descriptor_path}, then: "
            f"{command('probe', env)} (its --json has the process's last words)"
        )
    if kernel_id:
        return command("probe", env, "--json")
    if env.on_host or kind not in _MENDED_BY_BUILDING:
        return command("probe", env, "--json")
    return command("build", env, "--force")


def _parse(out: bytes) -> dict[str, Any]:
    """The last line of stdout is workers/probe.py's JSON object. Empty when it is anything else."""
    try:
        answer = json.loads(out.decode().strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(answer, dict) or not _is_certificate(answer.get("certified"), answer.get("failures")):
        return {}
    found = {name: answer.get(name) for name in ("versions", "kernels", "certified", "failures")}
    versions, kernels = found["versions"], found["kernels"]
    if not isinstance(versions, dict) or not isinstance(kernels, dict):
        return {}
    if not all(isinstance(version, str) for version in versions.values()):
        return {}
    match answer:
        case {"ok": True}:
            return found
        case {"ok": False, "error": {"kind": str(kind), "message": str(message)} as error} if kind:
            return {
                **found,
                "kind": kind,
                "message": message,
                "missing": error["missing"] if isinstance(error.get("missing"), str) else None,
                "traceback": str(error.get("traceback") or ""),
            }
    return {}


def _is_certificate(certified: Any, failures: Any) -> bool:
    """Whether what another process or a file says of certificates has the form that ProbeRecord promises."""
    if not isinstance(certified, dict) or not isinstance(failures, (list, tuple)):
        return False
    dtypes = [dtype for one in certified.values() if isinstance(one, dict) for dtype in one.values()]
    errors = [error for classes in dtypes if isinstance(classes, dict) for error in classes.values()]
    return (
        all(isinstance(one, dict) for one in (*certified.values(), *dtypes, *failures))
        and all(type(error) in (int, float) for error in errors)
        and all(
            isinstance(failure.get(name), str)
            for failure in failures
            for name in ("kernel_id", "dtype", "shape_class", "case", "detail")
        )
    )


def _no_answer(code: int | None, err: bytes) -> dict[str, Any]:
    last = err.decode(errors="replace").strip().rpartition("\n")[2]
    if symbol := re.search(r"undefined symbol: ([\w@.]+)", last):  # found by the linker when it was called first
        return {"kind": "abi", "message": f"the probe ended with exit code {code}: {last:.500}", "missing": symbol[1]}
    return {"kind": "protocol", "message": f"the probe ended with exit code {code} and no verdict: {last:.200}"}
