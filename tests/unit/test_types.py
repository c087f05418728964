"""What type checkers say of user code: mypy --strict over tests/samples/typed_user.py, and what editors see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "samples" / "typed_user.py"


@pytest.mark.timeout(600)  # mypy reads NumPy's stubs
def test_mypy_says_what_the_sample_expects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error is expected on its line, and no line has another: what goes in comes out, and mistakes are found."""
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    options = ["--strict", "--no-namespace-packages", "--config-file=", "--no-error-summary", "--hide-error-context"]
    quiet = ["--follow-imports=silent", "--cache-dir", str(tmp_path), "--no-pretty"]
    out, err, _ = api.run([*options, *quiet, str(SAMPLE)])
    assert err == ""
    found = {}
    for line in out.splitlines():
        match = re.fullmatch(r".*typed_user\.py:(\d+): error: (.*)", line)
        if match:
            found.setdefault(int(match[1]), match[2])
    lines = enumerate(SAMPLE.read_text().splitlines(), 1)
    expected = {number: line.partition("# E: ")[2] for number, line in lines if "# E: " in line and number > 3}
    assert found.keys() == expected.keys(), out
    assert [message for number, message in expected.items() if message not in found[number]] == [], out


def test_what_editors_see_is_what_there_is() -> None:
    """The imports for type checkers and the table of the lazy names are two lists in one file."""
    import layerzero as lz

    text = (ROOT / "src" / "layerzero" / "__init__.py").read_text()
    imports = re.findall(r"(\w+) as (\w+)\b", text.partition("if TYPE_CHECKING:")[2].partition("_HOME")[0])
    assert all(name == alias for name, alias in imports)
    assert sorted(name for name, _ in imports) == sorted(lz.__all__)
