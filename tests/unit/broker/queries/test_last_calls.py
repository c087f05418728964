"""Whom a worker's last calls are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.broker.queries.last_calls import OF_OTHERS, last_calls
from layerzero.ipc.errors import InvalidArgument


def broker(*, allow_uids: str = "", joined: str = "", calls: list[str] | None = None) -> Any:
    worker = SimpleNamespace(backend="alpha", generation=1)
    processes = SimpleNamespace(get=lambda _: None, last_calls=SimpleNamespace(told=lambda *_: calls))
    settings = SimpleNamespace(allow_uids=allow_uids, joined=joined)
    return SimpleNamespace(state=SimpleNamespace(workers={"alpha": worker}), settings=settings, processes=processes)


def test_users_that_share_workers_do_not_see_each_others_shapes() -> None:
    found = last_calls(broker(allow_uids="1,2", joined="alpha", calls=["one"]), {"backend": "alpha", "pids": [3]})
    assert found == {"calls": [], "why": OF_OTHERS}
    found = last_calls(broker(allow_uids="1,2", calls=["one"]), {"backend": "alpha", "pids": [3]})
    assert found == {"calls": ["one"], "why": ""}, "each has a broker of their own"


def test_one_that_is_not_known_is_said() -> None:
    assert last_calls(broker(), {"backend": "alpha"})["why"] == "not known: it ended too long ago"
    assert last_calls(broker(calls=[]), {"backend": "alpha"}) == {"calls": [], "why": ""}


@pytest.mark.parametrize("params", [{}, {"backend": "beta"}, {"backend": 3}, {"backend": "alpha", "pids": ["x"]}])
def test_nonsense_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="last_calls takes `backend`"):
        last_calls(broker(), params)
