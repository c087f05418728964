"""By what the C of the client knows calls with torch's tensors: by DLPack's C exchange, and by getters where a torch
has none."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.client.gpu import fastpath_library
from layerzero.client.gpu.fastpath import MISS, learn
from layerzero.client.gpu.lifting import keys, lifted_library

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(lifted_library.lifted is None, reason=lifted_library.why_not)

NAMES = (
    *("known", "lifts", "failed", "last", "next", "miss"),
    *("policy", "baked", "dtypes", "tensor", "parameter", "size", "is_grad_enabled", "exchange", "array"),
)
REPEATS = ("known", "calls", "outcomes", "late", "failed", "numbers", "last", "record_type", "turn_type", *NAMES[5:])


class Like:
    kind = "torch"


@pytest.fixture(params=["exchange", "getters"])
def key(request: pytest.FixtureRequest) -> Any:
    """Of a call with a tensor."""
    plain = {"known": {}, "dtypes": {}, "miss": MISS, "policy": overlay.current, "baked": overlay.baked}
    made = lifted_library.lifted.LiftedCalls(**{**dict.fromkeys(NAMES), **plain})
    learn(made, Like)  # type: ignore[arg-type]
    if request.param == "getters":
        made.learn(exchange=None)
    elif not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no C exchange")
    return lambda *tensors: made.key(request_of(*tensors))


def request_of(*tensors: Any) -> Request:
    return Request("silu", tensors, {}, lambda *_: None)  # type: ignore[arg-type, return-value]


def aligned(count: int) -> Any:
    """Zeros at a multiple of 256 bytes."""
    room = torch.zeros(count + 64, dtype=torch.float32)
    return room[-(room.data_ptr() // 4) % 64 :][:count]


def tensors() -> list[torch.Tensor]:
    """Each different from the others to a kernel; addresses aligned alike."""
    base = aligned(256)
    made = [base[:24].view(shape) for shape in [(24,), (2, 12), (12, 2), (1, 24), (24, 1), (2, 3, 4)]]
    made += [base[:24].view(2, 12).T, base[:48:2], base[:0], base[0], base[:1].expand(24), base[1:25], base[4:28]]
    made += [base.view(dtype)[:24] for dtype in (torch.int32, torch.float16, torch.bfloat16, torch.int8, torch.uint8)]
    made += [base.view(dtype)[:24] for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64)]
    made.append(aligned(24).requires_grad_())
    return made


def test_what_is_not_the_same_call_has_another_key(key: Any) -> None:
    with torch.no_grad():
        found = [key(tensor) for tensor in tensors()]
        assert None not in found
        assert len({one.hex() for one in found[:-1]}) == len(found) - 1
        assert [key(tensor) for tensor in tensors()] == found


def test_the_python_tells_the_same_calls_apart(key: Any) -> None:
    with torch.no_grad():
        all_of_them = [*tensors(), *tensors()]
        for one in all_of_them:
            for other in all_of_them:
                is_same = keys.key_of(request_of(one)) == keys.key_of(request_of(other))
                assert (key(one) == key(other)) == is_same


def test_strides_of_what_has_no_extent_do_not_fail(key: Any) -> None:
    assert key(torch.zeros(())) is not None
    assert key(torch.zeros(0, 3)) is not None


def test_what_must_be_looked_at_has_no_key(key: Any) -> None:
    """Gradients, values that are to be negated first, subclasses, tensors without memory."""
    x = torch.zeros(4)
    assert key(x.requires_grad_()) is None
    assert key(torch.zeros(4, dtype=torch.complex64).conj().imag) is None
    assert key(x.detach().as_subclass(type("Mine", (torch.Tensor,), {}))) is None
    assert key(torch.nn.Parameter(x.detach())) is None
    with torch.no_grad():
        assert key(torch.nn.Parameter(x.detach())) is not None
    assert key(torch.zeros(4, device="meta")) is None or keys.key_of(request_of(torch.zeros(4, device="meta")))


def test_nothing_of_a_tensor_is_kept(key: Any) -> None:
    import sys

    x = torch.zeros(4, 5)
    key(x)
    before = sys.getrefcount(x)
    for _ in range(100):
        key(x)
    assert sys.getrefcount(x) == before


def test_the_fast_path_of_rings_has_addresses_in_its_keys() -> None:
    plain = {"known": {}, "dtypes": {}, "miss": MISS, "policy": overlay.current, "baked": overlay.baked}
    made = fastpath_library.repeats.Repeats(**{**dict.fromkeys(REPEATS), **plain})
    learn(made, Like)  # type: ignore[arg-type]
    one, other = torch.zeros(8), torch.zeros(8)
    assert made.key(request_of(one)) == made.key(request_of(one.view(8)))
    assert made.key(request_of(one)) != made.key(request_of(other))
    assert made.key(request_of(one)) != made.key(request_of(one[:4]))


def test_keys_of_tensors_that_grow_follow_from_the_last_two(key: Any) -> None:
    """As a decoder's: views of a cache of a fixed size, and tensors that are made anew, whose strides grow, too."""
    room = aligned(4096)

    def call(n: int) -> Any:
        cache = room[:2048].view(2, 64, 16)
        return key(cache[:, :n], aligned(2 * n * 16).view(2, n, 16), room[:16])

    for count in (0, 1, 7, 40):
        assert keys.further(call(11), call(10), count, 4) == call(11 + count)
    assert keys.further(call(11), key(room[:16], room[:32], room[:16]), 1, 4) is None
