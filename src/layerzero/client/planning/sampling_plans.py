"""Plans of what is done to logits before a token is drawn. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.checks import Shape, floating, fresh, refuse
from layerzero.client.planning.plans import Plan, remember
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import INDEX_DTYPES
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_penalize_logits(
    logits: TensorSpec,
    token_ids: TensorSpec,
    repetition_penalty: TensorSpec | None = None,
    presence_penalty: TensorSpec | None = None,
    frequency_penalty: TensorSpec | None = None,
) -> Plan:
    """Of the tokens of each row of logits."""
    op = "penalize_logits"
    rows = _rows(op, logits)
    if token_ids.dtype not in INDEX_DTYPES:
        refuse(op, f"token_ids is {token_ids.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    ids = token_ids.unsqueeze(0) if token_ids.ndim == 1 and logits.ndim == 1 else token_ids
    if ids.ndim != 2 or ids.shape[0] != rows.shape[0]:
        found = f"token_ids has shape {list(token_ids.shape)} for logits of shape {list(logits.shape)}"
        refuse(op, found, "as many dimensions, a row of ids for each row of logits", "fill shorter rows with -1")
    settings = _settings(op, logits, (repetition_penalty, presence_penalty, frequency_penalty), 2)
    return _like_logits(op, logits, (rows, ids, *settings))


@remember
def plan_filter_logits(
    logits: TensorSpec,
    temperature: TensorSpec | None = None,
    top_k: TensorSpec | None = None,
    top_p: TensorSpec | None = None,
    min_p: TensorSpec | None = None,
) -> Plan:
    """Of each row of logits."""
    op = "filter_logits"
    rows = _rows(op, logits)
    return _like_logits(op, logits, (rows, *_settings(op, logits, (temperature, top_k, top_p, min_p), 1)))


@remember
def plan_sample(
    logits: TensorSpec,
    seed: TensorSpec,
    offset: TensorSpec,
    temperature: TensorSpec | None = None,
    top_k: TensorSpec | None = None,
    top_p: TensorSpec | None = None,
    min_p: TensorSpec | None = None,
) -> Plan:
    """A token of each row of logits."""
    op = "sample"
    rows = _rows(op, logits)
    if not rows.shape[1]:
        refuse(op, f"logits has shape {list(logits.shape)}", "a vocabulary of one token or more", "pass all logits")
    for name, spec in (("seed", seed), ("offset", offset)):
        if spec.dtype != "int64":
            refuse(op, f"{name} is {spec.dtype}", "int64", "convert it")
    settings = _settings(op, logits, (seed, offset, temperature, top_k, top_p, min_p), 1)
    outputs = (TensorSpec.contiguous("int64", rows.shape[:1]),)
    return Plan(op, (rows, *settings), {}, outputs, (fresh(op, "int64", logits.shape[:-1]),))


def _like_logits(op: str, logits: TensorSpec, inputs: tuple[TensorSpec | None, ...]) -> Plan:
    rows = inputs[0]
    assert rows is not None
    outputs = (TensorSpec.contiguous(logits.dtype, rows.shape),)
    return Plan(op, inputs, {}, outputs, (fresh(op, logits.dtype, logits.shape),))


def _rows(op: str, logits: TensorSpec) -> TensorSpec:
    """As (rows, vocabulary)."""
    floating(op, "logits", logits)
    if logits.ndim not in (1, 2):
        found = f"logits has shape {list(logits.shape)}"
        refuse(op, found, "(rows, vocabulary) or (vocabulary,)", "index the last position, or reshape it")
    return logits.unsqueeze(0) if logits.ndim == 1 else logits


def _settings(op: str, logits: TensorSpec, specs: tuple[TensorSpec | None, ...], first: int) -> list[TensorSpec | None]:
    """The inputs of the op from number `first` on, as vectors of one number, or of one for each row."""
    lead: Shape = logits.shape[:-1]
    found: list[TensorSpec | None] = []
    for name, spec in zip(OPS[op].inputs[first:], specs, strict=True):
        if spec is not None:
            allowed = INDEX_DTYPES if name in OPS[op].indices else ("float32",)
            if spec.dtype not in allowed:
                refuse(op, f"{name} is {spec.dtype}", " or ".join(allowed), f"convert it to {allowed[-1]}")
            if spec.shape not in ((), (1,), lead):
                text = f"{name} has shape {list(spec.shape)} for logits of shape {list(logits.shape)}"
                refuse(op, text, f"one number, or {list(lead)}", "pass one for each row of logits")
        found.append(spec if spec is None or spec.ndim else spec.unsqueeze(0))
    return found
