"""What _lending.h makes of torch's tensors, as test_lending.py has it of NumPy's arrays."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from layerzero.client.connection import arena as arenas
from layerzero.client.session import repeats
from layerzero.functions.calling import Arguments
from layerzero.ipc.transport.plain import unpack_tree
from layerzero.ipc.transport.wire import REF

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(repeats.library is None, reason="not compiled")
DTYPES = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Registry(dict[Any, int]):
    """Arenas that the broker knows."""

    on_change: Any = None


def test_tensors_in_arenas_are_lent_as_the_python_does() -> None:
    registry = Registry()
    made = repeats.Repeats(mock.Mock(), mock.Mock(), registry, mock.Mock())  # type: ignore[arg-type]
    made.learn({"torch"})
    has_exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    memory, arena, _ = arenas.pool.allocate(4096)
    registry[arena] = 7
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    for dtype in DTYPES:
        base = flat.view(dtype)[:24].view(4, 6)
        for one in (base, base[1:, ::2], base.T, base[0, 1], base[:, :1], base[:1].expand(3, 6), base[:, None]):
            found, given = made.lend((one, 3)), Arguments((one, 3), {}, ("plain",))
            assert (found is not None) == has_exchange
            if found is not None:
                assert unpack_tree(found[0]) == given.trees[0]
                assert found[1:] == (REF.pack(7, 0, *given.ranges[0][1:]), 1, one.nbytes)
    floats = flat.view(torch.float32)
    for other in (floats[:0], torch.ones(3), floats.view(torch.complex64)):
        assert made.lend((other,)) is None
    wanting = floats.clone().requires_grad_()
    assert made.lend((floats.view(torch.complex64).conj().imag,)) is None  # negated when it is read
    assert made.lend((wanting,)) is None
    assert made.lend((flat[1:5].view(torch.uint8),)) is not None or not has_exchange
    arenas.pool.caches.discard(made)
