"""What has the parts of a call signature, whichever class it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from layerzero.ipc.vocabulary.tensors import TensorSpec


class CallSignature(Protocol):
    """As CallSpec, SelectionContext, Lifted and a provider's Call are."""

    @property
    def op(self) -> str: ...
    @property
    def inputs(self) -> Sequence[TensorSpec | None]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...
