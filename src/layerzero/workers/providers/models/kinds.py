"""The kinds of models that a worker opens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.functions.code import Modules
from layerzero.workers.providers.models.exported import Exported
from layerzero.workers.providers.models.onnx import Onnx
from layerzero.workers.providers.models.torchscript import TorchScript
from layerzero.workers.providers.models.weights import Weights

KINDS: dict[str, type] = {"onnx": Onnx, "torchscript": TorchScript, "exported": Exported}


class Kinds:
    def find(self, kind: str, modules: Modules) -> Callable[..., Any]:
        """As serving.Models."""
        if kind == "safetensors":
            return partial(Weights, modules)
        if kind not in KINDS:
            raise InvalidArgument(f"{kind:.80} is no kind of model; allowed: safetensors, {', '.join(KINDS)}")
        return KINDS[kind]
