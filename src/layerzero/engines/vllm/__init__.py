"""LayerZero in vLLM: `vllm serve MODEL --attention-backend LAYERZERO`. Installed beside vLLM, this is a plugin of each
of its processes; nothing of vLLM is imported before one calls `register`."""

from __future__ import annotations

from layerzero.engines.vllm.running import runner
from layerzero.torch.tally import Report

BACKENDS = {
    "LAYERZERO": "layerzero.engines.vllm.flash_attn.LayerZeroBackend",
    "TRITON_LAYERZERO": "layerzero.engines.vllm.triton_attn.LayerZeroTritonBackend",
}
"""Names of attention backends, and their classes."""


def register() -> None:
    """Make the names in BACKENDS known to vLLM: the entry point of group vllm.general_plugins. Twice is once.

    Raises lz.InvalidArgument for variables LAYERZERO_ENGINE_... that make no sense."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from layerzero.engines import plugins

    plugins.check_environment()
    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
    plugins.enable_flashinfer()


def report() -> Report:
    """What became of this process's calls so far."""
    return runner.tally.report()


def clear() -> None:
    """Forget all calls."""
    runner.tally.clear()


__all__ = ["BACKENDS", "Report", "clear", "register", "report"]
