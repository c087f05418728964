"""What a child process inherits. A worker gets a short list of variables, so that no token or key reaches a library."""

from __future__ import annotations

from collections.abc import Mapping

_PASSED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "LD_LIBRARY_PATH"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "LAYERZERO_CUPTI", "LAYERZERO_SPIN_US", "LAYERZERO_NO_C"}
)
_PASSED_PREFIXES = (
    *("LC_", "XDG_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_"),
    "LAYERZERO_WORKER_",  # read by workers/boot.py
)
# By default OpenMP threads spin for a while after their work. With several workers on one machine they would take the
# cores from the worker that runs next: the layers of a model over four workers ran 1.7 times as fast without spinning.
# A tenth of a millisecond is kept where the runtime allows (libgomp, which torch has): without it the threads of one
# kernel wait for each other asleep, and were at times put on one core (silu on 16 MiB and two
# threads: 0.6 or 0.9 ms without, 0.6 ms with).
# A GPU worker has a stream for each stream of its clients, which may all wait for words: streams that share one of the
# GPU's connections, 8 by default, hold each other up. Under MPS all processes have some hundred of them together.
_DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    "KMP_BLOCKTIME": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
# Set by the shell or by our own start; they would lead another interpreter to the wrong modules.
_PYTHON_STATE = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"})


def worker_environ(own: Mapping[str, str], parent: Mapping[str, str], *, has_mps: bool = False) -> dict[str, str]:
    """The whole environment of a worker or probe: defaults, the passed part of `parent`, then `own` (Env.environ)."""
    defaults = {**_DEFAULTS, "CUDA_DEVICE_MAX_CONNECTIONS": "8"} if has_mps else _DEFAULTS
    passed = {k: v for k, v in parent.items() if k in _PASSED or k.startswith(_PASSED_PREFIXES)}
    return {**defaults, **passed, **own}


def tool_environ(parent: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """For uv, pip and foreign interpreters: everything of the user's (proxies, indexes) but our Python's state."""
    kept = {k: v for k, v in parent.items() if k not in _PYTHON_STATE}
    return {**kept, "NO_COLOR": "1", **extra}
