"""What is stored about kernels: rows with the identity they are valid for, and the checksum that guards them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """All that a measurement of one backend depends on besides the call. A field that the backend lacks is empty."""

    device_uuid: str = ""
    driver_version: str = ""
    cuda_version: str = ""
    backend_version: str = ""
    torch_version: str = ""
    layerzero_version: str = ""
    capabilities_hash: str = ""
    env_hash: str = ""

    @property
    def hash(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Measurement:
    """One row of `measurements`, in the order of its columns. `measured_at`: seconds since 1970."""

    kernel_id: str
    key: str
    identity: str
    backend: str
    count: int
    median_us: float
    p95_us: float
    variance_us: float
    warmup_ms: float
    measured_at: float

    @property
    def is_possible(self) -> bool:
        times = (self.p95_us, self.variance_us, self.warmup_ms, self.measured_at)
        return (
            all(type(x) is str for x in (self.kernel_id, self.key, self.identity, self.backend))
            and type(self.count) is int
            and self.count > 0
            and all(type(x) is float and math.isfinite(x) and x >= 0.0 for x in (self.median_us, *times))
            and self.median_us > 0.0
        )


def checksum(values: Sequence[Any]) -> bytes:
    """Of one row: SQLite's own checks do not see a flipped bit in a number."""
    return hashlib.blake2b(json.dumps(list(values), default=repr).encode(), digest_size=16).digest()
