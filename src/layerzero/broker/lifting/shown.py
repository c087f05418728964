"""What proofs have shown: a call that is like one that was proved needs no proof of its own, and one that is like a
call whose proof is under way waits for that."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from layerzero.broker.lifting.known import Known
from layerzero.ipc.lifting.form import Lifted
from layerzero.ipc.lifting.specimen import Specimen

MAX_FAMILIES = 4096
MAX_FORMS = 16  # of a family: a library has kernels for lengths of some multiples, and for the others


class Shown:
    """For the broker's own thread."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, list[Lifted]] = {}  # the newest first
        self._waiting: dict[int, list[tuple[Known, Specimen]]] = {}  # by the number of what is tried

    def has(self, family: Hashable) -> bool:
        """Whether a call of the family was proved: the next may be like it."""
        return family in self._forms

    def add(self, family: Hashable, form: Lifted) -> None:
        """A call that was proved, or is like one that was."""
        if len(self._forms) >= MAX_FAMILIES:
            self._forms.clear()
        forms = self._forms.setdefault(family, [])
        if not any(form.is_like(one) for one in forms):
            forms.insert(0, form)
            del forms[MAX_FORMS:]

    def covers(self, family: Hashable, form: Lifted) -> bool:
        return any(form.is_like(one) for one in self._forms.get(family, ()))

    def wait(self, known: Known, specimen: Specimen, asked: Iterable[Known]) -> bool:
        """Whether one of those that are asked for is like it and being proved; then it waits for that."""
        for other in asked:
            if other is known or other.tried is None or other.family != known.family:
                continue
            if specimen.lifted.is_like(other.tried):
                known.tried = None  # nobody waits for one that waits itself
                self._waiting.setdefault(other.number, []).append((known, replace(specimen, codes={})))
                return True
        return False

    def ended(self, number: int) -> list[tuple[Known, Specimen]]:
        """Those that waited for the proof of this call, which has ended."""
        return self._waiting.pop(number, [])
