"""What torch is told of one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import layerzero as lz
from layerzero.torch import autocasting, batching, fakes, gradients

ANY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OpEntry:
    """`arguments` are those of the lz function of this name, in torch's schema language, without `out`, `backend` and
    `timeout_s`, which all have. `only_here` names those that the lz function lacks: they concern gradients alone.
    `mutates`: writes into arguments and returns nothing, as the schema says with (a!).

    `formula` gives gradients; without one a backward pass is refused by name. `saves` has what it reads: for each
    tensor ("out" is the result) the arguments that need it for their gradients, ANY for all; one that is no tensor
    needs it where it is given. `autocast` is None where tensors stay as they are, as `singles` always do, which are
    float32; `batch` is None where vmap is refused
    by name.

    `results`: how many; of several there is a form with `out` where `outs` names what it writes, in their order.
    `runs`: what is called in place of the lz function.
    `with_gradients` names the op of this table that runs in place of this one where gradients are wanted. Its second
    result, or where there is no such op this one's own, is saved, too, as `also_saved`. `backward` names the op of this
    table that its formula calls where it can: accelerate reports these. `by_torch` computes calls that kernels do not,
    with torch's own gradients; None is its answer to others. `library` names the namespace of torch.ops."""

    name: str
    arguments: str
    fake: fakes.Fake
    formula: gradients.Formula | None = None
    saves: Mapping[str, frozenset[str]] = field(default_factory=dict)
    autocast: autocasting.Rule | None = None
    batch: batching.Rule | None = None
    only_here: frozenset[str] = frozenset()
    mutates: bool = False
    results: int = 1
    outs: tuple[str, ...] = ()
    runs: Callable[..., Any] | None = None
    with_gradients: str = ""
    also_saved: str = ""
    backward: str = ""
    by_torch: Callable[..., Tensor | None] | None = None
    library: str = "layerzero"
    singles: frozenset[str] = ANY

    @property
    def label(self) -> str:
        """Its name, for people."""
        return f"{self.library}::{self.name}"

    @property
    def schema(self) -> str:
        """Of the functional form, or of the one that writes into arguments."""
        return f"{self.name}({self._arguments()}) -> {self._returns()}"

    @property
    def out_schema(self) -> str:
        """Of the form that writes its results into tensors of the caller's. It returns nothing and has no
        torch.Tag.out: with that tag inductor (torch 2.13) calls it in place of the functional form, with the arguments
        in another order."""
        written = ", ".join(f"Tensor({mark}!) {name}" for mark, name in zip("abcd", self.written, strict=False))
        return f"{self.name}.out({self._arguments()}, {written}) -> ()"

    @property
    def written(self) -> tuple[str, ...]:
        """What the `out` form writes; nothing where there is no such form."""
        return self.outs or (("out",) if self.results == 1 and not self.mutates else ())

    @property
    def call(self) -> Callable[..., Any]:
        """What reaches a kernel."""
        return self.runs or getattr(lz, self.name)

    def _returns(self) -> str:
        if self.mutates:
            return "()"
        return "Tensor" if self.results == 1 else f"({', '.join(['Tensor'] * self.results)})"

    def _arguments(self) -> str:
        star = "" if "*" in self.arguments else "*, "
        return f"{self.arguments}, {star}str? backend=None, float? timeout_s=None"
