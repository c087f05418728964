"""A lifted call as its worker hands it over: with the machine code that it needs, and what it gave on trial inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.lifting.results import Result, Trials, fits
from layerzero.ipc.lifting.trial import EXTREME
from layerzero.ipc.transport.plain import pack_body, unpack_body

MAX_BYTES = 1 << 30
SEEDS = (1, 2)  # of the inputs that a kernel is tried on
SEEDS_OF_FUNCTIONS = (*SEEDS, EXTREME)


@dataclass(frozen=True)
class Specimen:
    """`codes`: modules by digest. `trials`: by seed of ipc/lifting/trial.py, what each output was. Neither
    is there of a call that was not tried and is to be compared with a neighbour's, whose machine code is known."""

    lifted: Lifted
    codes: Mapping[str, bytes]
    trials: Trials

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
            if not fits(known, lifted.outputs):
                raise ValueError("each trial has a digest or a sample for each output")
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"no specimen of a lifted call: {exc}"[:500]) from exc
        return cls(lifted, found, known)


def pack_trials(trials: Trials) -> dict[str, list[Result]]:
    """As a plain value."""
    return {str(seed): list(results) for seed, results in trials.items()}


def unpack_trials(value: Any) -> dict[int, tuple[Result, ...]]:
    """Raises KeyError, TypeError, ValueError or AttributeError for what `pack_trials` does not give."""
    return {int(seed): tuple(map(_result, results)) for seed, results in value.items()}


def _code(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError("machine code must be bytes")
    return value


def _result(value: Any) -> Result:
    if type(value) is not bytes and (type(value) is not str or len(value) > 200):
        raise TypeError("a digest must be text, a sample bytes")
    return value
