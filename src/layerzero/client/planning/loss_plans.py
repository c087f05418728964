"""Plans of losses. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from numbers import Integral

from layerzero.client.planning.checks import choice, fresh, number, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, Scalar, remember
from layerzero.ipc.vocabulary.loss_shapes import LEAST_INDEX, MOST_INDEX, REDUCTIONS
from layerzero.ipc.vocabulary.shapes import INDEX_DTYPES
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_cross_entropy(
    x: TensorSpec,
    target: TensorSpec,
    weight: TensorSpec | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Plan:
    """torch.nn.functional.cross_entropy of class indices."""
    op = "cross_entropy"
    same_float_dtype(op, x=x, weight=weight)
    if target.dtype not in INDEX_DTYPES:
        repair = "convert it; class probabilities are not taken: multiply them by -lz.log_softmax(x, 1)"
        refuse(op, f"target is {target.dtype}", f"class indices of {' or '.join(INDEX_DTYPES)}", repair)
    if not x.ndim:
        refuse(op, "x has shape []", "(classes), or (batch, classes, ...)", "give it a dimension of classes")
    is_one = x.ndim == 1
    x2, target2 = (x.unsqueeze(0), target.unsqueeze(0)) if is_one else (x, target)
    shape = (x2.shape[0], *x2.shape[2:])
    if target2.shape != shape:
        allowed = f"{[] if is_one else list(shape)}, an index for each prediction"
        refuse(
            op, f"target has shape {list(target.shape)} and x {list(x.shape)}", allowed, "move classes to dimension 1"
        )
    classes = x2.shape[1]
    if not classes:
        refuse(op, f"x has shape {list(x.shape)}", "one class at least", "check dimension 1")
    if weight is not None and weight.shape != (classes,):
        refuse(op, f"weight has shape {list(weight.shape)}", f"[{classes}], one for each class", "check it")
    choice(op, "reduction", reduction, REDUCTIONS)
    smoothing = number(op, "label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        refuse(op, f"label_smoothing is {label_smoothing!r}", "0.0 to 1.0", "pass a share of the whole")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral):
        refuse(op, f"ignore_index is {ignore_index!r}", "an integer", "pass one")
    if not LEAST_INDEX <= ignore_index <= MOST_INDEX:
        refuse(op, f"ignore_index is {ignore_index}", f"{LEAST_INDEX} to {MOST_INDEX}", "pass one of them")
    attrs: dict[str, Scalar] = {
        "ignore_index": int(ignore_index),
        "reduction": reduction,
        "label_smoothing": smoothing,
    }
    made = shape if reduction == "none" else ()
    output = fresh(op, x.dtype, made)
    result = fresh(op, x.dtype, ()) if is_one else output
    return Plan(op, (x2, target2, weight), attrs, (output,), (result,))
