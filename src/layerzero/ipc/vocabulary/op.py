"""What an op is: the names of its tensors and attributes (ipc/vocabulary/ops.py has them all)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Op:
    """`inputs` and `outputs` name the tensors in wire order; names in `optional` may be absent (None), those in
    `indices` hold integers or bools, whatever the dtype of the data: where to look, counts, seeds; those in `singles`
    float32. `options` names the attributes that a call may lack; a kernel takes those that its descriptor names.

    An op whose output size depends on the data (`sized_output`) returns the sizes it used, and raises
    OutputTooSmall when the buffers are too small.

    An output that has the name of an input is that tensor of the caller's, with the same spec in the same memory. A
    kernel writes parts of it and leaves the rest as it was; it reads and writes it through the output's block, which
    alone is writable. Such an op must be idempotent: when a worker dies, another runs the call on what the first has
    left there.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)
    optional: frozenset[str] = frozenset()
    indices: frozenset[str] = frozenset()
    singles: frozenset[str] = frozenset()
    attrs: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    sized_output: bool = False

    @cached_property
    def in_place(self) -> tuple[str, ...]:
        """The outputs that are inputs as well."""
        return tuple(name for name in self.outputs if name in self.inputs)

    def has_attrs(self, names: Iterable[str]) -> bool:
        """Whether a call may have just these attributes."""
        given = set(names)
        return set(self.attrs) - self.options <= given <= set(self.attrs)

    @cached_property
    def runs_on_gpus(self) -> bool:
        """A call on a GPU has arrays to say where it runs, and results of known sizes."""
        return bool(self.inputs) and not self.sized_output
