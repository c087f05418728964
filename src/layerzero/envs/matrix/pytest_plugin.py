"""`pytest --lz-matrix`: run tests marked `lz_env("torch", "flash-attn==2.8.3")` inside each of these environments.

Every such test becomes one item per environment. Its body, with its fixtures and conftest files, runs under a pytest of
that environment in a child process (inside/lz_matrix_inside.py); outcome, output and signal become the item's. pytest
imports this module at every start, so it imports nothing else until it is asked to.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from layerzero.envs.matrix.child_tests import Environments, Outcome

_MARK = "lz_env"
_DECIDED_INSIDE = ("skip", "skipif", "usefixtures", "xfail")  # by the child, which knows the libraries


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("layerzero")
    group.addoption("--lz-matrix", action="store_true", help=f"run tests marked {_MARK} inside their environments")
    group.addoption(
        "--lz-timeout", type=float, default=300.0, metavar="SECONDS", help="time limit of one such test (default 300)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_MARK}(*environments): run the test inside each of these environments")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("lz_matrix"):
        from layerzero.envs.matrix.inside.lz_matrix_inside import parametrize

        parametrize(metafunc)


@pytest.fixture
def lz_env(request: pytest.FixtureRequest) -> Any:
    """The environment that the test runs in, as the mark names it."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for index, item in enumerate(items):
        mark = item.get_closest_marker(_MARK)
        if mark is None:
            continue
        if not config.getoption("lz_matrix"):
            item.add_marker(pytest.mark.skip(reason=f"runs inside {', '.join(mark.args)}: needs --lz-matrix"))
        elif isinstance(item, pytest.Function):
            items[index] = InsideEnvironment.of(item)


class InsideEnvironment(pytest.Item):
    """A test function whose body runs elsewhere; name, node id, marks and keywords are the function's."""

    word: str
    function: pytest.Function

    @classmethod
    def of(cls, function: pytest.Function) -> InsideEnvironment:
        assert function.parent is not None
        item: InsideEnvironment = cls.from_parent(function.parent, name=function.name)
        item.function, item.word = function, str(function.callspec.params[_MARK])
        item.own_markers = [mark for mark in function.own_markers if mark.name not in _DECIDED_INSIDE]
        item.extra_keyword_matches.update(function.listextrakeywords())
        return item

    def runtest(self) -> None:
        outcome = environments(self.config).run(self.word, self.nodeid)
        for title, text in outcome.sections:
            self.add_report_section("call", title, text)
        match outcome.kind:
            case "skipped":
                pytest.skip(outcome.text)
            case "xfailed":
                pytest.xfail(outcome.text)
            case "failed":
                raise FailedInside(outcome)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedInside):
            return excinfo.value.outcome.text
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.function.reportinfo()


class FailedInside(Exception):
    """The test failed in its environment, or the environment cannot be had."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


_KEY = pytest.StashKey["Environments"]()


def environments(config: pytest.Config) -> Environments:
    """Those of this session; made when first asked for."""
    if _KEY not in config.stash:
        from layerzero.envs.matrix.child_tests import Environments

        config.stash[_KEY] = Environments.open(config)
    return config.stash[_KEY]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if _KEY in session.config.stash:
            session.config.stash[_KEY].close()
