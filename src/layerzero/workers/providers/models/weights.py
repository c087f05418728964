"""Weights of safetensors, in a module that the caller's class makes."""

from __future__ import annotations

import inspect
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions.frames import Code
from layerzero.workers.functions.code import Modules
from layerzero.workers.providers.models.file import ModelFile
from layerzero.workers.providers.models.torchscript import plain, torch_of_this


class Weights:
    """An object of a subclass of torch.nn.Module whose parameters are the file's, mapped: pages of it are shared, and
    it is never written."""

    def __init__(self, modules: Modules, path: str, sha256: str, cls: Any, args: Any, kwargs: Any) -> None:
        """`cls`: of frames.Code. Raises InvalidArgument, and what the class and torch raise."""
        torch = torch_of_this()
        try:
            from safetensors import safe_open
        except ImportError as exc:
            raise InvalidArgument("this environment has no safetensors; add it to its requires") from exc
        self._modules, self._code = modules, Code.from_tree(cls)
        made = modules.named_by(self._code)
        if not (isinstance(made, type) and issubclass(made, torch.nn.Module)):
            raise InvalidArgument(f"{self._code.label:.200} is no subclass of torch.nn.Module here")
        self._module = made(*args, **kwargs)
        with ModelFile(path, sha256) as file, safe_open(file.path, "pt") as found:
            state = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  # it is no dict
            self._load(state)
        self._module.eval()

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self._module.load_state_dict(state, assign=True)  # the file's own pages, not copies
        except TypeError:  # of a torch before 2.1
            self._module.load_state_dict(state)
        except RuntimeError as exc:
            raise InvalidArgument(f"the weights are not those of {self._code.label:.200}: {exc!s:.1000}") from exc

    def describe(self) -> list[list[list[Any]]]:
        """As Onnx.describe: the parameters of `forward`, without dtypes and shapes."""
        plain_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(self._module.forward).parameters.values()
        known = [[one.name, None, None, one.default is not one.empty] for one in found if one.kind in plain_kinds]
        return [known, []]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._modules.enter(self._code)
        with torch_of_this().no_grad():
            return plain(self._module(*args, **kwargs))
