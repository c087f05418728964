"""What can be said of the providers without their libraries. tests/envs has the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.capabilities.descriptor import load
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, DeviceMemory
from layerzero.workers.providers import _dlpack, zentorch
from layerzero.workers.providers.mlx import _runs

ROOT = Path(__file__).parents[3]
DESCRIPTORS = sorted((ROOT / "src" / "layerzero" / "capabilities" / "descriptors").glob("*.json"))
PROVIDERS = sorted(
    path.stem for path in (ROOT / "src" / "layerzero" / "workers" / "providers").glob("*.py") if path.stem != "__init__"
)


def test_modules_import_without_their_libraries() -> None:
    """Names like `mlx` and `tokenizers` are those of the libraries; the import must find our module, and only that."""
    names = [f"layerzero.workers.providers.{name}" for name in PROVIDERS]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    libraries = {"torch", "numpy", "onnx", "onnxruntime", "mlx", "tokenizers", "zentorch", "triton", "flashinfer"}
    libraries |= {"cudnn", "flash_attn", "xformers", "liger_kernel", "jax", "cupy"}
    libraries |= {"numba", "llvmlite", "scipy_openblas64"}
    assert not loaded & libraries


@pytest.mark.parametrize("value", [None, "1", ""])
def test_zentorch_refuses_its_weight_cache(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """It would write into the caller's weights, or serve those of an earlier call."""
    monkeypatch.delenv(zentorch.WEIGHT_CACHE, raising=False)
    if value is not None:
        monkeypatch.setenv(zentorch.WEIGHT_CACHE, value)
    with pytest.raises(RuntimeError, match="must be '0'"):
        zentorch.load()


@st.composite
def strided_specs(draw: st.DrawFn) -> TensorSpec:
    """Views in which no two elements share memory: dimensions in any order, with gaps."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    strides, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        step *= draw(st.integers(1, 3))
        strides[dim] = step
        step *= shape[dim]
    return TensorSpec("float32", tuple(shape), tuple(strides))


@given(strided_specs())
def test_mlx_copies_every_element_to_its_place(spec: TensorSpec) -> None:
    """The output's strides are the caller's; what lies between the elements is not ours to write."""
    order = sorted(range(spec.ndim), key=lambda dim: -spec.strides[dim])
    values = np.arange(1, spec.numel + 1, dtype=np.float32).reshape(spec.shape)
    memory = np.zeros(spec.span_bytes // 4, np.float32)
    dense = np.ascontiguousarray(values.transpose(order)).reshape(-1)
    for target, source in _runs(spec.permute(*order)):
        memory[target] = dense[source]
    expected = np.zeros_like(memory)
    np.lib.stride_tricks.as_strided(expected, spec.shape, tuple(4 * stride for stride in spec.strides))[...] = values
    assert np.array_equal(memory, expected)


class Exported:
    """What NumPy imports: host memory that a capsule says is where kDLCPU is."""

    def __init__(self, memory: DeviceMemory, spec: TensorSpec) -> None:
        self.memory, self.spec = memory, spec

    def __dlpack__(self, **_: object) -> object:
        return _dlpack.capsule(self.memory, self.spec)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8"])
def test_capsule_describes_the_memory(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """A wrong field here is a wrong address or extent on a GPU."""
    monkeypatch.setattr(_dlpack, "CUDA", 1)
    values = np.arange(24).astype(dtype).reshape(2, 3, 4)
    memory = DeviceMemory(values.ctypes.data, values.nbytes, 0)
    spec = TensorSpec.contiguous(dtype, (2, 3, 4))
    assert _dlpack.address(_dlpack.capsule(memory, spec)) == values.ctypes.data
    found = np.from_dlpack(Exported(memory, spec))
    assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())
    assert found.ctypes.data == values.ctypes.data


def test_block_says_where_its_memory_is() -> None:
    """A kernel of the CPU that is given an address of a GPU would read whatever is there in this process."""
    spec = TensorSpec.contiguous("uint8", (4,))
    on_gpu, on_host = Block(DeviceMemory(4096, 4, 0), spec), Block(memoryview(b"abcd"), spec)
    assert (on_gpu.device.pointer, bytes(on_host.host)) == (4096, b"abcd")
    with pytest.raises(TypeError, match="lies on GPU 0; this kernel computes on the CPU"):
        on_gpu.host  # noqa: B018
    with pytest.raises(TypeError, match="lies in host memory; this kernel computes on a GPU"):
        on_host.device  # noqa: B018


def test_dense_outputs_are_one_copy() -> None:
    """A BSHD buffer seen as BHSD has no gaps, so it takes a single slice."""
    assert len(_runs(TensorSpec.contiguous("float32", (2, 7, 4, 16)))) == 1


def test_descriptors_name_known_ops_and_arguments() -> None:
    """A misspelt argument or attribute would never match, and so never constrain."""
    for path in DESCRIPTORS:
        capability = load(path)
        assert capability.backend == path.stem
        for op, kernels in capability.ops.items():
            for kernel in kernels:
                assert f"{kernel.kernel_id}.".startswith(f"{capability.backend}.{op}.")
                assert {*kernel.optional_args, *kernel.required_args} <= OPS[op].optional
                assert kernel.attrs.keys() <= set(OPS[op].attrs)


def test_priorities_of_an_op_differ() -> None:
    """With equal ones the choice between two kernels for one device would hang on their names."""
    priorities: dict[tuple[str, str], list[int]] = {}
    for path in DESCRIPTORS:
        capability = load(path)
        for op, kernels in capability.ops.items():
            priorities.setdefault((capability.platform, op), []).extend(kernel.priority for kernel in kernels)
    assert {op: sorted(found) for op, found in priorities.items()} == {
        op: sorted(set(found)) for op, found in priorities.items()
    }
