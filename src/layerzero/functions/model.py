"""Whole models of files, opened in an environment: lz.load."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.functions.code import reference
from layerzero.functions.environment import FunctionEnv, env_of
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.model_file import ONNX, SAFETENSORS, ModelFile
from layerzero.functions.objects import IsolatedClass
from layerzero.functions.options import Options, options_of
from layerzero.functions.ports import Port, Signature, ports
from layerzero.functions.report import FunctionReport
from layerzero.functions.use import Use
from layerzero.ipc.errors import BackendError, InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.functions.surface import CALLABLE, Surface

SURFACE = Surface({"describe": CALLABLE, "run": CALLABLE}, frozenset())


def load(
    path: str | Path,
    env: FunctionEnv | Sequence[str],
    *,
    cls: type | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    idempotent: bool = True,
    on_death: str = "rebuild",
) -> Model:
    """A model of a file, opened in a worker of an environment: a callable.

    path: an ONNX model, a TorchScript archive (torch.jit.save), an exported program (torch.export.save), or safetensors
    with `cls`, a subclass of torch.nn.Module at the top of a module, which is constructed there with `args` and
    `kwargs` and gets the weights. What the file is, its contents tell. It goes by path and SHA-256: the worker compares
    before it loads. env: what lz.env gives, or a list of requirements, such as ["onnxruntime==1.18.1", "numpy<2"].
    timeout_s: how long the loading and each call may take. idempotent: a call whose worker died runs once more.
    on_death: "rebuild", so that the next call opens the model again, or "error".

    Raises InvalidArgument for a file that is none of these, RemoteError for what its library said, and as a call of an
    isolated function does.
    """
    file = ModelFile.of(path)
    if (file.kind == SAFETENSORS) != (cls is not None):
        text = "weights without a class; pass cls=" if cls is None else f"no weights but {file.kind}; leave cls out"
        raise InvalidArgument(f"lz.load: {file.path} is {text}")
    if cls is None and (args or kwargs):
        raise InvalidArgument("lz.load: args and kwargs are for the constructor of cls")
    options = options_of(Options, timeout_s=timeout_s, idempotent=idempotent)
    where = env_of(env, file.path.stem)
    made = _Opener(file, where, options, on_death)
    given: tuple[Any, ...] = (str(file.path), file.sha256)
    if cls is not None:
        given = (*given, reference(cls).to_tree(), list(args), dict(kwargs or {}))
    proxy = made(*given)
    try:
        told = proxy.describe()
        return Model(file, made, proxy, Signature(made._label, *ports(told)), options)
    except ProtocolError as exc:
        proxy.close()
        raise BackendError(f"{made._label}: its worker says {exc.message}", backend=where.backend) from exc
    except BaseException:
        proxy.close()
        raise


class _Opener(IsolatedClass):
    """What opens a model of one file."""

    def __init__(self, file: ModelFile, where: FunctionEnv, options: Options, on_death: str) -> None:
        self._file_name = file.path.name
        super().__init__(None, SURFACE, where, options, Code.installed(frames.MODELS, file.kind), on_death)

    @property
    def _label(self) -> str:
        return self._file_name


class Model:
    """A model that is open in an environment. Called with its inputs, by position or by name, it gives its output, or a
    tuple of several: torch tensors where an input is one, else NumPy arrays. Threads may share it."""

    def __init__(self, file: ModelFile, opener: _Opener, proxy: Any, signature: Signature, options: Options) -> None:
        self._file, self._opener, self._proxy = file, opener, proxy
        self._signature, self._options = signature, options

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Names, dtypes and shapes, as far as the file tells them."""
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """As inputs."""
        return self._signature.outputs

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def sha256(self) -> str:
        return self._file.sha256

    @property
    def kind(self) -> str:
        """ "onnx", "torchscript", "exported" or "safetensors"."""
        return self._file.kind

    @property
    def env(self) -> FunctionEnv:
        return self._opener.env

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. Inputs are lent: they must not change before it returns, and those in shared memory are not copied.
        Raises InvalidArgument for what no input is, and as a call of an isolated function does."""
        return self._start(args, kwargs).finish()

    def submit(self, *args: Any, **kwargs: Any) -> FunctionFuture:
        """Send a call and return at once. Inputs must not change before it is done."""
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def options(self, **changes: Any) -> Model:
        """The same open model, whose calls have other options: timeout_s, idempotent. Raises InvalidArgument."""
        unknown = changes.keys() - {"timeout_s", "idempotent"}
        if unknown:
            raise InvalidArgument(f"a model has no option {min(unknown)}; allowed: timeout_s, idempotent")
        options = options_of(replace, self._options, **changes)
        return Model(self._file, self._opener, self._proxy, self._signature, options)

    def last_report(self) -> FunctionReport:
        """Of this thread's last call of it: who served it, what was copied. Raises InvalidArgument before the first."""
        return self._opener.last_report()

    def close(self) -> None:
        """Let go of it in the worker. A second time does nothing; calls after that are InvalidArgument."""
        self._proxy.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<lz.Model {self._file.path.name} ({self.kind}) in {self.env.backend}>"

    def _start(self, args: Any, kwargs: Any) -> Use:
        signature, opener = self._signature, self._opener
        given = signature.bind(args, kwargs)
        room = signature.room(signature.sizes(given))
        if room > opener._room:
            opener._room = room
        if self.kind == ONNX:
            args, kwargs = tuple(given[port.name] for port in signature.inputs), {}
        there = "numpy" if self.kind == ONNX else "torch"
        torch = sys.modules.get("torch")
        is_torch = torch is not None and any(isinstance(one, torch.Tensor) for one in given.values())
        libraries = (there, "torch" if is_torch else "numpy")
        remote = self._proxy._lz
        return Use(remote, opener, frames.METHOD, "run", args, kwargs, self._options, None, libraries)
