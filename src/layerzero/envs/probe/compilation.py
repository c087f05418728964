"""Compile a kernel in its environment, beside its worker: run once there, its caches hold what the worker will load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from layerzero.envs.build.env import Env
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.probe import caches
from layerzero.envs.probe.child import Ended, run
from layerzero.envs.probe.probe import probe_key

_LINES, _CHARACTERS = 8, 1000  # of a compiler's last words


def compile_kernel(
    env: Env,
    manifest: EnvManifest,
    unit: tuple[str, str],
    call: bytes,
    *,
    timeout_s: float,
    on_start: Callable[[int], None] | None = None,
) -> str:
    """Compile the kernel of a call (an encoded Prepare message) and note `unit`: the kernel's id, and which calls it is
    compiled for now. Blocks up to `timeout_s`. Returns why it failed, or ""."""
    module = "layerzero.workers.compiler"
    ended = run(env, module, manifest.provider_target, timeout_s=timeout_s, data=call, on_start=on_start)
    if ended.code == 0:
        caches.note_compiled(env, probe_key(env, manifest), [unit])
    return failure_of(ended, timeout_s)


def failure_of(ended: Ended, timeout_s: float) -> str:
    """Why the compiler's process failed, whoever ran it, or ""."""
    if ended.code == 0:
        return ""
    if ended.code is None:
        what = f"it did not end within {timeout_s:g} s"
    else:
        what = f"its process died of {ended.death}" if ended.death else f"exit code {ended.code}"
    words = "\n".join(ended.err.decode(errors="replace").strip().splitlines()[-_LINES:])[-_CHARACTERS:]
    return f"{what}; its last words: {words}" if words else what


def compiled(env: Env, manifest: EnvManifest) -> Iterator[tuple[str, str]]:
    """What is known to be compiled for this environment and code, as units."""
    return caches.compiled(env, probe_key(env, manifest))
