"""Documents point at what exists."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from layerzero.client.facade import api
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "layerzero"  # documents name the files of the package from here
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z0-9_.-]+\.(?:py|md|json|toml))`")
DOCUMENTS = [
    pytest.param(path, id=path.relative_to(ROOT).as_posix())
    for path in sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench/README.md", ROOT / "examples/README.md"]
    )
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """A table that walks the code is worth nothing once it leads astray."""
    named = set(FILE.findall(document.read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not any((top / name).exists() for top in (ROOT, SOURCE))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """A page that was renamed, or a heading, takes the links with it."""
    lost = []
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            lost.append(link)
    assert lost == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_table_of_contents_has_every_page() -> None:
    """A page that is not in docs/README.md is one that nobody finds."""
    contents = ROOT / "docs" / "README.md"
    linked = {(contents.parent / link).resolve() for link in LINK.findall(contents.read_text(encoding="utf-8"))}
    assert [page.name for page in ROOT.glob("docs/**/*.md") if page != contents and page.resolve() not in linked] == []


def test_every_op_has_its_section() -> None:
    """docs/ops.md is where users read what an op means, and what its kernels are held to."""
    document = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert [line[3:] for line in document.splitlines() if line[3:] in PUBLIC_OPS] == list(PUBLIC_OPS)


EXAMPLE = ROOT / "examples" / "third-party-backend"
GUIDE = (ROOT / "docs" / "adding-a-backend.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["blis.toml", "provider.py"])
def test_guide_shows_the_files_of_the_example(file: str) -> None:
    """What a newcomer copies is what is tested."""
    assert (
        f"```{'toml' if file.endswith('.toml') else 'python'}\n{(EXAMPLE / 'src/lz_blis' / file).read_text()}```"
        in GUIDE
    )


def test_guide_shows_the_descriptor_and_the_entry_point_of_the_example() -> None:
    """Likewise, of a part."""
    shown = json.loads(re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)[0])
    whole = json.loads((EXAMPLE / "src/lz_blis/blis.json").read_text())
    assert shown == {**whole, "ops": {"matmul": whole["ops"]["matmul"]}}
    tables = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)[1].strip().split("\n\n")
    project = (EXAMPLE / "pyproject.toml").read_text()
    assert [table in project for table in tables] == [True, True]


OPS_PAGE = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_ops_are_documented_with_the_parameters_that_they_have(name: str) -> None:
    """Names, order, defaults and which are keywords only; out=, backend= and timeout_s= are told of once for all."""
    found = re.search(rf"^    ({name}\(.*?\))$", OPS_PAGE.partition(f"\n## {name}\n")[2], re.DOTALL | re.MULTILINE)
    assert found
    parameters = " ".join(found[1][len(name) + 1 : -1].split())
    said = inspect.signature(eval(f"lambda {parameters}: None"))  # noqa: S307  # of our own page
    have = inspect.signature(api.function_of(name))
    plain = [p.replace(annotation=p.empty) for p in have.parameters.values() if p.name not in COMMON]
    assert str(said) == str(have.replace(parameters=plain, return_annotation=have.empty))


COMMON = ("out", "backend", "timeout_s")
