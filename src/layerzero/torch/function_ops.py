"""A function of another environment as an op of torch: what `as_torch_op` of an isolated function defines."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, UnionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library, infer_schema

import layerzero as lz
from layerzero.torch.gradients import Call, Gradients
from layerzero.torch.op_entry import ANY, OpEntry
from layerzero.torch.registration import differentiable

KINDS = frozenset(
    {"Tensor", "Optional[Tensor]"}
    | {text for kind in ("int", "float", "bool", "str") for text in (kind, f"Optional[{kind}]", f"List[{kind}]")}
    | {f"Optional[List[{kind}]]" for kind in ("int", "float", "bool", "str")}
)
"""Types of arguments, as schemas print them. Others cannot cross, or their gradients would be lost in silence."""
RESERVED = ("layerzero", "aten", "prim", "prims")
MAX_KNOWN = 256  # calls of an op whose results' layout is kept
libraries: dict[str, Library] = {}  # by the names of ops, which live as long as these do
Layout = tuple[torch.dtype, tuple["int | None", ...], torch.device]
"""Of a result: None stands for a size that the shape function leaves open."""
DEVICES = ("cpu", "cuda", "meta")
TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)  # no CUDA graph can hold a call of another process: torch cuts its own graphs there


def define(
    function: Callable[..., Any],
    label: str,
    name: str,
    schema: str | None,
    fake: Callable[..., Any] | None,
    backward: Callable[..., Any] | None,
    is_remote_backward: bool,
    arrays: str | None,
) -> Any:
    """The op. As `Isolated.as_torch_op`, whose arguments these are. `label`: the function's, for people;
    `is_remote_backward`: `backward` is isolated, too."""
    space, _, plain = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not (space.isidentifier() and plain.isidentifier()) or space in RESERVED:
        _refuse(label, f'the name is {name!r:.80}; allowed: "mylib::name", and mylib is none of {", ".join(RESERVED)}')
    if hasattr(getattr(torch.ops, space), plain):
        _refuse(label, f"there is an op {name} already; use another name, or the op that the first call returned")
    if fake is None:
        _refuse(
            label,
            "pass fake=, a function of the same arguments that returns empty tensors of the results' shapes and "
            "dtypes, such as fake=torch.empty_like or fake=lambda x, k: x.new_empty(x.shape[0], k)",
        )
    if arrays not in (None, "torch", "numpy"):
        _refuse(label, f'arrays is {arrays!r:.80}; allowed: "torch", "numpy"')
    if schema is None:
        schema, is_numpy = _inferred(function, label)
        arrays = arrays or ("numpy" if is_numpy else "torch")
    made = _FunctionOp(function, label, name, schema, fake, arrays == "numpy")
    formula = None
    if backward is not None:
        formula = made.formula(made.as_op(backward) if is_remote_backward else backward)
    return made.define(formula)


def _refuse(label: str, why: str) -> typing.NoReturn:
    raise lz.InvalidArgument(f"{label}.as_torch_op: {why}")


def _inferred(function: Any, label: str) -> tuple[str, bool]:
    """A schema of the function's annotations, and whether they speak of NumPy."""
    prototype: Any = FunctionType((lambda: None).__code__, {})
    try:
        source = getattr(function, "__wrapped__", None)
        if source is None:
            raise ValueError("the function has no source here")
        hints = typing.get_type_hints(source, {"torch": torch, "Tensor": Tensor, **source.__globals__})
        signature = inspect.signature(source)
        with_hints = [
            one.replace(annotation=_as_tensors(hints.get(one.name, one.annotation)))
            for one in signature.parameters.values()
        ]
        returned = _as_tensors(hints.get("return", inspect.Signature.empty))
        prototype.__signature__ = signature.replace(parameters=with_hints, return_annotation=returned)
        return infer_schema(prototype, mutates_args=()), any(map(_is_numpy, hints.values()))
    except (ValueError, TypeError, NameError) as exc:
        why = str(exc).partition("Got func with signature")[0].strip()
        _refuse(label, f'pass schema=, such as "(Tensor x, float scale=1.0) -> Tensor": {why}')


def _is_array(hint: Any) -> bool:
    return any(
        f"{getattr(one, '__module__', '')}.{getattr(one, '__name__', '')}" == "numpy.ndarray"
        for one in (hint, typing.get_origin(hint))
    )


def _is_numpy(hint: Any) -> bool:
    return _is_array(hint) or any(map(_is_numpy, typing.get_args(hint)))


def _as_tensors(hint: Any) -> Any:
    """The annotation with tensors in place of NumPy's arrays."""
    if _is_array(hint):
        return Tensor
    inner = tuple(map(_as_tensors, typing.get_args(hint)))
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        return typing.Union[inner]  # noqa: UP007
    return tuple[inner] if origin is tuple else hint  # type: ignore[valid-type]


class _FunctionOp:
    """An op that is not defined yet, and then what runs it."""

    def __init__(
        self, function: Callable[..., Any], label: str, name: str, schema: str, fake: Callable[..., Any], is_numpy: bool
    ) -> None:
        try:
            self.schema = torch._C.parse_schema(f"{name}{schema}")
        except RuntimeError as exc:
            _refuse(label, f"the schema {schema!r:.200} cannot be read: {str(exc).partition(chr(10))[0]}")
        self.function, self.label, self.name, self.text = function, label, name, schema
        self.is_numpy = is_numpy
        self._fake = fake
        self.arguments = self.schema.arguments
        self.names = tuple(one.name for one in self.arguments if not one.kwarg_only)
        self.tensors = tuple(one.name for one in self.arguments if "Tensor" in str(one.type))
        self.count = len(self.schema.returns)
        self._defaults = tuple(one.default_value for one in self.arguments if not one.kwarg_only)
        self._named = {one.name: one.default_value for one in self.arguments if one.kwarg_only}
        self._known: dict[Any, list[Layout]] = {}
        self._check_schema()
        self.op: Any = None

    def _check_schema(self) -> None:
        for one in self.arguments:
            if str(one.type) not in KINDS or (one.kwarg_only and one.name in self.tensors):
                _refuse(
                    self.label,
                    f"the argument {one.name} of the schema is {one.type}{', by name only' * one.kwarg_only}; allowed: "
                    "Tensor, by position, and int, float, bool, str and lists of these, and each of them with '?'",
                )
            if one.alias_info is not None:
                _refuse(self.label, f"the schema writes into {one.name}; what a function is lent is read-only")
        if not self.count or any(str(one.type) != "Tensor" or one.alias_info for one in self.schema.returns):
            _refuse(self.label, "the schema's results are not Tensors; allowed: -> Tensor, -> (Tensor, Tensor), ...")
        signature = getattr(self.function, "_signature", None)
        if signature is not None:
            try:
                signature.bind(*self.names, **{one.name: 0 for one in self.arguments if one.kwarg_only})
            except TypeError as exc:
                _refuse(self.label, f"the schema {self.text} does not fit the function: {exc}")

    def define(self, formula: Callable[..., Gradients] | None) -> Any:
        space, _, plain = self.name.partition("::")
        library = libraries[self.name] = Library(space, "FRAGMENT")
        library.define(f"{plain}{self.text}", tags=TAGS)
        self.op = op = getattr(getattr(torch.ops, space), plain).default
        saves = dict.fromkeys(self.tensors, ANY) if formula is not None else {}
        entry = OpEntry(plain, "", self.fake, formula, saves, results=self.count, library=space)
        library.impl(plain, self.run, "CompositeExplicitAutograd")
        library._register_fake(plain, self.fake)
        library.impl(plain, differentiable(entry, op, self.run), "Autograd", with_keyset=True)
        return op

    # --- a call ------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **options: Any) -> Any:
        """In the function's environment. Below autograd."""
        args, options = self._whole(args, options)
        expected = self._layouts(args, options)
        with _AutoDispatchBelowADInplaceOrView():
            given = [self._lent(name, arg) for name, arg in zip(self.names, args, strict=True)]
            found = self.function(*given, **options)
            return self._checked(found, expected)

    def _whole(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With what the dispatcher leaves out, since it has its default."""
        return (*args, *self._defaults[len(args) :]), self._named | options

    def _lent(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if arg.requires_grad:
            arg = arg.detach()
        if not self.is_numpy:
            return arg
        try:
            return arg.numpy()
        except (TypeError, RuntimeError) as exc:
            raise lz.InvalidArgument(f"{self.name}: {name} cannot be an array of NumPy: {exc}") from None

    def _checked(self, found: Any, expected: Sequence[Layout]) -> Any:
        """The results as tensors, each with a storage of its own. Raises InvalidArgument where the shape function has
        said something else."""
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(results) != self.count:
            self._unlike(f"it has given {len(results)} results, and the schema says {self.count}")
        for n, (value, (dtype, shape, device)) in enumerate(zip(results, expected, strict=True)):
            where = "its result" if self.count == 1 else f"its result {n}"
            if isinstance(value, Tensor):
                made = torch.from_dlpack(value.detach())
            elif (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
                made = torch.from_numpy(value)
            else:
                self._unlike(f"{where} is {type(value).__name__}, no array, such as numpy.asarray gives")
            fits = len(made.shape) == len(shape) and all(
                size is None or size == has for size, has in zip(shape, made.shape, strict=True)
            )
            if made.dtype != dtype or made.device.type != device.type or not fits:
                sizes = ["?" if size is None else size for size in shape]
                has, says = (f" on {one}" if made.device.type != device.type else "" for one in (made.device, device))
                self._unlike(f"{where} is {made.dtype} {list(made.shape)}{has}, and fake= says {dtype} {sizes}{says}")
            results[n] = made
        return results[0] if self.count == 1 else tuple(results)

    def _unlike(self, what: str) -> typing.NoReturn:
        raise lz.InvalidArgument(f"{self.name} ({self.label}): {what}; let fake= or the function say the same")

    # --- shapes ------------------------------------------------------------------------------------------------

    def fake(self, *args: Any, **options: Any) -> Any:
        """What torch traces: tensors without elements, row-major as results of functions are."""
        args, options = self._whole(args, options)
        found = self._fake(*args, **options)
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(results) != self.count or not all(isinstance(one, Tensor) for one in results):
            kinds = ", ".join(type(one).__name__ for one in results)
            raise lz.InvalidArgument(f"{self.name}: fake= returned {kinds}; the schema says {self.text}")
        for one in results:
            if one.device.type not in DEVICES:
                text = f"{self.name}: fake= returned a tensor on {one.device}"
                raise lz.InvalidArgument(f"{text}; functions take and give tensors of the CPU and of NVIDIA GPUs")
        results = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in results]
        return results[0] if self.count == 1 else tuple(results)

    def _layouts(self, args: Sequence[Any], options: Mapping[str, Any]) -> list[Layout]:
        """What the results of these arguments must be; of arguments that are alike it is kept."""
        key = tuple(map(_key, (*args, *options.values())))
        known = self._known.get(key)
        if known is None:
            with FakeTensorMode(shape_env=ShapeEnv()):
                fakes = [
                    torch.empty(arg.shape, dtype=arg.dtype, device=arg.device) if isinstance(arg, Tensor) else arg
                    for arg in args
                ]
                found = self.op(*fakes, **options)
            results = [found] if self.count == 1 else found
            known = [
                (one.dtype, tuple(size if isinstance(size, int) else None for size in one.shape), one.device)
                for one in results
            ]
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known

    # --- gradients ---------------------------------------------------------------------------------------------

    def formula(self, backward: Callable[..., Any]) -> Callable[..., Gradients]:
        if not self.tensors:
            _refuse(self.label, "backward= is of a function of tensors; this one has none")

        def made(grads: Any, call: Call) -> Gradients:
            grads = (grads,) if self.count == 1 else grads
            found = backward(*grads, *(call[name] for name in self.names), **{name: call[name] for name in self._named})
            results = found if isinstance(found, (tuple, list)) else (found,)
            if len(results) != len(self.tensors):
                raise lz.InvalidArgument(
                    f"{self.name}: backward= returned {len(results)} gradients; allowed: {len(self.tensors)}, one for "
                    f"each of {', '.join(self.tensors)}, None where there is none"
                )
            for name, grad in zip(self.tensors, results, strict=True):
                if grad is not None and not isinstance(grad, Tensor):
                    raise lz.InvalidArgument(f"{self.name}: backward= returned {type(grad).__name__} for {name}")
            return {
                name: grad
                for name, grad in zip(self.tensors, results, strict=True)
                if name in call.needs and grad is not None
            }

        return made

    def as_op(self, backward: Callable[..., Any]) -> Any:
        """An isolated backward as an op of its own, whose results are as the tensors whose gradients they are."""
        grads = [f"Tensor grad_{n}" for n in range(self.count)]
        head, _, _ = self.text.strip()[1:].rpartition("->")
        given = head.rpartition(")")[0].strip()
        results = "Tensor" if len(self.tensors) == 1 else f"({', '.join(['Tensor'] * len(self.tensors))})"
        places = [self.count + self.names.index(name) for name in self.tensors]

        def fake(*args: Any, **_: Any) -> Any:
            likes = [_gradient_like(args[place], args[0]) for place in places]
            return likes[0] if len(likes) == 1 else tuple(likes)

        schema = f"({', '.join([*grads, given])}) -> {results}"
        label = getattr(backward, "_label", "backward")
        made = _BackwardOp(backward, label, f"{self.name}_backward", schema, fake, self.is_numpy)
        op = made.define(None)

        def call(*args: Any, **options: Any) -> Any:
            found = op(*args, **options)
            results = (found,) if len(self.tensors) == 1 else found
            return [grad if _has_gradient(args[place]) else None for place, grad in zip(places, results, strict=True)]

        return call


class _BackwardOp(_FunctionOp):
    def _checked(self, found: Any, expected: Sequence[Layout]) -> Any:
        """With zeros in place of None: that is what no gradient means."""
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(results) == self.count:
            for n, (dtype, shape, device) in enumerate(expected):
                if results[n] is None or shape == (0,):
                    results[n] = torch.zeros([size or 0 for size in shape], dtype=dtype, device=device)
            found = results[0] if self.count == 1 else results
        return super()._checked(found, expected)


def _has_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _gradient_like(tensor: Tensor | None, grad: Tensor) -> Tensor:
    """Without elements for what has no gradient."""
    return torch.empty_like(tensor) if tensor is not None and _has_gradient(tensor) else grad.new_empty(0)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.device
    return (list, *value) if isinstance(value, list) else (type(value), value)
