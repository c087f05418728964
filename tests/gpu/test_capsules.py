"""Capsules of calls on a real GPU: an illegal access costs a worker its context, the client copies the arguments from
its own memory, and a replay makes the call again there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.backends.torch_toy import ASSERT, ILLEGAL, SLOW
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, Site, wait_until

import layerzero as lz
from layerzero.client.capsules import form, store
from layerzero.client.tools import shrink, under
from layerzero.client.tools.replay import lay_out, on_host, own_broker, replay
from layerzero.ipc.errors import EnvError

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
if not torch.cuda.is_available():
    pytest.skip("torch sees no NVIDIA GPU", allow_module_level=True)
LOST = "GPU lost"


@pytest.fixture(scope="module")
def kept_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    return tmp_path / "capsules"


@pytest.fixture
def new(kept_store: Path, capsules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Site]]:
    made: list[Site] = []

    def make(mode: str) -> Site:
        site = gpu_site(kept_store, "one", "two", standby=0)
        made.append(site)
        site.environ["LAYERZERO_CAPSULES"] = mode
        site.environ["LAYERZERO_CAPSULE_DIR"] = str(capsules)
        for name, value in site.environ.items():  # of the replay's broker, too
            monkeypatch.setenv(name, value)
        return site

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def lose_gpu(x: Any, eps: float = ILLEGAL) -> None:
    """A layer_norm by which "one" loses its GPU; "two" has the result."""
    result = lz.layer_norm(x, (x.shape[-1],), eps=eps)
    expected = torch.nn.functional.layer_norm(x.double(), (x.shape[-1],), eps=eps)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def only(folder: Path) -> form.Capsule:
    (name,) = wait_until(lambda: lz.synchronize(PATIENCE_S) or store.names(folder))  # type: ignore[func-returns-value]
    return form.read(folder / name)


def bytes_of(x: Any) -> bytes:
    return bytes(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("eps", [ILLEGAL, ASSERT], ids=["illegal address", "device assert"])
def test_shapes_are_kept_by_default_and_the_clients_context_is_whole(
    new: Callable[[str], Site], capsules: Path, eps: float
) -> None:
    new("shapes").connect()
    x = torch.randn(9, 64, device="cuda")[1:, ::2]
    lose_gpu(x, eps)
    capsule = only(capsules)
    assert (capsule.device, capsule.op, capsule.failed.backend) == ("cuda", "layer_norm", "one")
    assert capsule.failed.what == "gpu-lost"
    assert capsule.arguments[0].spec.shape == (8, 32)
    assert not capsule.has_data
    assert "driver's CUDA" in capsule.facts["gpu"]
    assert any(capsule.name in note for note in (lz.last_report() or pytest.fail("no report")).notes)
    assert float((x * 2).sum()) == pytest.approx(2 * float(x.sum()), rel=1e-4)


def test_bytes_are_those_of_the_device_and_the_call_is_made_again_there(
    new: Callable[[str], Site], capsules: Path
) -> None:
    """Strides and the start within an allocation as they were; it dies again in one backend, not in the other; under
    blocking launches, too."""
    new("full").connect()
    base = torch.randn(9, 64, device="cuda")
    x = base[1:, ::2]
    lose_gpu(x)
    capsule = only(capsules)
    (memory,) = form.memory(capsules / capsule.name, capsule)
    assert capsule.arguments[0].spec.strides == (64, 2)
    assert memory == bytes_of(base.flatten()[64 : 64 + capsule.segments[0].nbytes // 4])
    assert capsule.segments[0].offset == x.data_ptr() % 256
    lz.disconnect()
    arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, [memory], 0, device=0)
    assert arguments["x"].address % 256 == x.data_ptr() % 256
    np.testing.assert_array_equal(on_host(arguments["x"]), x.cpu().numpy())
    for variables in ({}, under.variables(under.BLOCKING, capsule)):
        found = {one.backend: one for one in replay(capsule, [memory], times=2, variables=variables)}
        assert found["one"].runs == {LOST: 2}, variables
        assert found["two"].runs == {"ok": 2}, variables
        assert found["two"].is_same


def test_random_numbers_stand_for_those_that_were_not_kept(new: Callable[[str], Site], capsules: Path) -> None:
    """bfloat16 needs nothing but NumPy here; the parameter that kills is one of the call's."""
    new("shapes").connect()
    x = torch.randn(8, 32, device="cuda", dtype=torch.bfloat16)
    lz.layer_norm(x, (32,), eps=ILLEGAL)
    capsule = only(capsules)
    lz.disconnect()
    found = {one.backend: one for one in replay(capsule, [])}
    assert found["one"].runs == {LOST: 1}
    assert found["two"].runs == {"ok": 1}


def test_bytes_are_those_of_the_call_or_there_are_none(new: Callable[[str], Site], capsules: Path) -> None:
    """torch counts writes: what the program writes right after the call is in no capsule of it."""
    new("full").connect()
    y = torch.randn(9, 32, device="cuda")
    before = bytes_of(y)
    lz.layer_norm(y, (32,), eps=ILLEGAL)
    y.mul_(2)
    capsule = only(capsules)
    if capsule.has_data:  # it was copied before that
        assert form.memory(capsules / capsule.name, capsule) == [before]
    else:
        assert capsule.left_out == "the program has written to x since the call"


def test_arguments_are_not_held_for_shapes_and_let_go_of_with_full(new: Callable[[str], Site]) -> None:
    """The allocator has the block again: at once, or when the call is done."""
    for mode in ("shapes", "full"):
        new(mode).connect()
        x = torch.randn(SLOW * 1000, device="cuda")
        lz.silu(x)
        before = torch.cuda.memory_allocated()
        nbytes = x.numel() * 4
        del x
        if mode == "shapes":
            assert torch.cuda.memory_allocated() <= before - nbytes
        lz.synchronize(PATIENCE_S)
        wait_until(lambda: torch.cuda.memory_allocated() <= before - nbytes)  # noqa: B023
        lz.disconnect()


def test_a_smaller_call_that_loses_the_gpu_is_found(new: Callable[[str], Site], capsules: Path) -> None:
    new("full").connect()
    x = torch.randn(16, 12, device="cuda")  # the last extent is a parameter of the call, too
    lose_gpu(x)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    lz.disconnect()
    with own_broker() as session:
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, 0)
        found = shrink.shrink(session, capsule, arguments, "one", device=0)
    assert (found.what, found.arguments["x"].shape) == (LOST, (1, 12))


def test_compute_sanitizer_names_the_access(new: Callable[[str], Site], capsules: Path) -> None:
    new("full").connect()
    x = torch.randn(8, 32, device="cuda")
    lose_gpu(x)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    lz.disconnect()
    try:
        under.sanitizer(os.environ)
    except EnvError as exc:
        pytest.skip(exc.message)
    variables, written = under.variables(under.SANITIZER, capsule), dict[str, str]()
    found = replay(capsule, data, backends=["one"], variables=variables, log=written.__setitem__)
    assert not found[0].is_right
    said = under.findings(written["one"])
    assert any("Invalid" in line or "illegal" in line.lower() for line in said), said
