"""TorchScript archives, by torch's own loader."""

from __future__ import annotations

import warnings
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.providers.models.file import ModelFile


def torch_of_this() -> Any:
    """Raises InvalidArgument."""
    try:
        import torch
    except ImportError as exc:
        raise InvalidArgument("this environment has no torch; add it to its requires") from exc
    return torch


def plain(found: Any) -> Any:
    """Results without gradients, named tuples as tuples."""
    torch = torch_of_this()
    if isinstance(found, torch.Tensor):
        return found.detach()
    if isinstance(found, (list, tuple)):
        parts = [plain(one) for one in found]
        return parts if isinstance(found, list) else tuple(parts)
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return found


class TorchScript:
    """A module that torch.jit.save has written, in evaluation mode."""

    def __init__(self, path: str, sha256: str) -> None:
        """Raises InvalidArgument, and what torch.jit.load raises."""
        torch = torch_of_this()
        with ModelFile(path, sha256) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that this is TorchScript its caller knows
            self._module = torch.jit.load(file.path, map_location="cpu").eval()

    def describe(self) -> list[list[list[Any]]]:
        """As Onnx.describe; TorchScript knows no shapes, and no dtypes."""
        schema = self._module.forward.schema
        inputs = [[one.name, None, None, one.has_default_value()] for one in schema.arguments[1:]]
        return [inputs, [[f"output{at}", None, None, False] for at in range(len(schema.returns))]]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch_of_this().no_grad():
            return plain(self._module(*args, **kwargs))
