"""Shape functions of sampling. As ipc/vocabulary/shapes.py."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shape_checks import (
    INDEX_DTYPES,
    Attrs,
    Inputs,
    Output,
    equal,
    float_dtype,
    indices,
    of_ndim,
    refuse,
    required,
    same_dtype,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec


def _penalize(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    logits, token_ids = required(inputs, 2)
    out = _logits(op, logits)
    indices(op, "token_ids", token_ids, 2, INDEX_DTYPES)
    if token_ids.shape[0] != logits.shape[0]:
        refuse(op, f"token_ids has shape {list(token_ids.shape)}", f"({logits.shape[0]}, tokens), a row for each")
    _settings(op, inputs, logits.shape[0], 2)
    return (out,)


def _filter(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (logits,) = required(inputs, 1)
    out = _logits(op, logits)
    _settings(op, inputs, logits.shape[0], 1)
    return (out,)


def _sample(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    logits, seed, offset = required(inputs, 3)
    _logits(op, logits)
    if not logits.shape[1]:
        refuse(op, f"logits has shape {list(logits.shape)}", "a vocabulary of one token or more")
    _seeds(op, seed, offset, logits.shape[0])
    _settings(op, inputs, logits.shape[0], 1)
    return (("int64", logits.shape[:1]),)


def _verify(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    target, draft_ids, draft = inputs[:3]
    target, draft_ids, seed, offset = required((target, draft_ids, *inputs[3:]), 4)
    float_dtype(op, (target, draft), ("target_probs", "draft_probs"))
    of_ndim(op, "target_probs", target, 3)
    indices(op, "draft_ids", draft_ids, 2, INDEX_DTYPES)
    rows, steps, vocabulary = target.shape
    if not steps or not vocabulary:
        refuse(
            op, f"target_probs has shape {list(target.shape)}", "(rows, drafts + 1, vocabulary), of one token or more"
        )
    drafts = (rows, steps - 1)
    if draft_ids.shape != drafts:
        refuse(op, f"draft_ids has shape {list(draft_ids.shape)}", f"{list(drafts)}, as target_probs says")
    if draft is not None and draft.shape != (*drafts, vocabulary):
        refuse(op, f"draft_probs has shape {list(draft.shape)}", f"{[*drafts, vocabulary]}, as target_probs says")
    _seeds(op, seed, offset, rows)
    return ("int64", (rows, steps)), ("int64", (rows,))


def _accept(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    draft_ids, parents, target_ids = required(inputs, 3)
    same_dtype(op, (draft_ids, target_ids), ("draft_ids", "target_ids"))
    indices(op, "draft_ids", draft_ids, 2, INDEX_DTYPES)
    indices(op, "parents", parents, 2, INDEX_DTYPES)
    equal(op, "shape", draft_ids=draft_ids.shape, parents=parents.shape, target_ids=target_ids.shape)
    if not draft_ids.shape[1]:
        refuse(op, f"draft_ids has shape {list(draft_ids.shape)}", "a node of one token or more")
    nodes = ("int64", draft_ids.shape)
    return nodes, nodes, ("int64", draft_ids.shape[:1])


def _seeds(op: str, seed: TensorSpec, offset: TensorSpec, rows: int) -> None:
    for name, spec in (("seed", seed), ("offset", offset)):
        indices(op, name, spec, 1, ("int64",))
        if spec.shape not in ((1,), (rows,)):
            refuse(op, f"{name} has shape {list(spec.shape)}", f"(1) or ({rows}), one for each row")


def _logits(op: str, logits: TensorSpec) -> Output:
    of_ndim(op, "logits", logits, 2)
    return float_dtype(op, (logits,), ("logits",)), logits.shape


def _settings(op: str, inputs: Inputs, rows: int, first: int) -> None:
    """From the input of this number on: one number, or one for each row."""
    for name, spec in list(zip(OPS[op].inputs, inputs, strict=True))[first:]:
        if spec is None:
            continue
        if name in OPS[op].indices:
            indices(op, name, spec, 1, INDEX_DTYPES)
        elif spec.dtype != "float32":
            refuse(op, f"{name} is {spec.dtype}", "float32")
        if spec.shape not in ((1,), (rows,)):
            refuse(op, f"{name} has shape {list(spec.shape)}", f"(1) or ({rows}), one for each row of logits")


SAMPLING: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "penalize_logits": _penalize,
    "filter_logits": _filter,
    "sample": _sample,
    "speculative_verify": _verify,
    "tree_accept": _accept,
}
