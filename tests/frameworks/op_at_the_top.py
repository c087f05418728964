"""A module that defines an op at its top: its worker imports it, and has no torch."""

from __future__ import annotations

import numpy as np
from tests.frameworks.isolated_ops import ENV

import layerzero as lz


@lz.isolated(ENV)
def halved(x: np.ndarray) -> np.ndarray:
    return x / 2


def _like(x):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


HALVED = halved.as_torch_op("lzfn::halved", fake=_like)


@lz.isolated(ENV)
def quartered(x: np.ndarray) -> np.ndarray:
    return HALVED(HALVED(x))  # in the worker the op is the function
