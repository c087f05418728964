"""LayerZero: call kernels from libraries that cannot be installed together.

    import layerzero as lz
    lz.connect()
    out = lz.attention(q, k, v, is_causal=True)
    print(lz.last_report())

Importing this loads nothing else; names are resolved when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layerzero.ipc.version import __version__

if TYPE_CHECKING:
    from layerzero.client.connection.report import SelectionReport
    from layerzero.client.facade.api import (
        connect,
        disconnect,
        empty,
        empty_like,
        explain,
        last_report,
        session,
        share,
        status,
        submit,
        synchronize,
    )
    from layerzero.client.facade.ops import (
        append_kv,
        attention,
        attention_varlen,
        dequantize,
        detokenize,
        embedding,
        gelu,
        layer_norm,
        linear,
        matmul,
        null,
        paged_attention,
        quantize,
        rms_norm,
        rope,
        silu,
        softmax,
        swiglu,
        tokenize,
    )
    from layerzero.client.facade.policy import avoid, configure, lock, policy, prefer, unlock
    from layerzero.client.planning.tokenizer import TokenizerFile
    from layerzero.client.session.session import Session
    from layerzero.client.tools.compile import compile
    from layerzero.client.tools.dry_run import PlanReport, dry_run
    from layerzero.client.tools.ready import ReadinessReport, readiness_check
    from layerzero.client.tools.solve import SolveReport, solve
    from layerzero.client.tools.tune import Call, tune
    from layerzero.client.tools.tune_report import TuneReport
    from layerzero.client.tools.warmup import WarmupReport, warmup
    from layerzero.ipc.errors import (
        BackendError,
        BrokerLost,
        Busy,
        Cancelled,
        ConfigError,
        CudaError,
        CudaGraphUnsafe,
        DeadlineExceeded,
        EnvError,
        InvalidArgument,
        LayerZeroError,
        NoBackend,
        NotAllowed,
        NotConnected,
        NoTransport,
        OutOfMemory,
        Poison,
        VersionMismatch,
        WorkerUnreachable,
    )

_HOME = {
    "layerzero.client.facade.api": (
        "connect disconnect empty empty_like explain last_report session share status submit synchronize"
    ),
    "layerzero.client.tools.compile": "compile",
    "layerzero.client.tools.dry_run": "PlanReport dry_run",
    "layerzero.client.facade.ops": (
        "append_kv attention attention_varlen dequantize detokenize embedding gelu layer_norm linear matmul null "
        "paged_attention quantize rms_norm rope silu softmax swiglu tokenize"
    ),
    "layerzero.client.facade.policy": "avoid configure lock policy prefer unlock",
    "layerzero.client.tools.ready": "ReadinessReport readiness_check",
    "layerzero.client.connection.report": "SelectionReport",
    "layerzero.client.session.session": "Session",
    "layerzero.client.planning.tokenizer": "TokenizerFile",
    "layerzero.client.tools.solve": "SolveReport solve",
    "layerzero.client.tools.tune": "Call tune",
    "layerzero.client.tools.tune_report": "TuneReport",
    "layerzero.client.tools.warmup": "WarmupReport warmup",
    "layerzero.ipc.errors": (
        "BackendError BrokerLost Busy Cancelled ConfigError CudaError CudaGraphUnsafe DeadlineExceeded EnvError "
        "InvalidArgument LayerZeroError NoBackend NoTransport NotAllowed NotConnected OutOfMemory Poison "
        "VersionMismatch WorkerUnreachable"
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "BackendError",
    "BrokerLost",
    "Busy",
    "Call",
    "Cancelled",
    "ConfigError",
    "CudaError",
    "CudaGraphUnsafe",
    "DeadlineExceeded",
    "EnvError",
    "InvalidArgument",
    "LayerZeroError",
    "NoBackend",
    "NoTransport",
    "NotAllowed",
    "NotConnected",
    "OutOfMemory",
    "PlanReport",
    "Poison",
    "ReadinessReport",
    "SelectionReport",
    "Session",
    "SolveReport",
    "TokenizerFile",
    "TuneReport",
    "VersionMismatch",
    "WarmupReport",
    "WorkerUnreachable",
    "__version__",
    "append_kv",
    "attention",
    "attention_varlen",
    "avoid",
    "compile",
    "configure",
    "connect",
    "dequantize",
    "detokenize",
    "disconnect",
    "dry_run",
    "embedding",
    "empty",
    "empty_like",
    "explain",
    "gelu",
    "last_report",
    "layer_norm",
    "linear",
    "lock",
    "matmul",
    "null",
    "paged_attention",
    "policy",
    "prefer",
    "quantize",
    "readiness_check",
    "rms_norm",
    "rope",
    "session",
    "share",
    "silu",
    "softmax",
    "solve",
    "status",
    "submit",
    "swiglu",
    "synchronize",
    "tokenize",
    "tune",
    "unlock",
    "warmup",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
