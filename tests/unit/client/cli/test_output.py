"""What libraries say reaches terminals as text, and commands none."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from layerzero.client.cli import output

EVIL = "1.0\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil"


@pytest.mark.parametrize("form", ["text", "table", "note", "error", "plain"])
def test_no_control_character_of_a_library_is_printed(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.out.cache_clear()
    output.err.cache_clear()
    if form == "text":
        output.out().print(Text(EVIL), soft_wrap=True)
    elif form == "plain":
        output.out().print(EVIL, markup=False, highlight=False)
    elif form == "table":
        table = Table("version")
        table.add_row(Text(EVIL))
        output.out().print(table)
    elif form == "note":
        output.note(EVIL)
    else:
        from layerzero.ipc.errors import BackendError

        output.show_error(BackendError(f"died\n{EVIL}", stderr_tail=EVIL), as_json=False)
    said = capsys.readouterr()
    text = said.out + said.err
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    assert "\\x1b" in text


def test_what_is_too_long_is_cut_and_lines_stay(capsys: pytest.CaptureFixture[str]) -> None:
    output.out.cache_clear()
    output.out().print(Text("v" * 200_000 + "\nsecond"), soft_wrap=True)
    said = capsys.readouterr().out
    assert len(said) < 6000
    assert "more characters" in said
    assert said.endswith("second\n")
