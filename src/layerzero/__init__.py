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

if TYPE_CHECKING:
    from layerzero.ipc.version import __version__ as __version__
    from layerzero.client.facade.api import (
        explain as explain,
        last_report as last_report,
        status as status,
        submit as submit,
        synchronize as synchronize,
    )
    from layerzero.client.tools.calls import Call as Call
    from layerzero.client.tools.compile import compile as compile
    from layerzero.client.tools.executor import Executor as Executor, jit as jit
    from layerzero.client.tools.dry_run import PlanReport as PlanReport, dry_run as dry_run
    from layerzero.client.facade.activation_ops import (
        geglu as geglu,
        hardswish as hardswish,
        mish as mish,
        quick_gelu as quick_gelu,
        reglu as reglu,
        relu as relu,
        sigmoid as sigmoid,
        tanh as tanh,
    )
    from layerzero.client.facade.attention_ops import (
        attention_backward as attention_backward,
        attention_forward as attention_forward,
        merge_attention as merge_attention,
    )
    from layerzero.client.facade.cache_ops import (
        attention_varlen_forward as attention_varlen_forward,
        copy_kv_blocks as copy_kv_blocks,
        gather_kv as gather_kv,
        mla_decode as mla_decode,
        paged_attention_forward as paged_attention_forward,
    )
    from layerzero.client.facade.elementwise_ops import (
        add as add,
        cast as cast,
        cat as cat,
        clamp as clamp,
        mul as mul,
        where as where,
    )
    from layerzero.client.facade.norm_ops import (
        add_rms_norm as add_rms_norm,
        batch_norm as batch_norm,
        group_norm as group_norm,
        instance_norm as instance_norm,
        layer_norm_backward as layer_norm_backward,
        rms_norm_backward as rms_norm_backward,
    )
    from layerzero.client.facade.ops import (
        append_kv as append_kv,
        attention as attention,
        attention_varlen as attention_varlen,
        embedding as embedding,
        gelu as gelu,
        layer_norm as layer_norm,
        linear as linear,
        log_softmax as log_softmax,
        matmul as matmul,
        null as null,
        paged_attention as paged_attention,
        rms_norm as rms_norm,
        rope as rope,
        silu as silu,
        softmax as softmax,
        swiglu as swiglu,
    )
    from layerzero.client.facade.expert_ops import (
        grouped_linear as grouped_linear,
        moe_combine as moe_combine,
        moe_mlp as moe_mlp,
        moe_permute as moe_permute,
        moe_route as moe_route,
    )
    from layerzero.client.facade.loss_ops import cross_entropy as cross_entropy
    from layerzero.client.facade.packed_weights import (
        PackedWeight as PackedWeight,
        pack_weight as pack_weight,
        packed_linear as packed_linear,
        packed_weight as packed_weight,
    )
    from layerzero.client.facade.position_ops import rope_qk as rope_qk
    from layerzero.client.facade.product_ops import addmm as addmm, gated_mlp as gated_mlp
    from layerzero.client.facade.quantized_ops import (
        dequantize as dequantize,
        dynamic_quantize as dynamic_quantize,
        int_matmul as int_matmul,
        quantize as quantize,
        scaled_linear as scaled_linear,
    )
    from layerzero.client.facade.sampling_ops import (
        filter_logits as filter_logits,
        penalize_logits as penalize_logits,
        sample as sample,
        speculative_verify as speculative_verify,
        tree_accept as tree_accept,
    )
    from layerzero.client.facade.default_session import (
        connect as connect,
        disconnect as disconnect,
        ensure_connected as ensure_connected,
        session as session,
    )
    from layerzero.client.facade.memory import (
        empty as empty,
        empty_like as empty_like,
        share as share,
    )
    from layerzero.client.facade.text_ops import (
        detokenize as detokenize,
        tokenize as tokenize,
    )
    from layerzero.client.facade.vision_ops import (
        adaptive_avg_pool as adaptive_avg_pool,
        adaptive_max_pool as adaptive_max_pool,
        avg_pool as avg_pool,
        conv as conv,
        conv_transpose as conv_transpose,
        interpolate as interpolate,
        max_pool as max_pool,
    )
    from layerzero.functions.environment import env as env
    from layerzero.functions.decorator import isolated as isolated
    from layerzero.functions.handle import Handle as Handle
    from layerzero.functions.model import Model as Model
    from layerzero.functions.model import load as load
    from layerzero.functions.module import module as module
    from layerzero.groups.group import Group as Group, group as group
    from layerzero.groups.pipeline import pipeline as pipeline
    from layerzero.groups.split_plan import split_plan as split_plan
    from layerzero.client.facade.policy import (
        avoid as avoid,
        configure as configure,
        lock as lock,
        policy as policy,
        prefer as prefer,
        unlock as unlock,
    )
    from layerzero.client.bundles.bundle import Bundle as Bundle, load_bundle as load_bundle
    from layerzero.client.bundles.making import write_bundle as write_bundle
    from layerzero.client.plans.execution_plan import ExecutionPlan as ExecutionPlan, plan as plan
    from layerzero.client.tools.ready import ReadinessReport as ReadinessReport, readiness_check as readiness_check
    from layerzero.client.connection.report import SelectionReport as SelectionReport
    from layerzero.client.session.session import Session as Session
    from layerzero.client.tools.compare import compare as compare
    from layerzero.client.tools.compare_report import CompareReport as CompareReport
    from layerzero.client.tools.solve import SolveReport as SolveReport, solve as solve
    from layerzero.client.planning.tokenizer import TokenizerFile as TokenizerFile
    from layerzero.client.tools.tune import tune as tune
    from layerzero.client.tools.tune_report import TuneReport as TuneReport
    from layerzero.client.traces.contents import TraceContents as TraceContents
    from layerzero.client.traces.rerun import TraceRun as TraceRun
    from layerzero.client.traces.trace import (
        Trace as Trace,
        load_trace as load_trace,
        trace as trace,
        trace_scope as trace_scope,
    )
    from layerzero.client.tools.warmup import WarmupReport as WarmupReport, warmup as warmup
    from layerzero.ipc.errors import (
        BackendError as BackendError,
        BrokerLost as BrokerLost,
        Busy as Busy,
        Cancelled as Cancelled,
        ConfigError as ConfigError,
        CudaError as CudaError,
        CudaGraphUnsafe as CudaGraphUnsafe,
        DeadlineExceeded as DeadlineExceeded,
        EnvError as EnvError,
        GroupBroken as GroupBroken,
        InvalidArgument as InvalidArgument,
        LayerZeroError as LayerZeroError,
        NoBackend as NoBackend,
        NotAllowed as NotAllowed,
        NotConnected as NotConnected,
        NoTransport as NoTransport,
        OutOfMemory as OutOfMemory,
        Poison as Poison,
        RanksDisagree as RanksDisagree,
        RemoteError as RemoteError,
        VersionMismatch as VersionMismatch,
        WorkerUnreachable as WorkerUnreachable,
    )
    from layerzero.ipc.vocabulary.tensors import TensorSpec as TensorSpec

_HOME = {
    "layerzero.ipc.version": "__version__",
    "layerzero.client.facade.api": "explain last_report status submit synchronize",
    "layerzero.client.facade.default_session": "connect disconnect ensure_connected session",
    "layerzero.client.facade.memory": "empty empty_like share",
    "layerzero.client.tools.calls": "Call",
    "layerzero.client.tools.compare": "compare",
    "layerzero.client.tools.compare_report": "CompareReport",
    "layerzero.client.tools.compile": "compile",
    "layerzero.client.tools.dry_run": "PlanReport dry_run",
    "layerzero.client.tools.executor": "Executor jit",
    "layerzero.client.facade.activation_ops": "geglu hardswish mish quick_gelu reglu relu sigmoid tanh",
    "layerzero.client.facade.attention_ops": "attention_backward attention_forward merge_attention",
    "layerzero.client.facade.cache_ops": (
        "attention_varlen_forward copy_kv_blocks gather_kv mla_decode paged_attention_forward"
    ),
    "layerzero.client.facade.elementwise_ops": "add cast cat clamp mul where",
    "layerzero.client.facade.norm_ops": (
        "add_rms_norm batch_norm group_norm instance_norm layer_norm_backward rms_norm_backward"
    ),
    "layerzero.client.facade.ops": (
        "append_kv attention attention_varlen embedding gelu layer_norm linear log_softmax matmul null "
        "paged_attention rms_norm rope silu softmax swiglu"
    ),
    "layerzero.client.facade.expert_ops": "grouped_linear moe_combine moe_mlp moe_permute moe_route",
    "layerzero.client.facade.loss_ops": "cross_entropy",
    "layerzero.client.facade.packed_weights": "PackedWeight pack_weight packed_linear packed_weight",
    "layerzero.client.facade.position_ops": "rope_qk",
    "layerzero.client.facade.product_ops": "addmm gated_mlp",
    "layerzero.client.facade.quantized_ops": "dequantize dynamic_quantize int_matmul quantize scaled_linear",
    "layerzero.client.facade.sampling_ops": ("filter_logits penalize_logits sample speculative_verify tree_accept"),
    "layerzero.client.facade.text_ops": "detokenize tokenize",
    "layerzero.client.facade.vision_ops": (
        "adaptive_avg_pool adaptive_max_pool avg_pool conv conv_transpose interpolate max_pool"
    ),
    "layerzero.client.facade.policy": "avoid configure lock policy prefer unlock",
    "layerzero.client.bundles.bundle": "Bundle load_bundle",
    "layerzero.client.bundles.making": "write_bundle",
    "layerzero.client.plans.execution_plan": "ExecutionPlan plan",
    "layerzero.client.tools.ready": "ReadinessReport readiness_check",
    "layerzero.client.connection.report": "SelectionReport",
    "layerzero.client.session.session": "Session",
    "layerzero.client.planning.tokenizer": "TokenizerFile",
    "layerzero.client.tools.solve": "SolveReport solve",
    "layerzero.client.tools.tune": "tune",
    "layerzero.client.tools.tune_report": "TuneReport",
    "layerzero.client.traces.contents": "TraceContents",
    "layerzero.client.traces.rerun": "TraceRun",
    "layerzero.client.traces.trace": "Trace load_trace trace trace_scope",
    "layerzero.client.tools.warmup": "WarmupReport warmup",
    "layerzero.groups.group": "Group group",
    "layerzero.groups.pipeline": "pipeline",
    "layerzero.groups.split_plan": "split_plan",
    "layerzero.functions.environment": "env",
    "layerzero.functions.decorator": "isolated",
    "layerzero.functions.handle": "Handle",
    "layerzero.functions.model": "Model load",
    "layerzero.functions.module": "module",
    "layerzero.ipc.errors": (
        "BackendError BrokerLost Busy Cancelled ConfigError CudaError CudaGraphUnsafe DeadlineExceeded EnvError "
        "GroupBroken InvalidArgument LayerZeroError NoBackend NoTransport NotAllowed NotConnected OutOfMemory "
        "Poison RanksDisagree RemoteError VersionMismatch WorkerUnreachable"
    ),
    "layerzero.ipc.vocabulary.tensors": "TensorSpec",
}
_OF_DIMS = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
# torch's names of what an op of ours does, too.
_SERVED_BY = {
    **dict.fromkeys(("bmm", "mm", "mv"), "matmul"),
    **{f"{op}{n}d": op for op in _OF_DIMS for n in (1, 2, 3)},
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [*sorted(_MODULE_OF)]  # for type checkers, the imports above say what is public

if not TYPE_CHECKING:  # else every name would be one that exists

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            hint = f"; did you mean lz.{_SERVED_BY[name]}?" if name in _SERVED_BY else ""
            text = f"module 'layerzero' has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=import_module(__name__))  # Python says what is nearly called so
        value = globals()[name] = getattr(import_module(module), name)
        if module.startswith("layerzero.client.facade."):
            import_module("layerzero.client.connection.observing").on_traced = _take_traced
        return value

    def _take_traced(route: Any, share: float) -> None:
        """Policy wants calls recorded, or no more: what does that is loaded with the first of them."""
        import_module("layerzero.client.traces.wanted").wanted.take(route, share)


def __dir__() -> list[str]:
    return sorted(__all__)
