"""What functions say, and whose that is."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from layerzero.workers.functions.output import OUT, Output


def test_what_is_said_for_nobody_takes_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    with warnings.catch_warnings():
        output = Output()
        print("theirs")
        said = output.take()
        print("before")
        with output.nobodys():
            print("nobody's")
        assert output.take() == [[OUT, "before"], [OUT, "\n"]]
    assert said[0] == [OUT, "theirs"]
