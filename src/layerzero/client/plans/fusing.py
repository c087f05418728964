"""What passes have in common that put one call of an op in the place of several steps.

Each such call is made once when the plan is laid out, on the arrays that were recorded: so it is known that a certified
kernel serves it, under the policy in force, and that it gives what the steps gave, within what two kernels of that op
may be apart. Otherwise the steps stay as they are, and `explain` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.connection.call import Request
from layerzero.client.connection.record import kernel_of
from layerzero.client.plans.passes import Program
from layerzero.client.plans.verifying import largest_difference
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.numerics import tolerance

BOTH = 2.0  # either kernel may be off by the tolerance, in opposite directions


@dataclass
class Fusing:
    """One pass over one program: what it did, and why it did not."""

    session: Session
    program: Program
    name: str
    done: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    worst: float = 0.0

    def refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1

    def tried(self, request: Request, expected: Sequence[Any]) -> tuple[str, float, Any] | None:
        """Kernel, its us and result of a call. `expected`: parts of the result along its last dimension, in order, of
        several results each of them; nothing where the recorded ones were changed since. None, and a reason is noted,
        where it is not to be used."""
        try:
            result = self.session.run(request)
            record = self.session.last_record
            if isinstance(result, tuple):
                for one, part in zip(result, expected, strict=True):
                    self._compare(request.op, one, (part,))
            elif expected:
                self._compare(request.op, result, expected)
        except InvalidArgument as exc:
            self.refuse(exc.message)
            return None
        except LayerZeroError as exc:
            self.refuse(f"lz.{request.op}: {exc.message}")
            return None
        return kernel_of(record)[0], record[4] / 1e3 if isinstance(record, tuple) else 0.0, result

    def _compare(self, op: str, result: Any, expected: Sequence[Any]) -> None:
        """Raises InvalidArgument."""
        at = 0
        for part in expected:
            width = part.shape[-1]
            allowed = BOTH * tolerance(str(part.dtype).removeprefix("torch."), op)
            found = largest_difference(part, result[..., at : at + width])
            if found > allowed:
                raise InvalidArgument(f"its result differs by {found:.1e} of the largest number, {allowed:.1e} allowed")
            self.worst, at = max(self.worst, found), at + width

    def close(self) -> bool:
        """Write down what was done, and what was not. Whether anything was."""
        if self.done:
            shown = "; ".join(self.done[:3]) + ("; ..." if len(self.done) > 3 else "")
            told = f"{self.name}: {len(self.done)}, off by {self.worst:.1e} at most: {shown}"
            self.program.done.append(told)
            self.program.fused.append(self.name)
        for why, count in self.refused.items():
            self.program.done.append(f"{self.name}: {count} left as {'it is' if count == 1 else 'they are'}: {why}")
        return bool(self.done)
