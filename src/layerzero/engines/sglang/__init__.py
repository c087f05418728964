"""LayerZero in SGLang: `--attention-backend layerzero_triton`. Installed beside SGLang, this is a plugin of each of its
processes; nothing of SGLang is imported before one calls `register`."""

from __future__ import annotations

from layerzero.engines.sglang.running import runner
from layerzero.torch.tally import Report

BACKENDS = {
    "layerzero_triton": "triton",
    "layerzero_flashinfer": "flashinfer",
    "layerzero_torch_native": "torch_native",
}
"""Names of attention backends, and those of SGLang that they wrap."""


def register() -> None:
    """Make the names in BACKENDS known to SGLang: the entry point of group sglang.srt.plugins. Twice is once.

    Raises lz.InvalidArgument for variables LAYERZERO_ENGINE_... that make no sense."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from layerzero.engines import plugins
    from layerzero.engines.sglang.attention import creator

    plugins.check_environment()
    for name, wrapped in BACKENDS.items():
        if name not in ATTENTION_BACKENDS:
            register_attention_backend(name)(creator(ATTENTION_BACKENDS, wrapped))
        if name not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([name])
    plugins.enable_flashinfer()


def report() -> Report:
    """What became of this process's calls so far."""
    return runner.tally.report()


def clear() -> None:
    """Forget all calls."""
    runner.tally.clear()


__all__ = ["BACKENDS", "Report", "clear", "register", "report"]
