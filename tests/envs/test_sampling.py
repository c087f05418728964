"""Sampling through the public API, on each backend of an ordinary installation: the same tokens everywhere, drawn as
the distribution says."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest
from tests import sampling_reference
from tests.process.harness import Site

import layerzero as lz

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(1200)]
BACKENDS = ("torch", "mlx")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 40, "temperature": 1.3},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
]


def logits(rows: int, vocabulary: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 4).astype(np.float32)


def chi_square(counts: Any, expected: Any) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """What chi-square passes once in 10,000 times: Wilson and Hilferty's approximation."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_seed_and_offset_same_tokens_on_every_backend(settings: dict[str, Any]) -> None:
    """Of a vocabulary whose probabilities no two libraries add up alike."""
    x, offsets = logits(24, 32_000), np.arange(24) * 2**33 - 7
    first, *others = (lz.sample(x, **settings, seed=2**63 + 5, offset=offsets, backend=one) for one in BACKENDS)
    assert first.dtype == np.int64
    assert len(set(first.tolist())) > 8
    for other in others:
        assert first.tolist() == other.tolist()


@pytest.mark.parametrize("settings", [*SETTINGS[1:4], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_as_frequent_as_they_are_probable(backend: str, settings: dict[str, Any]) -> None:
    """4,000 draws of one distribution, by a fixed seed, against float64 probabilities that other code gives."""
    rows, vocabulary = 4_000, 60
    row = logits(1, vocabulary, seed=3) / 2
    as_arrays = {name: np.array([value]) for name, value in settings.items()}
    wanted = rows * sampling_reference.probabilities(row, **as_arrays)[0][0]
    found = lz.sample(np.broadcast_to(row, (rows, vocabulary)), **settings, seed=11, offset=0, backend=backend)
    counts = np.bincount(found, minlength=vocabulary)
    assert counts[wanted == 0].sum() == 0
    is_rare = wanted < 5
    merged = np.append(counts[~is_rare], counts[is_rare].sum()), np.append(wanted[~is_rare], wanted[is_rare].sum())
    kept = merged[1] > 0
    assert chi_square(merged[0][kept], merged[1][kept]) < limit(int(kept.sum()) - 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_of_one_row_draw_independently(backend: str) -> None:
    """As a program counts them: of pairs of neighbours each is as frequent as any other."""
    flat = np.zeros((2048, 8), np.float32)
    found = lz.sample(flat, seed=np.full(2048, 5), offset=np.arange(2048), backend=backend)
    pairs = np.bincount(found[:-1] * 8 + found[1:], minlength=64)
    assert chi_square(pairs, np.full(64, 2047 / 64)) < limit(63)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_a_seed_of_its_own_does_not_see_its_batch(backend: str) -> None:
    """A request of a server draws what it would draw alone, wherever it is put."""
    x, seeds, offsets = logits(5, 300), np.arange(5) + 2**40, np.array([3, 1, 4, 1, 5])
    settings = {"top_p": np.float32([0.5, 0.9, 1.0, 0.7, 0.2]), "top_k": np.array([7, 9, 20, 200, 3], np.int32)}
    together = lz.sample(x, **settings, seed=seeds, offset=offsets, backend=backend)
    for n in range(5):
        alone = {name: value[n : n + 1] for name, value in settings.items()}
        one = lz.sample(x[n], **alone, seed=seeds[n : n + 1], offset=int(offsets[n]), backend=backend)
        assert one.shape == ()
        assert one == together[n]
    turned = {name: value[::-1].copy() for name, value in settings.items()}
    back = lz.sample(x[::-1].copy(), **turned, seed=seeds[::-1].copy(), offset=offsets[::-1].copy(), backend=backend)
    assert back[::-1].tolist() == together.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_0_takes_the_first_of_the_largest(backend: str) -> None:
    """Without a seed where it is 0 for all; beside rows that draw."""
    x = np.round(logits(6, 50))
    assert lz.sample(x, temperature=0, backend=backend).tolist() == x.argmax(1).tolist()
    mixed = np.float32([0, 1, 0, 1e-30, 0, 1])
    found = lz.sample(x, temperature=mixed, seed=1, offset=2, backend=backend)
    assert found[::2].tolist() == x.argmax(1)[::2].tolist()
    assert x[3, found[3]] == x[3].max()  # next to nothing: of the largest ones any


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_never_drawn_and_rows_that_nothing_can_be_drawn_from(backend: str) -> None:
    """-inf has no probability; a row without a finite largest logit is an error that names it."""
    x = np.full((2, 50), -np.inf, np.float32)
    x[0, 7] = x[1, 9] = -300.0
    assert lz.sample(x, seed=1, offset=1, top_k=10**12, backend=backend).tolist() == [7, 9]
    for bad in (np.nan, np.inf):
        odd = logits(3, 50)
        odd[1, 4] = bad
        for temperature in (0, 1):
            with pytest.raises(lz.InvalidArgument, match="sample: row 1 of logits has a NaN, infinity, or nothing but"):
                lz.sample(odd, temperature=temperature, seed=1, offset=1, backend=backend)
    x[1] = -np.inf
    with pytest.raises(lz.InvalidArgument, match="sample: row 1 of logits"):
        lz.sample(x, seed=1, offset=1, backend=backend)
    with pytest.raises(lz.InvalidArgument, match=r"top_p\[1\] is 1.5; allowed: 0 to 1; 1 keeps all"):
        lz.sample(logits(2, 50), top_p=np.float32([0.5, 1.5]), seed=1, offset=1, backend=backend)


def test_seed_and_offset_are_asked_for() -> None:
    """A default would draw the same numbers at every step, and nobody would see it."""
    x = logits(2, 50)
    for given, says in (
        ({}, "seed is None"),
        (
            {"seed": 1},
            "offset is None; allowed: an integer of 64 bits, or an int64 array; pass one, and another offset",
        ),
        ({"temperature": 0.5, "offset": 1}, "seed is None"),
        ({"seed": 1.5, "offset": 1}, "seed is 1.5"),
        ({"seed": 2**64, "offset": 1}, "seed is 18446744073709551616"),
        ({"seed": 1, "offset": np.zeros(3, np.int64)}, r"offset has shape \[3\]"),
        ({"seed": np.zeros(2, np.int32), "offset": 1}, "seed is int32; allowed: int64"),
    ):
        with pytest.raises(lz.InvalidArgument, match=says):
            lz.sample(x, **given)


# --- a decoding loop ---------------------------------------------------------------------------------------------

WEIGHTS = logits(300, 300, seed=9) / 2  # of a model that looks at the last two tokens


def generated(backend: str | None, seeds: list[int], prompts: list[int], steps: int = 24) -> list[list[int]]:
    """What each request is continued with, by its own settings."""
    rows = len(seeds)
    every = np.float32([[0.8, 0.9, 1.0], [1.0, 1.0, 1.3], [0.0, 1.0, 1.1], [1.5, 0.7, 1.0]])
    temperature, top_p, repetition = every[np.array(seeds) % 4].T.copy()
    ids = np.array(prompts)[:, None]
    for step in range(steps):
        x = WEIGHTS[ids[:, -1]] + 0.5 * WEIGHTS[ids[:, -2 if step else -1]][:, ::-1]
        x = lz.penalize_logits(
            x, ids, repetition_penalty=repetition, frequency_penalty=0.1, presence_penalty=0.3, backend=backend
        )
        token = lz.sample(
            x, temperature, 40, top_p, 0.01, seed=np.array(seeds), offset=np.full(rows, step), backend=backend
        )
        ids = np.concatenate([ids, token[:, None]], axis=1)
    return ids[:, 1:].tolist()


def test_a_decoding_loop_gives_the_same_text_everywhere() -> None:
    """On each backend, in any batch, and also where the worker dies on the way and another backend takes over."""
    seeds, prompts = [40, 41, 42, 43, 47], [1, 2, 3, 4, 2]
    texts = {backend: generated(backend, seeds, prompts) for backend in BACKENDS}
    assert texts["torch"] == texts["mlx"]
    assert all(len(set(text)) > 6 for text in texts["torch"])
    assert generated("mlx", seeds[::-1], prompts[::-1]) == texts["torch"][::-1]
    assert generated("torch", seeds[1:2], prompts[1:2]) == texts["torch"][1:2]
    victim = next(row["pid"] for row in lz.status()["backends"] if row["name"] == "torch")
    os.kill(victim, signal.SIGKILL)
    assert generated(None, seeds, prompts) == texts["torch"]


# --- drafts ------------------------------------------------------------------------------------------------------

P = np.array([[0.30, 0.25, 0.20, 0.15, 0.10, 0.0], [0.05, 0.45, 0.0, 0.2, 0.2, 0.1], [0.1, 0.1, 0.2, 0.2, 0.2, 0.2]])
Q = np.array([[0.10, 0.40, 0.05, 0.25, 0.0, 0.20], [0.3, 0.1, 0.2, 0.2, 0.1, 0.1]])


def verified(backend: str, rows: int, has_draft: bool = True) -> tuple[Any, Any, Any]:
    """Drafts of Q, or of one token each, against P: tokens, accepted counts, drafts."""
    rng = np.random.default_rng(5)
    ids = np.stack([rng.choice(6, rows, p=q) if has_draft else np.full(rows, n) for n, q in enumerate(Q)], 1)
    target, draft = (np.broadcast_to(one, (rows, *one.shape)) for one in (P, Q))
    tokens, accepted = lz.speculative_verify(
        target, ids, draft if has_draft else None, seed=9, offset=2, backend=backend
    )
    return tokens, accepted, ids


@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verified_tokens_are_distributed_as_the_targets(backend: str, has_draft: bool) -> None:
    """Whatever the draft proposes: of the first token, and of each later one where the one before was accepted. As many
    are accepted as p and q have in common."""
    rows = 4_000
    tokens, accepted, ids = verified(backend, rows, has_draft)
    columns = np.arange(3)
    assert ((tokens >= 0) == (columns <= accepted[:, None])).all()
    assert (tokens[:, :2][columns[:2] < accepted[:, None]] == ids[columns[:2] < accepted[:, None]]).all()
    for n, p in enumerate(P):
        found = tokens[accepted >= n, n]
        expected, counts = p * len(found), np.bincount(found, minlength=6)
        assert counts[p == 0].sum() == 0
        assert chi_square(counts[p > 0], expected[p > 0]) < limit(int((p > 0).sum()) - 1)
        if n < 2:
            share = np.minimum(p, Q[n]).sum() if has_draft else p[n]
            among = len(found)
            kept = int((accepted > n).sum())
            counts, expected = np.array([kept, among - kept]), among * np.array([share, 1 - share])
            assert chi_square(counts, expected) < limit(1)


def test_verified_tokens_are_the_same_on_every_backend() -> None:
    """As those of sample are."""
    rng = np.random.default_rng(6)
    target, other = (rng.dirichlet(np.full(2000, 0.1), (16, n)).astype(np.float32) for n in (5, 4))
    draft = target[:, :4] * np.float32(0.7) + other * np.float32(0.3)
    ids = np.array([[rng.choice(2000, p=row / row.sum()) for row in rows] for rows in draft.astype(float)])
    ids[3, 2] = ids[5, 0] = -1
    first, *others = (lz.speculative_verify(target, ids, draft, seed=1, offset=2**40, backend=one) for one in BACKENDS)
    assert len(set(first[1].tolist())) > 2
    assert first[1][5] == 0
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.tolist() == another.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_drafts_are_accepted_while_they_are_the_targets(backend: str) -> None:
    """With all of the target's mass on one token nothing is left to chance."""
    target = np.eye(8, dtype=np.float32)[[[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 0]]]
    ids = np.array([[1, 2, 3], [1, 7, 3], [0, 6, 7]], np.int32)
    tokens, accepted = lz.speculative_verify(target, ids, seed=1, offset=1, backend=backend)
    assert tokens.tolist() == [[1, 2, 3, 4], [1, 2, -1, -1], [5, -1, -1, -1]]
    assert accepted.tolist() == [3, 1, 0]
    alone = lz.speculative_verify(target[1], ids[1], seed=1, offset=1, backend=backend)
    assert (alone[0].tolist(), int(alone[1])) == ([1, 2, -1, -1], 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_accept_takes_the_targets_path(backend: str) -> None:
    """Of two equal children the first; padding never; the nodes are what a cache keeps."""
    #            0 settled; 1, 2, 3 its children; 4, 5 those of 2; 6 that of 5; 7 padding below 6
    drafts = np.array([[9, 11, 12, 12, 13, 14, 15, -1], [9, 11, 12, 12, 13, 14, 15, -1]])
    parents = np.array([[-1, 0, 0, 0, 2, 2, 5, 6]] * 2)
    target = np.array([[12, 0, 14, 0, 0, 15, -1, 0], [3, 0, 0, 0, 0, 0, 0, 0]])
    tokens, nodes, accepted = lz.tree_accept(drafts, parents, target, backend=backend)
    assert tokens.tolist() == [[12, 14, 15, -1, -1, -1, -1, -1], [3, *[-1] * 7]]
    assert nodes.tolist() == [[0, 2, 5, 6, -1, -1, -1, -1], [0, *[-1] * 7]]
    assert accepted.tolist() == [3, 0]
    with pytest.raises(lz.InvalidArgument, match=r"parents\[1, 2\] is 2; allowed: a node before 2, or -1"):
        lz.tree_accept(drafts[:, :3], np.array([[-1, 0, 1], [-1, 0, 2]]), target[:, :3], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_drafts_are_refused(backend: str) -> None:
    """On the CPU, where somebody reads them."""
    target, ids = np.full((1, 2, 4), 0.25, np.float32), np.array([[1]])
    for p, x, q, says in (
        (target, ids + 3, None, "token id 4 is not below 4"),
        (target * np.float32("nan"), ids, None, "target_probs has numbers from nan"),
        (target * np.float32("inf"), ids, None, "target_probs has numbers from inf"),
        (-target, ids, None, "target_probs has numbers from -"),
        (target, ids, -target[:, :1], "draft_probs has numbers from -0.25"),
    ):
        with pytest.raises(lz.InvalidArgument, match=f"speculative_verify: {says}"):
            lz.speculative_verify(p, x, q, seed=1, offset=1, backend=backend)
    for call, says in (
        (lambda: lz.speculative_verify(target, ids), "speculative_verify: seed is None"),
        (lambda: lz.speculative_verify(target, ids, seed=1), "speculative_verify: offset is None"),
        (lambda: lz.speculative_verify(target[:, 0], ids, seed=1, offset=1), r"draft_ids has shape \[1, 1\]"),
        (lambda: lz.speculative_verify(target[0, 0], ids, seed=1, offset=1), r"target_probs has shape \[4\]"),
        (lambda: lz.tree_accept(ids, ids, ids[0]), r"target_ids has shape \[1\]"),
        (lambda: lz.tree_accept(ids * 1.0, ids, ids), "draft_ids is float64"),
    ):
        with pytest.raises(lz.InvalidArgument, match=says):
            call()


CHECKED = """
import numpy as np
lz.connect()
x = np.arange(6, dtype="float32")
print(lz.filter_logits(x, top_k=2, backend="{0}").tolist())
q, k = np.ones((1, 1, 2, 4), "float32"), np.ones((1, 1, 1, 4), "float32")
out, lse = lz.attention_varlen_forward(
    q[0].swapaxes(0, 1), k[0], k[0], *np.array([[0, 2], [0, 1]], "int32"), is_causal=True,
    causal_alignment="bottom_right", backend="{0}")
print(lse.ravel()[0], lz.merge_attention(out[None], lse[None], out[None], lse[None], backend="{0}")[1].ravel()[0])
if "{0}" == "torch":  # no target counts: the mean is NaN
    print(lz.cross_entropy(x.reshape(2, 3), np.full(2, -100), backend="{0}"))
try:
    lz.mul(np.full(2, 3e38, "float32"), np.full(2, 3e38, "float32"), backend="{0}")
except lz.BackendError as exc:
    print(exc)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_that_are_meant_are_no_faults_of_kernels(installation: Site, backend: str) -> None:
    """Under LAYERZERO_DEBUG=1, by which a decoding loop is looked at: those of tokens that are removed."""
    installation.environ["LAYERZERO_DEBUG"] = "1"
    try:
        process = installation.python(CHECKED.format(backend), stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=600)
    finally:
        del installation.environ["LAYERZERO_DEBUG"]
    assert process.returncode == 0, err
    kept, lowest, *of_nothing, fault = out.splitlines()
    assert of_nothing == ["nan"] * (backend == "torch")
    assert kept == "[-inf, -inf, -inf, -inf, 4.0, 5.0]"
    assert lowest == "-inf -inf"
    assert f"avoid {backend}.mul for this call (lz.avoid) where others do better (lz.compare)" in fault
