"""The pytest plugin of the child: in the environment under test, where nothing else of ours is, it tells what came out.

child_tests.py loads it there by name from this folder, and pytest_plugin.py uses its `parametrize`, so that both give a
test the same node id. It imports pytest and the standard library only.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

ARGUMENT = "lz_env"
REPORT_VARIABLE = "LZ_MATRIX_REPORT"  # the file that takes one JSON object per phase of the test


def parametrize(metafunc: pytest.Metafunc) -> None:
    """One parameter for each environment of the nearest mark `lz_env`; the test need not take it as an argument."""
    mark = metafunc.definition.get_closest_marker(ARGUMENT)
    if mark is None:
        return
    if not mark.args or mark.kwargs or not all(isinstance(one, str) and one.strip() for one in mark.args):
        raise pytest.Collector.CollectError(  # of which pytest shows the sentence alone
            f'{metafunc.definition.nodeid}: {ARGUMENT} takes environments as strings, such as "torch" or '
            f'"onnxruntime==1.16.3 numpy<2"; got {mark.args!r} {mark.kwargs or ""}'
        )
    if ARGUMENT not in metafunc.fixturenames:
        metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(ARGUMENT, list(dict.fromkeys(mark.args)), indirect=True, ids=str)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{ARGUMENT}(*environments): run the test inside each of these environments")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


@pytest.fixture
def lz_env(request: pytest.FixtureRequest) -> Any:
    """The environment that the test runs in, as the mark names it."""
    return request.param


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    longrepr = report.longrepr
    line = {
        "when": report.when,
        "outcome": report.outcome,
        "crash": str(getattr(getattr(longrepr, "reprcrash", None), "message", "")),
        "text": str(longrepr[2]) if isinstance(longrepr, tuple) else report.longreprtext,
        "xfail": getattr(report, "wasxfail", None),
        "sections": [list(section) for section in report.sections],
    }
    with open(os.environ[REPORT_VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
