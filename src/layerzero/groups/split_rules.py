"""How each op of a plan is split over ranks, as data: RULES. An op that is not there can be made whole by every rank,
of whole arrays; what it takes in parts is refused, by its name.

Weights are an op's arrays that are the function's own. Their rows or columns are a rank's part; the sum over all ranks
is placed where a split by row ends. Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.client.plans.dataflow import kind_of
from layerzero.client.plans.recording import Step, Use
from layerzero.groups.layouts import COLUMN, ROW, WHOLE, Applied, Layout, Look, Rule, moved, of_each


def product(weight: int, out_dim: int, in_dim: int, bias: int | None = None) -> Rule:
    """x times a weight at that place. Of x whole: by column, of `out_dim`; of x in parts along its last dimension: by
    row, of `in_dim`, which makes summands. The bias goes with the columns, or is added by rank 0 alone."""

    def rule(look: Look) -> Applied:
        x, w = look.step.args[0], look.step.args[weight]
        layout, rank = look.layout(x), len(look.shape(x))
        shift = look.step.args[bias] if bias is not None and len(look.step.args) > bias else None
        if layout.is_whole:
            return _by_column(look, x, w, shift)
        if not look.is_constant(w) or len(look.shape(w)) != 2:
            look.refuse("its weight is no matrix that the function has of its own")
        if layout.dim != rank - 1:  # other rows: each rank has its own, and the whole weight
            return Applied(of_each(look))
        request = look.step.request
        if request is not None and request.params.get("activation"):
            look.refuse(f"its {request.params['activation']} comes after the sum over ranks: call that by itself")
        alone = () if shift is None or bias is None else (bias,)
        made = Layout(is_summand=True, origins=layout.origins)
        return Applied((made,), ((weight, in_dim, 1),), alone, how=ROW)

    def _by_column(look: Look, x: Any, w: Any, shift: Any) -> Applied:
        number, rank = look.step.number, len(look.shape(x))
        is_weight = look.is_constant(w) and len(look.shape(w)) == 2 and not look.is_constant(x) and rank > 1
        is_split = is_weight and (shift is None or look.is_constant(shift))
        if not is_split or number in look.whole:
            return Applied((WHOLE,))
        extent = look.shape(w)[out_dim]
        if extent % look.size:
            look.whole[number] = f"{look.size} ranks do not divide {extent} columns"
            return Applied((WHOLE,))
        parts = [(weight, out_dim, 1)] + ([] if shift is None or bias is None else [(bias, 0, 1)])
        made = Layout(len(look.made()) - 1, origins=frozenset([number]))
        return Applied((made,), tuple(parts), how=COLUMN)

    return rule


def matmul(look: Look) -> Applied:
    """A product with a weight, or of two arrays: their batch is split as it is in both."""
    b = look.step.args[1]
    if look.is_constant(b) and len(look.shape(b)) == 2:
        return product(weight=1, out_dim=1, in_dim=0)(look)
    return along(whole=(-1, -2))(look) if look.split() else Applied((WHOLE,))


def gated_mlp(look: Look) -> Applied:
    """Both halves of gate_up by column, down by row: one call, which makes summands."""
    x, gate_up, down = look.step.args
    if not look.layout(x).is_whole:
        look.refuse("it takes all of its rows' elements")
    hidden = look.shape(down)[1]
    if look.step.number in look.whole or not (look.is_constant(gate_up) and look.is_constant(down)):
        return Applied((WHOLE,))
    if hidden % look.size:
        look.whole[look.step.number] = f"{look.size} ranks do not divide {hidden} columns"
        return Applied((WHOLE,))
    made = Layout(is_summand=True, origins=frozenset([look.step.number]))
    return Applied((made,), ((1, 0, 2), (2, 1, 1)), how=f"gate and up {COLUMN}, down {ROW}")


def along(whole: tuple[int, ...] = (), param: str = "") -> Rule:
    """Element by element, but for dimensions that must be whole: these, and the one that a parameter names. Arrays are
    broadcast; of one that is whole, each rank takes its part."""

    def rule(look: Look) -> Applied:
        split = look.split()
        if not split:
            return Applied(tuple(WHOLE for _ in look.step.made))
        shape = look.made()
        ends = {look.layout(arg).dim - len(look.shape(arg)) for _, arg in split}  # type: ignore[operator]
        if len(ends) > 1:
            look.refuse("its arrays are in parts along different dimensions")
        end = ends.pop()
        kept = [n if n < 0 else n - len(shape) for n in (*whole, *_named(look, param))]
        if end in kept:
            look.refuse(f"it takes all of dimension {end + len(shape)}, which is in parts")
        others = [(place, arg) for place, arg in look.uses() if look.layout(arg).dim is None]
        parts = [(n, len(look.shape(a)) + end, 1) for n, a in others if _has(look.shape(a), end)]
        made = tuple(Layout(len(look.shape_of(n)) + end, origins=look.origins()) for n in look.step.made)
        return Applied(made, tuple(parts))

    return rule


def _named(look: Look, param: str) -> tuple[int, ...]:
    request = look.step.request
    if not param or request is None:
        return ()
    found = request.params[param]
    return tuple(-1 - n for n in range(len(found))) if isinstance(found, tuple) else (found,)


def _has(shape: tuple[int, ...], end: int) -> bool:
    """Whether an array that is broadcast has that dimension, counted from its end, with more than one element."""
    return len(shape) >= -end and shape[end] > 1


def sums(look: Look) -> Applied:
    """As element by element; two summands that nobody else takes make a summand."""
    layouts = [look.layout(arg) for _, arg in look.uses()]
    if len(look.step.args) == 2 and len(layouts) == 2 and all(layout.is_summand for layout in layouts):
        return Applied((Layout(is_summand=True, origins=look.origins()),))
    return along()(look)


def heads(*, dim: int, more: tuple[tuple[int, int], ...] = ()) -> Rule:
    """Attention: by heads, counted from the end; with layout="BSHD" they and the sequence are exchanged. `more`: places
    of other arrays, and which of their dimensions are of heads."""

    def rule(look: Look) -> Applied:
        split = look.split()
        if not split:
            return Applied(tuple(WHOLE for _ in look.step.made))
        request = look.step.request
        assert request is not None
        end = -2 if request.params.get("layout") == "BSHD" else dim
        for place, arg in split:
            if place > 2 or look.layout(arg).dim != len(look.shape(arg)) + end:
                look.refuse("it is split by heads alone")
        if len(split) != 3:
            look.refuse("queries, keys and values are not all in parts by heads")
        parts = []
        for place, its in more:
            arg = look.step.args[place]
            if isinstance(arg, Use) and _has(look.shape(arg), its):
                parts.append((place, len(look.shape(arg)) + its, 1))
        return Applied((Layout(len(look.made()) + end, origins=look.origins()),), tuple(parts))

    return rule


def rotated(look: Look) -> Applied:
    """By heads, the last dimension but one; the tables are of positions, and whole."""
    split = look.split()
    if any(look.layout(arg).dim != len(look.shape(arg)) - 2 for _, arg in split):
        look.refuse("it is split by heads alone")
    rotates = look.step.args[: len(look.step.made)]
    return Applied(tuple(Layout(look.layout(arg).dim, origins=look.layout(arg).origins) for arg in rotates))


# --- what the function does itself


def reshape(look: Look) -> Applied:
    """To the shape that a part has."""
    x = look.step.args[0]
    layout, shape = look.layout(x), list(look.made())
    if layout.dim is None:
        return Applied((layout,))
    if not all(isinstance(n, (int, list, tuple)) for n in look.step.args[1:]):
        look.refuse("it reads the same memory as another dtype")
    dim = moved(look.shape(x), layout.dim, shape, look.size)
    if dim is None:
        look.refuse(f"the parts of {list(look.shape(x))} along dimension {layout.dim} are none of {shape}")
    shape[dim] //= look.size
    return Applied((Layout(dim, origins=layout.origins),), args=(x, tuple(shape)))


def permuted(order: Callable[[tuple[Any, ...], int], list[int]], of_torch: Any = None) -> Rule:
    """`order`: of the dimensions, told by the other arguments and how many there are; `of_torch`: where its function of
    that name is another one."""

    def rule(look: Look) -> Applied:
        x, *others = look.step.args
        layout = look.layout(x)
        if layout.dim is None:
            return Applied((layout,))
        dims = (of_torch if look.is_torch and of_torch else order)(tuple(others), len(look.shape(x)))
        return Applied((Layout(dims.index(layout.dim), origins=layout.origins),))

    return rule


def _all(others: tuple[Any, ...], count: int) -> list[int]:
    given = others[0] if len(others) == 1 and isinstance(others[0], (list, tuple)) else others
    return [n % count for n in given] if given and given[0] is not None else list(range(count))[::-1]


def _two(others: tuple[Any, ...], count: int) -> list[int]:
    found = list(range(count))
    one, other = others
    found[one], found[other] = found[other], found[one]
    return found


def taken(look: Look) -> Applied:
    """A part of the other dimensions, by numbers and slices."""
    x, index = look.step.args
    layout, shape = look.layout(x), look.shape(x)
    if layout.dim is None:
        return Applied((layout,))
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items):
        look.refuse("it takes elements by other arrays")
    spans = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = next(n for n, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - spans)
    dim = made = 0
    for item in items:
        if item is not None and dim == layout.dim:
            if item != slice(None):
                look.refuse("it takes a part of the dimension that is in parts")
            return Applied((Layout(made, origins=layout.origins),))
        dim += item is not None
        made += not isinstance(item, int)
    raise AssertionError("every dimension has an item")


_EACH = along()
RULES: dict[str, Rule] = {
    # products
    "lz.linear": product(weight=1, out_dim=0, in_dim=1, bias=2),
    "linear": product(weight=1, out_dim=0, in_dim=1, bias=2),  # torch's
    "lz.matmul": matmul,
    "matmul": matmul,
    "lz.gated_mlp": gated_mlp,
    # attention
    "lz.attention": heads(dim=-3, more=((3, -3), (4, -1), (5, -1))),
    "lz.rope": rotated,
    "lz.rope_qk": rotated,
    # rows whose elements are needed together
    "lz.softmax": along(param="dim"),
    "lz.log_softmax": along(param="dim"),
    "lz.layer_norm": along(param="normalized_shape"),
    "lz.rms_norm": along(param="normalized_shape"),
    "lz.add_rms_norm": along(param="normalized_shape"),
    # element by element
    "lz.add": sums,
    "add": sums,
    **dict.fromkeys(
        (
            *("lz.mul", "lz.clamp", "lz.where", "lz.cast", "lz.relu", "lz.gelu", "lz.silu", "lz.sigmoid", "lz.tanh"),
            *("lz.quick_gelu", "lz.hardswish", "lz.mish", "lz.swiglu", "lz.geglu", "lz.reglu"),
            *("sub", "mul", "truediv", "neg", "negative", "abs", "absolute", "exp", "sqrt", "tanh", "maximum"),
            *("minimum", "relu", "silu", "gelu", "sigmoid"),
        ),
        _EACH,
    ),
    # views
    "reshape": reshape,
    "view": reshape,
    "transpose": permuted(_all, of_torch=_two),
    "permute": permuted(_all),
    "swapaxes": permuted(_two),
    "T": permuted(_all),
    "getitem": taken,
    "contiguous": _EACH,
    "ascontiguousarray": _EACH,
    "copy": _EACH,
}
"""By what a step computes, as plans' passes know it (client/plans/dataflow.py)."""
_OF_SUMMANDS = frozenset(("add", "lz.add", "reshape", "view", "transpose", "permute", "swapaxes", "T", "getitem"))


def rule_of(step: Step) -> Rule | None:
    """None where it has none, or is called in a way that the rule does not know."""
    return None if step.request is None and step.kwargs else RULES.get(kind_of(step))


def takes_summands(step: Step) -> bool:
    """Whether the step may come before the sum over ranks."""
    return rule_of(step) is not None and kind_of(step) in _OF_SUMMANDS
