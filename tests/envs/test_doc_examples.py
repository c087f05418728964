"""The Python in README.md and docs/ runs as it stands there, on the backends of a CPU installation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.process.harness import ROOT, Site

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
# What a reader has at hand, by the names that the pages use.
AT_HAND = """
import numpy as np
import layerzero as lz
lz.connect()
rng = np.random.default_rng(0)
q, k, v = (lz.share(rng.standard_normal((1, 8, 16, 64), dtype=np.float32)) for _ in range(3))
x = rng.standard_normal((4, 512), dtype=np.float32)
weight = rng.standard_normal((64, 512), dtype=np.float32)
"""
NOT_RUN = {
    "docs/adding-a-backend.md": "it is the example's provider: test_docs.py compares them, test_third_party.py runs it",
    "docs/cluster.md": "it needs Ray: tests/clusters",
    "docs/joined.md": "it needs another container: tests/containers",
    "docs/diffusers.md": "the program needs Diffusers: tests/diffusion_models",
    "docs/engines.md": "the program needs flashinfer: tests/serving_engines",
    "docs/functions.md": "it needs an environment of its own: test_functions.py runs examples/functions.py",
    "docs/models.md": "it needs an environment of its own and a model: test_models.py has both",
    "docs/versions.md": "it needs environments of other versions: test_versions.py builds some",
    "docs/transformers.md": "the program needs Transformers: tests/transformer_models",
    "docs/torch.md": "the program needs torch itself: tests/frameworks",
    "docs/matrix.md": "it is a test for pytest: test_matrix_pytest.py runs such",
}


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


@pytest.mark.timeout(600)  # environments are probed, where nobody has done so before
@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if blocks(path) and page not in NOT_RUN])
def test_the_examples_of_a_page_run(installation: Site, tmp_path: Path, page: str) -> None:
    """In order, as one program: a later block uses what an earlier one has defined. An example may end with an exit
    code of its own, and in no exception."""
    code = "\n".join((AT_HAND, *blocks(PAGES[page])))
    program = installation.python(code, stderr=subprocess.PIPE, cwd=tmp_path)
    out, err = program.communicate()
    assert "Traceback" not in err, f"{out}\n{err}"
    assert program.returncode == 0 or "raise SystemExit" in code, err


def test_pages_that_are_not_run_have_python() -> None:
    """The list of exceptions does not outlive them."""
    assert [page for page in NOT_RUN if not blocks(PAGES[page])] == []
