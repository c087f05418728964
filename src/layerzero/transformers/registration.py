"""What Transformers is told of us: names that a model may ask for, and, where wanted, our attention for SDPA's."""

from __future__ import annotations

import os
from types import TracebackType

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from layerzero.ipc.vocabulary.variables import is_true
from layerzero.transformers import running
from layerzero.transformers.attention import attention, attention_if_faster
from layerzero.transformers.experts import experts
from layerzero.transformers.masks import mask

NAME = "layerzero"
IF_FASTER = "layerzero_if_faster"


def register() -> None:
    """Make our names known to attn_implementation and experts_implementation, and ours the default where the variable
    says so."""
    for name, function in ((NAME, attention), (IF_FASTER, attention_if_faster)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    ExpertsInterface.register(NAME, experts)
    if is_true(os.environ, "TRANSFORMERS"):
        instead_of_sdpa()


class Switch:
    """SDPA's place, taken until `remove()` or the end of the block."""

    def remove(self) -> None:
        """Transformers' own SDPA is in its place again."""
        AttentionInterface.register("sdpa", sdpa_attention_forward)

    def __enter__(self) -> Switch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def instead_of_sdpa(*, if_faster: bool = False) -> Switch:
    """Every model of this process that would take SDPA, the default, takes LayerZero's attention: also those that are
    loaded already, pipelines, and continuous batching. `if_faster`: but for kinds of calls that were timed to be slower
    so. The result undoes it, by `remove()` or as a context manager."""
    if not running.IS_DISABLED:
        AttentionInterface.register("sdpa", attention_if_faster if if_faster else attention)
    return Switch()
