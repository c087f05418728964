"""The shape function of losses; as ipc/vocabulary/shapes.py."""

from __future__ import annotations

from layerzero.ipc.vocabulary.shape_checks import (
    INDEX_DTYPES,
    Attrs,
    Inputs,
    Output,
    choice,
    float_dtype,
    indices,
    integer,
    least_ndim,
    number,
    refuse,
    required,
)

REDUCTIONS = ("none", "mean", "sum")
LEAST_INDEX, MOST_INDEX = -(2**63), 2**63 - 1  # of ignore_index


def _cross_entropy(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, target = required(inputs, 2)
    weight = inputs[2]
    dtype = float_dtype(op, (x, weight), ("x", "weight"))
    least_ndim(op, "x", x, 2)
    indices(op, "target", target, x.ndim - 1, INDEX_DTYPES)
    shape = (x.shape[0], *x.shape[2:])
    if target.shape != shape:
        refuse(op, f"target has shape {list(target.shape)} and x {list(x.shape)}", f"{list(shape)}")
    classes = x.shape[1]
    if not classes:
        refuse(op, f"x has shape {list(x.shape)}", "one class at least")
    if weight is not None and weight.shape != (classes,):
        refuse(op, f"weight has shape {list(weight.shape)}", f"[{classes}]")
    integer(op, attrs, "ignore_index", LEAST_INDEX, MOST_INDEX)
    reduction = choice(op, attrs, "reduction", REDUCTIONS)
    number(op, attrs, "label_smoothing", 0.0)
    if attrs["label_smoothing"] > 1.0:
        refuse(op, f"label_smoothing is {attrs['label_smoothing']}", "0.0 to 1.0")
    return ((dtype, shape if reduction == "none" else ()),)


LOSSES = {"cross_entropy": _cross_entropy}
