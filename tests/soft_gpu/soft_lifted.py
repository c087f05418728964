"""The provider of the backends whose calls are lifted: its kernels are machine code of soft_kernels.py, which it
launches by the driver. LZ_SOFT_ROOT: the repository. LZ_SOFT_NO_CUPTI: nobody sees the machine code. A file VARIANTS
beside this one: as JSON, of ops what their kernels do wrong (soft_faults.py)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from layerzero.ipc.cuda.kernels import config_of
from layerzero.ipc.lifting.form import digest
from layerzero.workers.provider import Block, Bound, Call, Loaded

VARIANTS = "variants.json"
_CLUSTER = ((4, struct.pack("=III", 1, 1, 1).ljust(64, b"\0")),)  # an attribute of each launch


def load() -> Loaded:
    sys.path.append(os.environ["LZ_SOFT_ROOT"])
    from tests.soft_gpu import soft_gpu, soft_kernels

    loaded = soft_kernels.install(soft_gpu.install())
    _watch(loaded)
    name, variants = os.environ["LZ_TOY_NAME"], Path(__file__).with_name(VARIANTS)
    kernels = _Kernels(loaded, json.loads(variants.read_text()) if variants.is_file() else {})
    ops = {
        "silu": kernels.silu,
        "matmul": kernels.matmul,
        "gelu": kernels.gelu,
        "layer_norm": kernels.layer_norm,
        "append_kv": kernels.append_kv,
    }
    return Loaded(
        versions={"soft": "1.0"},
        kernels={f"{name}.{op}": kernels.bind(make) for op, make in ops.items()},
        on_stream=kernels.on_stream,
    )


def _watch(loaded: Any) -> None:
    """Let the worker see what is loaded, as CUPTI would."""
    from layerzero.workers.gpu.lifting.modules import Modules

    if "LZ_SOFT_NO_CUPTI" in os.environ:
        return
    for modules in [one for one in gc.get_objects() if type(one) is Modules]:  # none in a probe

        def on_load(handle: int, code: bytes, modules: Modules = modules) -> None:
            modules.add(code)
            modules._by_handle[handle] = [digest(code)]

        modules.problem, loaded.on_load = "", on_load


Launch = Callable[[int], None]  # on a stream


class _Kernels:
    """`stream`: that kernels go to."""

    def __init__(self, loaded: Any, variants: dict[str, str]) -> None:
        self._loaded, self._driver, self._variants = loaded, loaded.driver, variants
        self._functions: dict[str, int] = {}
        self._stream = 0

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def bind(self, make: Callable[..., Sequence[Launch]]) -> Callable[..., Bound]:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            steps = make(call, inputs, outputs)

            def bound() -> None:
                for step in steps:
                    step(self._stream)

            return bound

        return bind

    def _function(self, name: str) -> int:
        """Its module is loaded when it is used for the first time."""
        if name not in self._functions:
            variant = self._variants.get(name.partition("<")[0], "")
            name_of = f"{name}/{variant}" if variant else name
            code = b"soft:%s\0.text.%s\0" % (name_of.encode(), name_of.encode())
            self._functions[name] = self._loaded.function(self._loaded.load_module(code), name_of)
        return self._functions[name]

    def _kernel(self, name: str, *params: Any) -> Launch:
        """Blocks are tensors; None is one that is left out."""
        from tests.soft_gpu.soft_kernels import tensor_words

        def words(param: Any) -> bytes:
            if isinstance(param, Block):
                return tensor_words(param.device.pointer, param.spec)
            return (
                tensor_words(0, None) if param is None else struct.pack("=d" if type(param) is float else "=q", param)
            )

        def launch(stream: int) -> None:
            buffers = [ctypes.create_string_buffer(words(param)) for param in params]
            table = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
            config = config_of((3, 2, 1), (32, 1, 1), 0, _CLUSTER)
            config.stream = stream
            self._loaded.launch_kernel(config, self._function(name), table)

        return launch

    def silu(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Block]) -> Sequence[Launch]:
        return (self._kernel("silu<float>", outputs[0], inputs[0]),)

    def matmul(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Block]) -> Sequence[Launch]:
        return (self._kernel("matmul<float>", outputs[0], *inputs),)

    def gelu(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Block]) -> Sequence[Launch]:
        """By way of memory of its own: zeros, to which the kernel adds."""
        (out,), is_tanh = outputs, int(call.attrs["approximate"] == "tanh")
        from layerzero.ipc.vocabulary.tensors import TensorSpec
        from layerzero.workers.provider import DeviceMemory

        spec = TensorSpec.contiguous(out.spec.dtype, out.spec.shape)
        nbytes = max(spec.span_bytes, 1)
        between = Block(DeviceMemory(self._driver.allocate(nbytes), nbytes, 0), spec)  # nobody frees it
        at = between.device.pointer
        last: Launch = self._kernel("store<float>", out, between)
        if spec == out.spec and spec.numel:
            last = lambda stream: self._driver.copy_on_device(out.device.pointer, at, nbytes, stream)  # noqa: E731
        return (
            lambda stream: self._loaded.fill(at, 0, 1, nbytes, stream),
            self._kernel("gelu<float>", between, inputs[0], is_tanh),
            last,
        )

    def layer_norm(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Block]) -> Sequence[Launch]:
        ndim, eps = int(call.attrs["ndim"]), float(call.attrs["eps"])
        return (self._kernel("layer_norm<float>", outputs[0], *inputs, ndim, eps),)

    def append_kv(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Block]) -> Sequence[Launch]:
        key, value, _, _, slots, *_ = inputs
        return (self._kernel("append<float>", key, value, *outputs, slots),)
