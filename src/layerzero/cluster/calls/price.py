"""What a call costs that another node serves: the way there and back by Ray, and its kernel. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerzero.client.connection.report import Candidate, time_text
from layerzero.ipc.records import record

MARGIN = 0.8  # another node serves what a kernel here could only where its price is less than this share of the time


@record
class Way:
    """To a node and back, as measured: `hops_us` for a call of its agent without arrays, bytes a second for those."""

    hops_us: float
    bytes_per_s: float

    def transfer_us(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_s * 1e6


def way_of(empty_s: Sequence[float], loaded_s: Sequence[float], nbytes: int) -> Way:
    """Of the times of calls without arrays, and with so many bytes both ways together: the medians."""
    hops_s, loaded = _median(empty_s), _median(loaded_s)
    return Way(hops_s * 1e6, nbytes / max(loaded - hops_s, 1e-6))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def priced(
    candidate: Candidate, node: str, way: Way, nbytes: int, here_us: float | None, here_score: float | None
) -> Candidate:
    """A kernel of another node as one of this node's report. `here_us`, `here_score`: of the best kernel here, None
    without one or where it was never measured. A kernel that was never measured there counts as fast as the best here,
    so it serves only what nobody here does."""
    kernel_us = candidate.measured_us if candidate.measured_us is not None else here_us or 0.0
    price_us = way.hops_us + way.transfer_us(nbytes) + kernel_us
    kernel = f"kernel {time_text(kernel_us)}"
    if candidate.measured_us is None:
        kernel = f"{kernel} as here, not measured there" if kernel_us else "its kernel, not measured there"
    note = (
        f"on another node: {time_text(way.hops_us)} two hops + {time_text(way.transfer_us(nbytes))} for "
        f"{nbytes:,} bytes at {way.bytes_per_s / 1e6:,.0f} MB/s + {kernel}"
    )
    score = 1000.0 if here_us is None or here_score is None else here_score * here_us / price_us
    return replace(
        candidate,
        kernel_id=f"{node}/{candidate.kernel_id}",
        backend=f"{node}/{candidate.backend}",
        score=score,
        terms={"price": score},
        measured_us=price_us,
        notes=(*candidate.notes, note),
    )


def is_cheaper(price_us: float, here_us: float | None) -> bool:
    """Whether another node is to serve a call that a kernel here takes so long for."""
    return here_us is not None and price_us < MARGIN * here_us
