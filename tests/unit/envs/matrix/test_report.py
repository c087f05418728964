"""The matrix as a page and as text: nothing from outside becomes markup, nothing is loaded, everything is there."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import combinations

from layerzero.envs.matrix import page, report
from layerzero.envs.matrix.cover import Cover
from layerzero.envs.matrix.engine import Cell, Isolated, Matrix
from layerzero.envs.matrix.report import Machine
from layerzero.envs.matrix.subjects import Subject
from layerzero.envs.matrix.verdict import Kind, Verdict

EVIL = '</pre><script>alert("1")</script>\' onmouseover="x" <!--'
MACHINE = Machine("2026-01-01T00:00:00+00:00", f"cpu {EVIL}", "Linux", "3.11.7", "uv 0.9")
OK = Verdict(Kind.OK, "fine", versions={"numpy": "2.0"})
CRASH = Verdict(
    Kind.CRASH, f"died {EVIL}", EVIL, "SIGSEGV", EVIL, ({"order": [EVIL], "kind": EVIL, "summary": EVIL},) * 2
)


def matrix() -> Matrix:
    """Three subjects: one works, one needs care, and the two do not go together; the third has an evil name."""
    names = ("good", "careful", EVIL)
    subjects = (
        Subject("good", ("numpy",), backend="mlx"),
        Subject("careful", ("onnxruntime==1.16.3",), needs=("numpy<2",)),
        Subject(EVIL, ("numpy>=2",), env={"NAME": EVIL}),
    )
    alone = {
        ("good",): Cell(("good",), OK),
        ("careful",): Cell(("careful",), CRASH, OK, ("numpy<2",)),
        (EVIL,): Cell((EVIL,), CRASH, CRASH, (EVIL,)),
    }
    pairs = {pair: Cell(pair, CRASH, CRASH, ("numpy<2", EVIL)) for pair in combinations(names, 2)}
    return Matrix(
        subjects=subjects,
        cells={**alone, **pairs},
        sets=(Cell(names, CRASH),),
        isolated={name: Isolated(name != EVIL, "process", EVIL) for name in names},
        cover=Cover((("good",), ("careful",)), True, (names,)),
        unserved=(EVIL,),
    )


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_nothing_from_outside_becomes_markup() -> None:
    """A traceback with a tag in it would run in the browser of whoever reads the report."""
    text = page.render(matrix(), MACHINE)
    found = Page(text)
    assert found.tags.count("script") == 1
    assert EVIL not in text
    assert not [name for name, _ in found.attributes if name.startswith("on")]


def test_the_page_needs_nothing_else() -> None:
    """It goes into reports and onto machines without a network."""
    found = Page(page.render(matrix(), MACHINE))
    links = [value or "" for name, value in found.attributes if name in ("src", "href", "action", "data")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "link" not in found.tags
    assert "img" not in found.tags


def test_every_cell_leads_to_its_evidence() -> None:
    """Links and no script: the evidence is one key press away, without JavaScript, too."""
    found = Page(page.render(matrix(), MACHINE))
    ids = [value for name, value in found.attributes if name == "id"]
    targets = {(value or "").removeprefix("#") for name, value in found.attributes if name == "href"}
    assert len(targets) == 6  # three alone and three pairs; both halves of the map lead to the same
    assert targets <= set(ids)
    assert len(ids) == len(set(ids))


def test_json_says_all_that_the_page_says() -> None:
    """Scripts read this one."""
    data = json.loads(json.dumps(report.to_json(matrix(), MACHINE)))
    assert [cell["state"] for cell in data["cells"]] == ["ok", "care", "conflict", "conflict", "conflict", "conflict"]
    assert data["environments"]["groups"] == [["good"], ["careful"]]
    assert data["environments"]["unserved"] == [EVIL]
    assert data["cells"][1]["care"] == ["numpy<2"]
    assert data["subjects"][0]["backend"] == "mlx"


def test_pairs_that_tell_nothing_new_are_left_out_of_the_text() -> None:
    """One library that dies with any NumPy 2 would fill the screen with its pairs."""
    made = matrix()
    pair = ("good", "careful")
    told_alone = Verdict(Kind.CRASH, "died", "careful")
    cells = {
        **made.cells,
        pair: Cell(pair, told_alone, OK, ("numpy<2",)),
        ("careful",): Cell(("careful",), told_alone, OK),
    }
    notable = report.notable(Matrix(made.subjects, cells, (), made.isolated, made.cover, ()))
    assert [cell.subjects for cell in notable] == [("careful",), (EVIL,), ("good", EVIL), ("careful", EVIL)]


def test_the_answer_in_words() -> None:
    """The line that most users came for."""
    assert list(report.environments_text(matrix())) == [
        "2 environments serve 2 of 3 subjects:",
        "  1. good",
        "  2. careful",
        f"sets that fail though their pairs work: good + careful + {EVIL}",
        f"no environment serves: {EVIL}",
    ]
