"""What workers tell of warnings and breakpoints: nothing of it is trusted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from layerzero.functions.warned import Warned
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.functions.attach import Breakpoint
from layerzero.ipc.transport.plain import pack_body


@pytest.mark.parametrize(
    "tree",
    [
        [],
        [[], "text", "file", 1, ""],
        [["builtins.UserWarning"] * 17, "text", "file", 1, ""],
        [["x" * 201], "text", "file", 1, ""],
        [[1], "text", "file", 1, ""],
        [["builtins.UserWarning"], b"text", "file", 1, ""],
        [["builtins.UserWarning"], "text", "file", "1", ""],
        [["builtins.UserWarning"], "text", "file", 1],
    ],
)
def test_what_is_no_warning_is_refused(tree: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        Warned.from_tree(tree)


@pytest.mark.parametrize(
    ("names", "category", "name"),
    [
        (["builtins.UserWarning", "builtins.Warning"], UserWarning, "UserWarning"),
        (["strange.Odd", "builtins.RuntimeWarning", "builtins.Warning"], RuntimeWarning, "Odd"),
        (["strange.UserWarning", "builtins.Warning"], Warning, "UserWarning"),
        (["builtins.print", "builtins.UserWarning"], UserWarning, "print"),  # which is no warning
        (["no name", "builtins.UserWarning"], UserWarning, "UserWarning"),
        (["builtins.UnicodeDecodeError"], Warning, "UnicodeDecodeError"),
        ([""], Warning, "Warning"),
    ],
)
def test_a_category_is_had_by_its_name_without_imports(names: list[str], category: type[Warning], name: str) -> None:
    with pytest.warns(category, match=r"text \[fn in old\]") as seen:
        Warned.from_tree([names, "text", "file.py", 3, "strange"]).issue("fn in old")
    assert seen[0].category.__name__ == name
    assert issubclass(seen[0].category, category)
    assert not issubclass(seen[0].category, UserWarning) or category is UserWarning


def test_a_warning_is_shown_once_by_default() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for file in ("one.py", "one.py", "two.py"):
            Warned(("builtins.UserWarning",), "again", file, 3, "").issue("fn in old")
    assert [one.filename for one in seen] == ["one.py", "two.py"]


@pytest.mark.parametrize("body", [None, [], ["a", "b", "c"], ["a", "b", "c", "1"], [1, "b", "c", 1], {"a": 1}])
def test_what_is_no_breakpoint_is_refused(body: Any) -> None:
    with pytest.raises(ProtocolError):
        Breakpoint.from_bytes(pack_body(body))
    with pytest.raises(ProtocolError):
        Breakpoint.from_bytes(b"\xc1")


def test_a_breakpoint_crosses() -> None:
    one = Breakpoint("old.0a1b2c3d", "shop.spectrum", "shop.py", 12)
    assert Breakpoint.from_bytes(one.to_bytes()) == one
