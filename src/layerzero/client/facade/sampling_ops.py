"""From logits to a token (docs/ops.md).

A setting is one number, or an array with one for each row of logits: float32, of top_k int32 or int64. None leaves it
out. The client looks at numbers, the kernel at arrays: a bad value is InvalidArgument on the CPU; on a GPU, where
nobody waits for it, its row is whatever the kernel makes of that.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.beside import beside
from layerzero.client.facade.running import perform
from layerzero.client.planning import sampling_plans
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import sampling

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray

    FloatOrArray = float | AnyArray | None  # tools take what is annotated as an array for data of the call
    IntOrArray = int | AnyArray | None


def penalize_logits(
    logits: ArrayT,
    token_ids: AnyArray,
    repetition_penalty: FloatOrArray = None,
    presence_penalty: FloatOrArray = None,
    frequency_penalty: FloatOrArray = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Logits of tokens that are in `token_ids` made less likely, or with penalties below 1 or 0 more likely.

    logits: (rows, vocabulary) or (vocabulary,), any float dtype. token_ids: int32 or int64, a row for each row of
    logits; negative ones are padding. A token that is there n > 0 times has
    (x / repetition_penalty if x > 0 else x * repetition_penalty) - frequency_penalty * n - presence_penalty.
    An id from the vocabulary on is InvalidArgument on the CPU, and does nothing on a GPU. Source: Keskar et al. 2019,
    4.1, as Transformers' RepetitionPenaltyLogitsProcessor has it; the others as OpenAI's API documents them.
    """
    given = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    args = (logits, token_ids, *_settings("penalize_logits", logits, given))
    planner = sampling_plans.plan_penalize_logits
    return perform(Request("penalize_logits", args, {}, planner, out, backend, timeout_s))


def filter_logits(
    logits: ArrayT,
    temperature: FloatOrArray = None,
    top_k: IntOrArray = None,
    top_p: FloatOrArray = None,
    min_p: FloatOrArray = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """logits / temperature, and -inf for the tokens that are not to be drawn; in this order:

    top_k keeps the tokens whose logit is among the k largest; 0 keeps all. top_p keeps, of these, the most probable
    ones up to that which brings their sum to top_p or more. min_p keeps, of these, those with at least min_p times the
    probability of the most probable. Tokens with equal logits are kept or removed together, so more than k may stay;
    the most probable ones always stay. logits: (rows, vocabulary) or (vocabulary,), any float dtype. temperature above
    0. A row with a NaN or with infinity is NaN throughout, one of nothing but -inf stays so.
    Source: Fan et al. 2018 (top_k), Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p); in the order of
    Transformers' generate.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    args = (logits, *_settings("filter_logits", logits, given))
    planner = sampling_plans.plan_filter_logits
    return perform(Request("filter_logits", args, {}, planner, out, backend, timeout_s))


def sample(
    logits: ArrayT,
    temperature: FloatOrArray = None,
    top_k: IntOrArray = None,
    top_p: FloatOrArray = None,
    min_p: FloatOrArray = None,
    seed: IntOrArray = None,
    offset: IntOrArray = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """A token of each row of logits, drawn from those that filter_logits keeps in proportion to their probability.

    logits: (rows, vocabulary) or (vocabulary,), any float dtype. seed, offset: integers of 64 bits, or int64 arrays
    with one for each row. The same logits, settings, seed and offset give the same tokens on every backend and machine,
    so each call of a program wants another offset: count them. With one seed for all, rows draw independently; a row
    with a seed of its own draws the same in every place of every batch. temperature 0 takes the first of the largest
    logits, and where it is the number 0, seed and offset may be left out. top_k, top_p, min_p: as filter_logits.
    A row with a NaN, with infinity, or without a finite logit is InvalidArgument on the CPU, and gives -1 on a GPU.
    Returns: int64, (rows) or (). Source: Salmon et al. 2011 (Philox4x32-10); inverse transform sampling.
    """
    if isinstance(temperature, Real) and temperature == 0:
        seed, offset = 0 if seed is None else seed, 0 if offset is None else offset  # none is drawn
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    args = (logits, *_seeds("sample", logits, seed, offset), *_settings("sample", logits, given))
    return perform(Request("sample", args, {}, sampling_plans.plan_sample, out, backend, timeout_s))


def speculative_verify(
    target_probs: ArrayT,
    draft_ids: AnyArray,
    draft_probs: AnyArray | None = None,
    seed: IntOrArray = None,
    offset: IntOrArray = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT]:
    """How far a draft is accepted, and the token after that, so that tokens are distributed as the target's: (tokens,
    accepted).

    target_probs: (rows, drafts + 1, vocabulary), what the target gives each token at each draft, and after all of them.
    draft_ids: int32 or int64 (rows, drafts); a negative one ends its row. draft_probs: (rows, drafts, vocabulary), what
    each draft was drawn from; None for drafts that nothing was drawn for, such as n-grams. All without rows as well.
    Draft x is accepted with the probability min(1, p(x) / q(x)); at the first that is not, a token is drawn from
    max(p - q, 0), and after the last from p. seed and offset: as in sample, one offset for each call.
    Returns: tokens, int64 (rows, drafts + 1): those accepted, the one that was drawn, and -1; accepted, int64 (rows).
    Probabilities below 0 or not finite, and ids from the vocabulary on, are InvalidArgument on the CPU; on a GPU such
    an id ends its row. Source: Leviathan, Kalman and Matias 2023, algorithm 1.
    """
    op = "speculative_verify"
    args = (target_probs, draft_ids, draft_probs, *_seeds(op, target_probs, seed, offset))
    return perform(Request(op, args, {}, sampling_plans.plan_speculative_verify, None, backend, timeout_s))


def tree_accept(
    draft_ids: ArrayT,
    parents: AnyArray,
    target_ids: AnyArray,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """The path through a tree of drafts that the target takes itself, without chance: (tokens, nodes, accepted).

    All int32 or int64, ids of one dtype, (rows, nodes) or (nodes,). Node 0 is the last token that is settled.
    draft_ids: of each node; negative ones are padding. parents: of each node, a node before it; -1 for none.
    target_ids: the target's most probable token after each node. From node 0 on, the first child whose id is the
    target's is accepted.
    Returns int64: tokens (rows, nodes), those accepted, the target's next one, and -1; nodes (rows, nodes), node 0 and
    those of the accepted tokens, by which a cache of keys and values is compacted, and -1; accepted (rows), how many.
    A parent that is not before its node is InvalidArgument on the CPU. Source: Miao et al. 2024 (SpecInfer), 4.3.
    """
    args = (draft_ids, parents, target_ids)
    return perform(Request("tree_accept", args, {}, sampling_plans.plan_tree_accept, None, backend, timeout_s))


def _seeds(op: str, beside_of: Any, seed: Any, offset: Any) -> list[Any]:
    """Numbers of 64 bits, signed or not, as arrays. Raises InvalidArgument for what is missing."""
    found = []
    for name, value in (("seed", seed), ("offset", offset)):
        is_number = isinstance(value, Real)
        is_fit = isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**64
        if value is None or (is_number and not is_fit):
            allowed = "an integer of 64 bits, or an int64 array; pass one, and another offset for each call"
            raise InvalidArgument(f"{op}: {name} is {value!r}; allowed: {allowed}")
        bits = (int(value) + 2**63) % 2**64 - 2**63 if is_number else 0
        found.append(beside(beside_of, bits, "int64") if is_number else value)
    return found


def _settings(op: str, logits: Any, given: dict[str, Any]) -> list[Any]:
    """Numbers as arrays. Raises InvalidArgument for a bad one."""
    return [_setting(op, logits, name, value) if isinstance(value, Real) else value for name, value in given.items()]


def _setting(op: str, logits: Any, name: str, value: Any) -> Any:
    dtype = "int64" if name == "top_k" else "float32"
    is_fit = not isinstance(value, bool) and (dtype == "float32" or isinstance(value, Integral))
    allowed = sampling.problem(op, name, value) if is_fit else sampling.LIMITS[name][2]
    if allowed:
        raise InvalidArgument(f"{op}: {name} is {value!r}; allowed: {allowed}")
    return beside(logits, float(value) if dtype == "float32" else int(value), dtype)
