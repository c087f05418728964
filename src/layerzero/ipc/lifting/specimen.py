"""A lifted call as its worker hands it over: with the machine code that it needs, and what it gave on trial inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.transport.plain import pack_body, unpack_body

MAX_BYTES = 1 << 30
SEEDS = (1, 2)  # of the inputs that a kernel is tried on


@dataclass(frozen=True)
class Specimen:
    """`codes`: modules by digest. `trials`: by seed of ipc/lifting/trial.py, the digest of each output's bytes. Neither
    is there of a call that was not tried and is to be compared with a neighbour's, whose machine code is known."""

    lifted: Lifted
    codes: Mapping[str, bytes]
    trials: Mapping[int, tuple[str, ...]]

    def pack(self) -> bytes:
        codes, trials = list(self.codes.values()), pack_trials(self.trials)
        return pack_body({"lifted": self.lifted.pack(), "codes": codes, "trials": trials})

    @classmethod
    def unpack(cls, data: bytes) -> Specimen:
        """Rebuild and check what a worker said. Raises ProtocolError."""
        value = unpack_body(data)
        try:
            lifted, codes, trials = Lifted.unpack(value["lifted"]), value["codes"], value["trials"]
            found = {digest(_code(code)): code for code in codes}
            known = unpack_trials(trials)
            if set(found) != (set(lifted.codes) if known else set()):
                raise ValueError("the machine code is not what the steps name, or was not tried")
            if any(len(digests) != len(lifted.outputs) for digests in known.values()):
                raise ValueError("each trial has a digest for each output")
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"no specimen of a lifted call: {exc}"[:500]) from exc
        return cls(lifted, found, known)


def pack_trials(trials: Mapping[int, tuple[str, ...]]) -> dict[str, list[str]]:
    """As a plain value."""
    return {str(seed): list(digests) for seed, digests in trials.items()}


def unpack_trials(value: Any) -> dict[int, tuple[str, ...]]:
    """Raises KeyError, TypeError, ValueError or AttributeError for what `pack_trials` does not give."""
    return {int(seed): tuple(map(_text, digests)) for seed, digests in value.items()}


def _code(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError("machine code must be bytes")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 200:
        raise TypeError("a digest must be text")
    return value
