"""How fast each pair of elements turns: angles are position times frequency. Computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerzero.rotary.parameters import Parameters, count, refuse

Floats = NDArray[np.float64]


class Frequencies(NamedTuple):
    """inverse: float64 (pairs,), radians for each step of position, the fastest first. attention_factor: what cosines
    and sines are multiplied by."""

    inverse: Floats
    attention_factor: float


def frequencies(
    head_dim: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    theta: float | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> Frequencies:
    """The frequencies of head_dim / 2 pairs, or of the part that is rotated, in float64.

    parameters: rope_parameters of a model's configuration, or rope_scaling of older ones; None for none. Types:
    default, linear, dynamic, yarn, longrope, llama3, proportional. theta: the base where parameters has no rope_theta,
    default 10000. max_position_embeddings: of the configuration; dynamic needs it, and yarn and longrope do without a
    factor. seq_len: how long the sequence is, which decides for dynamic and longrope; without it they are those of
    sequences that the model was trained on. Raises InvalidArgument, of unknown keys as well.
    Sources: docs/rotary.md.
    """
    return _frequencies(head_dim, Parameters(parameters), theta, max_position_embeddings, seq_len)


def _frequencies(
    head_dim: int, said: Parameters, theta: float | None, longest: int | None, seq_len: int | None
) -> Frequencies:
    dim = said.rotated(head_dim)
    call = _Call(
        dim,
        said,
        said.theta(theta),
        None if longest is None else count("max_position_embeddings", longest),
        None if seq_len is None else count("seq_len", seq_len, 0),
    )
    return _KINDS[said.type](call)


class _Call(NamedTuple):
    dim: int
    said: Parameters
    theta: float
    longest: int | None
    seq_len: int | None

    @property
    def plain(self) -> Floats:
        return _powers(self.theta, self.dim)

    def limit(self) -> int:
        if self.longest is None:
            refuse(f"{self.said.type} lacks max_position_embeddings", "a number", "pass that of the configuration")
        return self.longest

    def growth(self) -> float:
        """factor, or by how much the model's limit is above what it was trained with."""
        factor: float | None = self.said["factor"]
        return self.limit() / self.said["original_max_position_embeddings"] if factor is None else factor


def _powers(theta: float, dim: int) -> Floats:
    """theta^(-2 i / dim) of each pair i."""
    return np.asarray(np.float64(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))


def _default(call: _Call) -> Frequencies:
    return Frequencies(call.plain, 1.0)


def _linear(call: _Call) -> Frequencies:
    return Frequencies(call.plain / call.said["factor"], 1.0)


def _proportional(call: _Call) -> Frequencies:
    """A head's whole extent counts, and pairs beyond the part that is rotated stay."""
    share, factor = call.said["partial_rotary_factor"], call.said["factor"]
    turning = int((1.0 if share is None else share) * call.dim // 2)
    inverse = call.plain / (1.0 if factor is None else factor)
    inverse[turning:] = 0.0
    return Frequencies(inverse, 1.0)


def _dynamic(call: _Call) -> Frequencies:
    """theta grows with the sequence, once that is longer than the model's limit."""
    limit, factor = call.limit(), call.said["factor"]
    if call.dim < 4:
        refuse(f"{call.dim} elements are rotated", "4 at least for dynamic", "check head_dim")
    length = max(call.seq_len or 0, limit)
    stretched = call.theta * (factor * length / limit - (factor - 1)) ** (call.dim / (call.dim - 2))
    return Frequencies(_powers(stretched, call.dim), 1.0)


def _yarn(call: _Call) -> Frequencies:
    """Pairs that turn more than beta_fast times within the trained length stay, those that turn less than beta_slow
    times are slowed by the factor, and between them a ramp leads from one to the other."""
    said, factor, trained = call.said, call.growth(), call.said["original_max_position_embeddings"]
    fast, slow = said["beta_fast"] or 32.0, said["beta_slow"] or 1.0

    def pair_of(turns: float) -> float:
        return call.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(call.theta))

    low, high = pair_of(fast), pair_of(slow)
    if said["truncate"] is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, call.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(call.dim // 2) - low) / (high - low), 0.0, 1.0)
    plain = call.plain
    return Frequencies(plain / factor * ramp + plain * (1.0 - ramp), _yarn_attention(said, factor))


def _yarn_attention(said: Parameters, factor: float) -> float:
    own: float | None = said["attention_factor"]
    if own is not None:
        return own

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, whole = said["mscale"], said["mscale_all_dim"]
    return scale(weight) / scale(whole) if weight and whole else scale(1.0)


def _longrope(call: _Call) -> Frequencies:
    """A factor for each pair, from one of two lists: for sequences within the trained length, and for longer ones."""
    said, trained = call.said, call.said["original_max_position_embeddings"]
    is_long = call.seq_len is not None and call.seq_len > trained
    own: float | None = said["attention_factor"]
    if own is None:
        factor = call.growth()
        own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    lists = {name: said.listed(name, call.dim // 2) for name in ("short_factor", "long_factor")}
    return Frequencies(call.plain / np.array(lists["long_factor" if is_long else "short_factor"]), own)


def _llama3(call: _Call) -> Frequencies:
    """Slow pairs are slowed by the factor, fast ones stay; between the two limits by how often a pair turns within the
    trained length."""
    said, plain = call.said, call.plain
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    if low >= high:
        refuse(f"low_freq_factor is {low} and high_freq_factor {high}", "a higher high_freq_factor", "check both")
    turns = said["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Frequencies(plain * kept + plain / said["factor"] * (1.0 - kept), 1.0)


_KINDS: dict[str, Callable[[_Call], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
