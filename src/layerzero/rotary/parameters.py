"""What a configuration says of rotary positions, checked: the keys are those of Transformers' rope_parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from layerzero.ipc.errors import InvalidArgument

# Of each type: what it must be told, and what it may be.
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ("factor",)),
}
TYPES = tuple(_SCALINGS)
# Names of older configurations; of "mrope" the sections are said by mrope_section.
_ALIASES = {"su": "longrope", "mrope": "default"}
_SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_FLAGS = {"truncate", "mrope_interleaved"}
_LISTS = {"short_factor", "long_factor", "mrope_section"}


class Parameters:
    """Numbers of a configuration by name; those that are missing or None are None."""

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        found = dict(given or {})
        nested = [name for name, value in found.items() if isinstance(value, Mapping)]
        if nested:
            refuse(
                f"parameters has a dict for {nested[0]!r}",
                "those of one kind of layer",
                f"pass parameters[{nested[0]!r}]",
            )
        said = found.get("rope_type") or found.get("type") or "default"
        self.type = _ALIASES.get(said, said) if isinstance(said, str) else said
        if self.type not in _SCALINGS:
            refuse(f"rope_type is {said!r}", ", ".join(TYPES), "pass one of them")
        needed, optional = _SCALINGS[self.type]
        unknown = sorted(map(str, set(found) - {*needed, *optional, *_SHARED}))
        if unknown:
            known = ", ".join((*needed, *optional)) or "nothing more"
            refuse(f"{self.type} has no {unknown[0]!r}", known, "take it out, or check rope_type")
        for name in needed:
            if found.get(name) is None:
                refuse(f"{self.type} lacks {name!r}", "all of " + ", ".join(needed), "add it to parameters")
        self._values = {name: _checked(name, value) for name, value in found.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def rotated(self, head_dim: int) -> int:
        """How many elements of a head the tables are for, twice the number of pairs."""
        if isinstance(head_dim, bool) or not isinstance(head_dim, Integral) or head_dim < 2:
            refuse(f"head_dim is {head_dim!r}", "an integer from 2 on", "pass the elements of one head")
        share = self["partial_rotary_factor"]
        # Those of "proportional" are as many as a head has: what is left out turns by an angle of 0.
        dim = int(head_dim if share is None or self.type == "proportional" else head_dim * share)
        if dim < 2 or dim % 2 or dim > head_dim:
            refuse(f"{dim} of {head_dim} elements are rotated", "an even number from 2 to head_dim", "check both")
        return dim

    def theta(self, theta: float | None) -> float:
        """The base, which configurations have inside (rope_theta) or beside."""
        own = self["rope_theta"]
        given = None if theta is None else _number("theta", theta)
        if own is not None and given is not None and own != given:
            refuse(f"theta is {theta!r} and rope_theta {own!r}", "one of them", "leave theta out")
        base: float = 10000.0 if own is None and given is None else own if given is None else given
        return base

    def listed(self, name: str, count: int) -> list[float]:
        """Numbers of a list, one for each pair."""
        values: list[float] = self[name]
        if len(values) != count:
            refuse(f"{name} has {len(values)} numbers", f"{count}, one for each pair of elements", "check head_dim")
        return values


def refuse(found: str, allowed: str, repair: str) -> NoReturn:
    """Raise InvalidArgument as ops do."""
    raise InvalidArgument(f"rotary: {found}; allowed: {allowed}; {repair}")


def count(name: str, value: Any, least: int = 1) -> int:
    """An integer from `least` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        refuse(f"{name} is {value!r}", f"an integer from {least} on", "pass such a number")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        refuse(f"{name} is {value!r}", "a finite number above 0", "pass such a number")
    return float(value)


def _checked(name: str, value: Any) -> Any:
    if name in ("rope_type", "type"):
        return value
    if name in _FLAGS:
        if not isinstance(value, bool):
            refuse(f"{name} is {value!r}", "True or False", "pass one of them")
        return value
    if name in _LISTS:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            refuse(f"{name} is {value!r}", "a list of numbers", "pass one")
        if name == "mrope_section":
            return [count(name, one, 0) for one in value]
        return [_number(name, one) for one in value]
    if name in ("mscale", "mscale_all_dim") and value == 0:
        return None  # configurations say 0 for "not given"
    return _number(name, value)
