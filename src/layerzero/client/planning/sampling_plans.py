"""Plans of what is done to logits before a token is drawn. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.checks import Shape, floating, fresh, refuse, same_dtype, same_float_dtype
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
    seeds = _seeds(op, seed, offset, logits.shape[:-1], logits)
    settings = _settings(op, logits, (temperature, top_k, top_p, min_p), 3)
    outputs = (TensorSpec.contiguous("int64", rows.shape[:1]),)
    return Plan(op, (rows, *seeds, *settings), {}, outputs, (fresh(op, "int64", logits.shape[:-1]),))


@remember
def plan_speculative_verify(
    target_probs: TensorSpec,
    draft_ids: TensorSpec,
    draft_probs: TensorSpec | None,
    seed: TensorSpec,
    offset: TensorSpec,
) -> Plan:
    """Of each row of drafts."""
    op = "speculative_verify"
    same_float_dtype(op, target_probs=target_probs, draft_probs=draft_probs)
    if target_probs.ndim not in (2, 3) or 0 in target_probs.shape[-2:]:
        found = f"target_probs has shape {list(target_probs.shape)}"
        refuse(
            op, found, "(rows, drafts + 1, vocabulary), or without rows", "pass the target's of each draft, and after"
        )
    *lead, steps, vocabulary = target_probs.shape
    drafts = (*lead, steps - 1)
    for name, spec, shape in (("draft_ids", draft_ids, drafts), ("draft_probs", draft_probs, (*drafts, vocabulary))):
        if spec is not None and spec.shape != shape:
            found = f"{name} has shape {list(spec.shape)} for target_probs of shape {list(target_probs.shape)}"
            refuse(op, found, str(list(shape)), "pass one step more of target_probs than there are drafts")
    if draft_ids.dtype not in INDEX_DTYPES:
        refuse(op, f"draft_ids is {draft_ids.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    seeds = _seeds(op, seed, offset, tuple(lead), target_probs)
    given = (target_probs, draft_ids, draft_probs)
    inputs = given if lead else tuple(None if spec is None else spec.unsqueeze(0) for spec in given)
    shapes = ((*lead, steps), tuple(lead))
    outputs = tuple(TensorSpec.contiguous("int64", shape if lead else (1, *shape)) for shape in shapes)
    return Plan(op, (*inputs, *seeds), {}, outputs, tuple(fresh(op, "int64", shape) for shape in shapes))


@remember
def plan_tree_accept(draft_ids: TensorSpec, parents: TensorSpec, target_ids: TensorSpec) -> Plan:
    """Of each row's tree."""
    op = "tree_accept"
    for name, spec in (("draft_ids", draft_ids), ("parents", parents)):
        if spec.dtype not in INDEX_DTYPES:
            refuse(op, f"{name} is {spec.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    same_dtype(op, draft_ids=draft_ids, target_ids=target_ids)
    if draft_ids.ndim not in (1, 2) or not draft_ids.shape[-1]:
        found = f"draft_ids has shape {list(draft_ids.shape)}"
        refuse(op, found, "(rows, nodes) or (nodes,)", "pass the settled token as node 0")
    for name, spec in (("parents", parents), ("target_ids", target_ids)):
        if spec.shape != draft_ids.shape:
            found = f"{name} has shape {list(spec.shape)} and draft_ids {list(draft_ids.shape)}"
            refuse(op, found, "equal shapes", "pass one for each node")
    is_alone = draft_ids.ndim == 1
    inputs = tuple(spec.unsqueeze(0) if is_alone else spec for spec in (draft_ids, parents, target_ids))
    shapes = (draft_ids.shape, draft_ids.shape, draft_ids.shape[:-1])
    outputs = tuple(TensorSpec.contiguous("int64", (1, *shape) if is_alone else shape) for shape in shapes)
    return Plan(op, inputs, {}, outputs, tuple(fresh(op, "int64", shape) for shape in shapes))


def _seeds(op: str, seed: TensorSpec, offset: TensorSpec, lead: Shape, of: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """As vectors of one number, or of one for each row."""
    for name, spec in (("seed", seed), ("offset", offset)):
        if spec.dtype != "int64":
            refuse(op, f"{name} is {spec.dtype}", "int64", "convert it")
        if spec.shape not in ((), (1,), lead):
            found = f"{name} has shape {list(spec.shape)} for {OPS[op].inputs[0]} of shape {list(of.shape)}"
            refuse(op, found, f"one number, or {list(lead)}", "pass one for each row")
    return seed if seed.ndim else seed.unsqueeze(0), offset if offset.ndim else offset.unsqueeze(0)


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
