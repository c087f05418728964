"""Calls of one program on several real GPUs: each on the GPU of its tensors, lifted there as on the first one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, Site

import layerzero as lz

pytest.importorskip("torch")
from tests.gpu.test_calls import F, torch
from tests.gpu.test_lifted_calls import WARM, lift

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# Each test has shapes of its own: what an earlier one has lifted needs no worker.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def new_site(store: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(isolation: str = "lifted") -> Site:
        made.append(gpu_site(store, "one", isolation=isolation))
        return made[-1].start()

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def on_each(*shape: int) -> list[Any]:
    """Other numbers on each GPU: what is read on the wrong one is wrong."""
    return [torch.full(shape, 0.5 + n, device=f"cuda:{n}").cumsum(-1) / shape[-1] for n in range(2)]


def check(x: Any, call: Callable[[Any], Any], right: Callable[[Any], Any]) -> None:
    result = call(x)
    assert result.device == x.device
    assert torch.allclose(result, right(x), rtol=1e-5, atol=1e-5)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("isolation", ["subprocess", "lifted"])
def test_calls_run_where_their_tensors_are(new_site: Callable[..., Site], isolation: str) -> None:
    """In turns, so that nothing that is kept of one GPU's call may serve the other's."""
    new_site(isolation).connect()
    xs = on_each(33, 70)
    for _ in range(WARM):
        for x in xs:
            check(x, lz.silu, F.silu)
    if isolation == "lifted":
        for x in xs:
            lift(lambda x=x: lz.silu(x))
            check(x, lz.silu, F.silu)


def test_a_matrix_product_and_attention_are_lifted_on_each(new_site: Callable[..., Site]) -> None:
    """Kernels with scratch, which each GPU has its own of, on two streams at once."""
    new_site().connect()
    for x in on_each(64, 512):
        w, heads = x.T.contiguous(), x.view(1, 8, 64, 64)
        lift(lambda x=x, w=w: lz.matmul(x, w))
        lift(lambda h=heads: lz.attention(h, h, h, is_causal=True))
        streams = [torch.cuda.Stream(x.device) for _ in range(2)]
        torch.cuda.synchronize(x.device)
        for stream in streams * 10:
            with torch.cuda.stream(stream):
                product, mixed = lz.matmul(x, w), lz.attention(heads, heads, heads, is_causal=True)
                torch.testing.assert_close(product, x @ w, rtol=1e-3, atol=1e-3)
                right = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                torch.testing.assert_close(mixed, right, rtol=1e-3, atol=1e-3)


def test_a_graph_of_the_second_gpu_holds_lifted_calls(new_site: Callable[..., Site]) -> None:
    site = new_site()
    site.connect()
    x = on_each(66, 1030)[1]
    lift(lambda: lz.silu(x))
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own may be of the first one
            y = lz.silu(x)
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
        for value in range(3):
            x.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, F.silu(x))


HIDDEN = f"""
import json, sys, torch
lz.connect(runtime_dir=sys.argv[1])
x = torch.full((67, 1030), 3.0, device="cuda")
assert torch.cuda.device_count() == 1
for _ in range({WARM}):
    y = lz.silu(x)
torch.cuda.synchronize()
right = bool(torch.allclose(y, torch.nn.functional.silu(x)))
uuid = str(torch.cuda.get_device_properties(0).uuid)
print(json.dumps({{"right": right, "backend": lz.last_report().backend, "uuid": uuid}}))
"""


def test_a_program_that_sees_the_second_gpu_alone_is_served_there(new_site: Callable[..., Site]) -> None:
    """Ordinals are of a process; the broker, which sees both, goes by UUID."""
    site = new_site()
    site.environ["CUDA_VISIBLE_DEVICES"] = "1"
    with site.python(HIDDEN) as client:
        out, _ = client.communicate(timeout=2 * PATIENCE_S)
    said = json.loads(out.splitlines()[-1])
    assert (said["right"], said["backend"]) == (True, "one")
    assert said["uuid"] == str(torch.cuda.get_device_properties(1).uuid)


def test_the_worker_dies_with_calls_on_both(new_site: Callable[..., Site]) -> None:
    """Each stream goes on, and what comes later is right on both."""
    site = new_site("subprocess")
    site.connect()
    xs = on_each(68, 1030)
    for x in xs * 3:
        check(x, lz.silu, F.silu)
    results = [(x, lz.silu(x)) for x in xs * 50]
    os.kill(site.backend("one")["pid"], signal.SIGKILL)
    results += [(x, lz.silu(x)) for x in xs * 50]
    assert lz.synchronize(PATIENCE_S) is None
    for x, result in results:
        torch.cuda.synchronize(x.device)
        assert torch.allclose(result, F.silu(x), rtol=1e-5, atol=1e-5)
