"""Where arrays of a group's calls are settles which backend has them: what is chosen, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.groups import arrays, calls, choices
from layerzero.groups.arrays import Given, Result
from layerzero.groups.libraries import refused
from layerzero.ipc.errors import EnvError, InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec


class OnGpu:
    """In the place of a tensor or array there."""

    def __init__(self, kind: str = "torch", device: int = 1, shape: tuple[int, ...] = (4, 2)) -> None:
        self.spec = TensorSpec.contiguous("float32", shape)
        self.kind, self.device = kind, device

    def new_empty(self, shape: tuple[int, ...]) -> OnGpu:
        return OnGpu(self.kind, self.device, shape)

    def described(self) -> Array:
        return Array(self.kind, self.spec, 4096, self, None, device=self.device)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to say where memory is."""
    monkeypatch.setattr(arrays, "describe", lambda x: x.described() if isinstance(x, OnGpu) else describe(x))


def test_a_tensor_on_a_gpu_goes_by_nccl_and_its_result_is_there(on_gpu: None) -> None:
    given = Given(OnGpu())
    assert (given.device, given.data, given.nbytes) == (1, None, 32)
    choice = choices.on_gpu("all_gather", given.nbytes, given.device)
    assert str(choice).splitlines() == [
        "all_gather of 32 bytes: nccl, the array is on GPU 1",
        "  not shared memory: it works on the CPU's memory",
        "  not gloo: it works on the CPU's memory",
    ]
    made = Result(given, (8, 2), None, may_be_input=False)
    assert (made.value.device, made.value.spec.shape, made.data) == (1, (8, 2), None)


def test_arrays_that_no_call_has_are_refused_by_what_and_where_they_are(on_gpu: None) -> None:
    with pytest.raises(InvalidArgument, match=r"x is a cupy array of a GPU; allowed: .*, and torch tensors of a GPU"):
        Given(OnGpu("cupy"))
    with pytest.raises(InvalidArgument, match="out is no NumPy array or torch tensor of GPU 1, as x"):
        Result(Given(OnGpu()), (4, 2), np.empty((4, 2), np.float32), may_be_input=True)


@pytest.mark.parametrize(
    ("forced", "device", "text"),
    [
        ("nccl", CPU, "x is on the CPU: nccl works on GPUs' memory; leave backend= out"),
        ("gloo", 0, "x is on GPU 0: gloo works on the CPU's memory; leave backend= out, or pass x.cpu()"),
        ("shared_memory", 2, "x is on GPU 2: shared_memory works on the CPU's memory"),
    ],
)
def test_a_backend_that_does_not_reach_the_memory_is_refused(forced: str, device: int, text: str) -> None:
    with pytest.raises(InvalidArgument) as found:
        choices.demand_place(forced, device, "x")
    assert found.value.message.startswith(text)


def test_what_reaches_the_memory_is_not() -> None:
    for forced, device in ((None, CPU), ("gloo", CPU), ("shared_memory", CPU), (None, 0), ("nccl", 0)):
        choices.demand_place(forced, device, "x")
    assert calls.ALL_REDUCE.cannot_nccl("uint16") == "nccl adds up no uint16"
    assert not calls.ALL_GATHER.cannot_nccl("uint16")


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks() -> None:
    """NCCL would wait for ever, or fail without their names. gloo is on none."""
    told: dict[int, Any] = {0: ["", "H200 a"], 1: ["", "H200 b"], 2: ["", "H200 a"], 3: ["", "H200 b"]}
    error = refused("nccl", "tp", told)
    assert isinstance(error, InvalidArgument)
    assert error.message.startswith("give each rank of group 'tp' a GPU of its own")
    assert error.message.endswith("ranks 0, 2 are on H200 a; ranks 1, 3 are on H200 b")
    assert refused("nccl", "tp", {0: ["", "H200 a"], 1: ["", "H200 b"]}) is None
    assert refused("gloo", "tp", {0: ["", ""], 1: ["", ""]}) is None


def test_who_cannot_start_a_library_is_told_to_all_before_anybody_waits() -> None:
    error = refused("nccl", "tp", {0: ["", "H200 a"], 1: ["install a torch with NCCL", "H200 a"]})
    assert isinstance(error, EnvError)
    assert error.message == "install a torch with NCCL\n(rank 1 of group 'tp' cannot start nccl)"


def test_a_rank_stays_on_its_gpu() -> None:
    choices.demand_its_gpu(None, 1)
    choices.demand_its_gpu(SimpleNamespace(device=1), 1)
    with pytest.raises(InvalidArgument, match="x is on GPU 1: this rank's nccl runs on GPU 0; move x there"):
        choices.demand_its_gpu(SimpleNamespace(device=0), 1)
