"""Every variable LAYERZERO_... that anything of ours reads, so that one that is misspelt can be told. docs/settings.md
has them with their defaults."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from layerzero.ipc.vocabulary import policy

PREFIX = policy.VARIABLE_PREFIX

SETTINGS = (
    "runtime_dir",
    "store",
    "perf_db",
    "manifest_dirs",
    "backends_dir",
    "policy",
    "rollouts",
    "variant",
    "profile",
    "overlay",
    "wheelhouse",
    "timeout_s",
    "start_timeout_s",
    "compile_timeout_s",
    "linger_s",
    "max_in_flight",
    "depth",
    "share",
    "standby",
    "restart_budget",
    "restart_window_s",
    "backoff_s",
    "backoff_max_s",
    "retry_disabled_s",
    "retry_disabled_max_s",
    "poison_quarantine_s",
    "keep_compiled",
    "cache_mib",
    "cache_entries",
    "shared_cache",
    "rest_s",
    "counts",
    "functions_rest_s",
    "gpu_budget_mib",
    "stacks_after_s",
    "express",
    "allow_mps",
    "joined",
    "joined_silence_s",
    "secret_file",
    "remote",
    "metrics",
    "metrics_token_file",
    "history",
    "record",
    "record_mib",
    "keys",
    "allow_uids",
    "failpoints",
)
"""The broker's settings; broker/configuration/settings.py has their defaults, which only a broker needs."""

PATHS = (
    "store",
    "perf_db",
    "manifest_dirs",
    "backends_dir",
    "policy",
    "rollouts",
    "wheelhouse",
    "shared_cache",
    "secret_file",
    "metrics_token_file",
    "record",
    "keys",
)
"""Those that name files or folders, several separated by ':'. A broker runs elsewhere than who starts it."""


class Variable(NamedTuple):
    """One that is no setting of the broker and no key of policy. `default` and `meaning` are for people."""

    name: str
    default: str
    meaning: str
    reader: str


OTHERS = (
    Variable("GPU_TRANSPORT", "any", "the only way of sharing GPU memory that may be used (docs/gpu.md)", "client"),
    Variable("NO_C", "", "anything: calls are made, and served, by the Python alone", "client, workers"),
    Variable(
        "SPIN_US",
        "100",
        "for how many microseconds both ends of an express lane, and ranks of a group, look for the other before they "
        "sleep, where cores are free; 0: not at all (docs/dispatch.md)",
        "client, workers",
    ),
    Variable(
        "KEPT_MIB",
        "1024",
        "MiB of copies that are kept of inputs outside of shared memory that come again; 0: none (docs/dispatch.md)",
        "client",
    ),
    Variable(
        "HUGE_PAGES",
        "1",
        "whether shared memory comes in pages of 2 MiB where the kernel gives them; 0: of 4 KiB (docs/dispatch.md)",
        "client",
    ),
    Variable(
        "GROUP_KIB",
        "2048",
        "KiB that a rank of a group gives to the others at once; it has twice as much shared memory (docs/groups.md)",
        "client",
    ),
    Variable(
        "CAPSULES",
        "shapes",
        "what is kept of a call whose worker died or hung (docs/capsules.md): off, shapes, small (with arguments of up "
        "to 1 MiB), full",
        "client",
    ),
    Variable("CAPSULE_DIR", "capsules in the store", "the folder that they are kept in", "client"),
    Variable("CAPSULE_MIB", "1024", "MiB that all capsules may take together", "client"),
    Variable(
        "UNDER",
        "",
        "a program, and its arguments, that the broker's workers are started by; `lz replay --under sanitizer` sets it "
        "for its own broker",
        "broker",
    ),
    Variable("TRACE_DIR", "traces in the store", "the folder of traces that policy or lz trace on ask for", "client"),
    Variable("DEBUG", "", "1: each call is waited for, checked and told on stderr (docs/debugging.md)", "client"),
    Variable("PROGRESS", "1", "0: a terminal is not told why a call waits", "client"),
    Variable("MEMORY_MARGIN_MIB", "256", "MiB of memory that must stay free when more is asked for", "client, workers"),
    Variable(
        "DISABLE",
        "",
        "1: `layerzero.torch`, `layerzero.transformers`, `layerzero.diffusers` and `layerzero.engines` leave programs "
        "as they are",
        "client",
    ),
    Variable("TRANSFORMERS", "", "1: importing `layerzero.transformers` puts it in SDPA's place", "client"),
    Variable(
        "ENGINE_FLASHINFER",
        "",
        "1: the plugins of vLLM and SGLang call `layerzero.engines.flashinfer.enable()`",
        "client",
    ),
    Variable("ENGINE_SHADOW", "", "1: in vLLM and SGLang both compute, the engine's result is used", "client"),
    Variable("ENGINE_SHARE", "1", "0 to 1: the share of calls that is taken over in vLLM and SGLang", "client"),
    Variable("TRACEBACK", "", "true: `lz` shows where an error comes from", "`lz`"),
    Variable("WORKER_GRAPH_MIB", "256", "MiB of GPU memory for a worker's CUDA graphs; 0: none", "workers"),
    Variable(
        "WORKER_WEIGHTS_MIB",
        "1024",
        "MiB of weights of few bits that a worker for CPUs keeps ready (docs/ops.md, scaled_linear); 0: none",
        "workers",
    ),
    Variable("WORKER_CONFINED", "1", "0: a worker may trace and signal other processes of its user", "workers"),
    Variable("CUPTI", "", "path of libcupti, by which workers see machine code; else it is looked for", "workers"),
    Variable("FUNCTIONS", "", "the backend of an environment of functions; its manifest sets it", "workers"),
    Variable("HUB_KERNELS", "", "where kernels of the HF Kernel Hub lie; `lz env build` sets it", "workers"),
    Variable("WORKER_WARM", "", "a folder of `lz cache export` that an image ships (docs/caches.md)", "agent"),
    Variable("CACHE_FOLDER", "", "the folder of an environment's compile caches; `lz` and agents set it", "workers"),
    Variable("CACHE_SHARED", "", "what a worker takes over of LAYERZERO_SHARED_CACHE; the broker sets it", "workers"),
    Variable("WORKER_CACHE", "a temporary folder", "where a joined worker's compilers keep what they make", "agent"),
    Variable("BACKEND", "", "the backend of an image", "containers/Dockerfile"),
    Variable("BASE", "a Debian image with Python", "the image that ours are made from", "docker-compose.yml"),
    Variable("CUDA_BASE", "", "likewise, of images for GPUs", "docker-compose.yml"),
    Variable("BUILD_NETWORK", "default", "the network of builds", "docker-compose.yml"),
    Variable("IMAGES", "layerzero", "prefix of the images' names", "docker-compose.yml"),
    Variable("SECRET", "./containers/secret", "the stack's secret", "docker-compose.yml"),
    Variable("RAY_TOKEN", "./containers/ray-token", "the token of Ray's cluster", "docker-compose.cluster.yml"),
    Variable("UID", "1000", "whose processes run in containers", "docker-compose.yml"),
    Variable("TEST_CONTAINERS", "", "anything: tests of containers run", "tests"),
    Variable("TEST_ENGINE", "docker", "docker or podman", "tests"),
    Variable("KEEP_IMAGES", "", "anything: images of tests are kept", "tests"),
)

# Kubernetes tells each container of a service called layerzero in variables of these names.
_OF_A_SERVICE = re.compile(r"(.*_)?(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)")


_WORKERS = "WORKER_"


_TRUE = ("1", "true", "yes", "on")


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether what brings LayerZero into other programs is to leave them alone: LAYERZERO_DISABLE=1."""
    return is_true(environ, "DISABLE")


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """Whether one of `OTHERS` is set to 1 or its like."""
    return environ.get(PREFIX + name, "").strip().lower() in _TRUE


class SettingWarning(UserWarning):
    """A variable that is set has no effect."""


def names() -> tuple[str, ...]:
    """All of them, without the prefix."""
    keys = (key for key in policy.KEYS if key not in policy.WITHOUT_VARIABLE)
    return (*(name.upper() for name in (*SETTINGS, *keys)), *(one.name for one in OTHERS))


def mistakes(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that looks like ours, and that nothing reads."""
    known = names()
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name in known or _OF_A_SERVICE.fullmatch(name):
            continue
        group = _WORKERS if name.startswith(_WORKERS) else ""  # what all of them have in common makes none alike
        alike = [one.removeprefix(group) for one in known if one.startswith(group)]
        near = difflib.get_close_matches(name.removeprefix(group), alike, n=1, cutoff=0.7)
        if near:
            yield f"{variable} has no effect: did you mean {PREFIX}{group}{near[0]}?"
        elif not group:  # else a provider may read it
            yield f"{variable} has no effect: nothing reads it; docs/settings.md has all variables"
