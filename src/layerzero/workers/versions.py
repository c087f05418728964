"""A provider under the name of another version: what `envs/versions` writes beside its manifest calls this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerzero.workers import boot
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded


def load_as(provider: str, base: str, backend: str) -> Loaded:
    """What `provider` of the backend `base` loads in this environment, with kernels named after `backend`: BASE.silu
    becomes BASE@VERSION.silu. The provider is told of its own names."""
    loaded = boot.import_provider(provider).load()
    kernels = {
        f"{backend}{kernel_id.removeprefix(base)}": _renamed(kernel_id, bind)
        for kernel_id, bind in loaded.kernels.items()
        if kernel_id.startswith(f"{base}.")
    }
    return replace(loaded, kernels=kernels)


def _renamed(kernel_id: str, bind: Bind) -> Bind:
    def bind_as_its_own(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        return bind(replace(call, kernel_id=kernel_id), inputs, outputs)

    return bind_as_its_own
