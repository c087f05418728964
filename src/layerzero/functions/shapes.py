"""Results whose shapes are declared: their memory is there before the function runs."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.client.arrays.recognition import describe
from layerzero.client.capsules.of_function import CALL
from layerzero.client.gpu.arrays import give, new_like
from layerzero.client.session.session import Session
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call, Owner
from layerzero.functions.capsules import Asked
from layerzero.functions.express import Express
from layerzero.functions.gpu_express import GpuExpressCall
from layerzero.functions.lifting import LiftedCall, Lifting
from layerzero.functions.options import Options
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

OUT = "out"  # the parameter that is given the memory of the results


def takes_out(function: Callable[..., Any] | None, options: Options) -> bool:
    """Whether a function of declared shapes writes into memory that it is given."""
    return options.shapes is not None and function is not None and OUT in inspect.signature(function).parameters


def without_out(signature: inspect.Signature) -> inspect.Signature:
    """As callers see it."""
    return signature.replace(parameters=[one for name, one in signature.parameters.items() if name != OUT])


class Shaped:
    """What a shape function says of the results of a call."""

    def __init__(self, label: str, shapes: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        """Raises InvalidArgument for what is no shape and dtype; what the shape function raises is raised as it is."""
        found = shapes(*args, **kwargs)
        several = found if isinstance(found, (list, tuple)) and not _is_pair(found) else (found,)
        try:
            self.results = [_result(one) for one in several]
        except (TypeError, ValueError, OverflowError):
            text = "allowed: (shape, dtype) or something with both, such as ((2, 3), 'float32'), or a list of them"
            raise InvalidArgument(f"{label}: shapes gives {found!r:.200}; {text}") from None

    @property
    def room(self) -> int:
        """Bytes of an answer that has them."""
        return frames.PLACED_AT + sum(frames.aligned(spec.span_bytes) for _, spec in self.results)

    @property
    def nodes(self) -> list[list[Any]]:
        """As they cross."""
        return [[library, *spec.to_wire()] for library, spec in self.results]

    def empty(self, like: Any = None) -> Any:
        """Memory of this process for them: one array, or a tuple of several; on the GPU of an array that is `like`
        them."""
        made = []
        on_gpu = None if like is None else describe(like)
        for library, spec in self.results:
            if on_gpu is not None:
                made.append(give(on_gpu, new_like(on_gpu, spec)[0]))
                continue
            module = sys.modules.get(library)
            if module is None:
                raise InvalidArgument(f"a result of {library}, which this process has not imported; import it")
            name = "bool_" if (library, spec.dtype) == ("numpy", "bool") else spec.dtype
            made.append(module.empty(spec.shape, dtype=getattr(module, name, name)))
        return made[0] if len(made) == 1 else tuple(made)


class ShapedCall(Call):
    """A call whose results have their memory before it runs."""

    def __init__(
        self,
        owner: Owner,
        given: Arguments,
        args: Any,
        kwargs: Any,
        options: Options,
        shaped: Shaped,
        *,
        has_out: bool,
        session: Session | None = None,
    ) -> None:
        super().__init__(owner, given, args, kwargs, options, session=session)
        self._shaped, self._has_out = shaped, has_out

    def _room(self) -> int:
        room = super()._room()
        return room if self._is_there else max(room, self._shaped.room)

    @property
    def _is_there(self) -> bool:
        """Whether its results are on a GPU, as its arguments are."""
        return self.given is not None and self.given.on_gpu is not None

    def _results_there(self) -> Sequence[TensorSpec]:
        return [spec for _, spec in self._shaped.results]

    def _again(self, given: Arguments, options: Options) -> Call:
        return ShapedCall(self.owner, given, self.args, self.kwargs, options, self._shaped, has_out=self._has_out)

    def _asked(self) -> tuple[Sequence[Asked], str]:
        assert self.given is not None
        return [Asked(CALL, "", frames.NOTHING, self.given, self._shaped.nodes if self._has_out else ())], ""

    def _frame(self, given: Arguments) -> Frame:
        if not self._has_out:
            return super()._frame(given)
        if given.loan is not None:
            return given.frame(frames.CALL, self.owner._places.tree(given.backends), has_out=True)
        return given.placed([frames.CALL, self.owner._places.tree(given.backends)], self._shaped.nodes)


class ShapedExpress(Express):
    """Of such calls with arrays on a GPU; others go the longer way."""

    def __init__(
        self, owner: Owner, counts: range, shapes: Callable[..., Any], names: Sequence[str] = (), *, has_out: bool
    ) -> None:
        """`names`: of the arguments, by their places."""
        super().__init__(owner, counts)
        self._shapes, self.has_out = shapes, has_out
        self._last = threading.local()  # `said`: of a thread's call that goes the longer way, until it does
        if owner._options.lift:
            self._on_gpu.lifting = Lifting(self, names, owner._options.trial)

    @property
    def not_lifted(self) -> str:
        """Why this thread's last call that might have been was not launched by this process; empty where it was."""
        lifting = self._on_gpu.lifting
        return "" if lifting is None else lifting.why

    def begin(self, args: tuple[Any, ...], loan: Any = None) -> GpuExpressCall | LiftedCall | None:
        """As Express."""
        if len(args) not in self._counts or (on_gpu := self.key_of(args)) is None:
            return None
        try:
            begun = self._on_gpu.begin(args, on_gpu, loan)
        except BaseException:
            self.said(args, {})
            raise
        if begun is not None:
            self.said(args, {})
        return begun

    def said(self, args: tuple[Any, ...], kwargs: Any) -> Shaped | None:
        """What the shape function said of this thread's last call, if that is this one, and goes the longer way. It is
        told once."""
        given, shaped = getattr(self._last, "said", ((), None))
        self._last.said = (), None
        asked = (*args, *kwargs.values())
        return shaped if len(given) == len(asked) and all(map(operator.is_, given, asked)) else None

    def results(self, args: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
        """As Express. Raises as Shaped does."""
        shaped = self._of(args)
        self._last.said = args, shaped
        return tuple(spec for _, spec in shaped.results)

    def _of(self, args: Sequence[Any]) -> Shaped:
        return Shaped(self.label, self._shapes, args, {})

    def call(self, args: Sequence[Any], session: Session, loan: Any) -> Call:
        """As Express."""
        given, options = Arguments(args, {}, self.backends, device=self._device), self.owner._options
        shaped = self._of(args)
        return ShapedCall(self.owner, given, args, {}, options, shaped, has_out=self.has_out, session=session)


def _is_pair(value: Any) -> bool:
    """(shape, dtype)."""
    if not isinstance(value, tuple) or len(value) != 2 or isinstance(value[1], (list, tuple)):
        return False
    return isinstance(value[0], (list, tuple)) and not any(isinstance(one, (list, tuple)) for one in value[0])


def _result(one: Any) -> tuple[str, TensorSpec]:
    """Library and spec of a result. Raises TypeError, ValueError, OverflowError for what is none."""
    shape, dtype = one if _is_pair(one) else (getattr(one, "shape", None), getattr(one, "dtype", None))
    return _spec_of(tuple(shape), dtype)  # type: ignore[arg-type]


@functools.lru_cache(1024)
def _spec_of(shape: tuple[Any, ...], dtype: Any) -> tuple[str, TensorSpec]:
    """Most calls give what others gave, and may wait for it no longer than a launch takes."""
    library = "torch" if type(dtype).__module__ == "torch" else "numpy"
    name = str(dtype).removeprefix("torch.") if library == "torch" else _numpy_name(dtype)
    dims = tuple(map(int, shape))
    if name not in ITEMSIZE or any(size < 0 for size in dims):
        raise ValueError(name)
    return library, TensorSpec.contiguous(name, dims)


def _numpy_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    numpy = sys.modules.get("numpy")
    try:
        return "" if numpy is None or dtype is None else str(numpy.dtype(dtype).name)
    except TypeError:
        return ""
