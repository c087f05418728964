"""Profiles that were learned, as files of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.capabilities.profiles import PROFILES, of_calls
from layerzero.envs import profiles
from layerzero.ipc.errors import ConfigError

MINE = of_calls("mine", [("silu", "float32"), ("tokenize", "any"), ("silu", "bfloat16")])


def test_a_profile_that_was_kept_is_read_again(tmp_path: Path) -> None:
    """Beside LayerZero's own."""
    profiles.write(MINE, tmp_path)
    assert profiles.read("mine", tmp_path) == MINE
    assert profiles.read("nlp", tmp_path) is PROFILES["nlp"]
    assert profiles.learned(tmp_path) == ["mine"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("inferense", "no profile is called 'inferense'; did you mean 'inference'"),
        ("../mine", "a profile's name has up to 40 small letters"),
        ("Mine", "a profile's name has up to 40 small letters"),
    ],
)
def test_a_name_that_no_profile_has_is_refused(tmp_path: Path, name: str, said: str) -> None:
    """A misspelt one must not be all calls."""
    with pytest.raises(ConfigError, match=said):
        profiles.read(name, tmp_path)


def test_own_profiles_are_not_replaced(tmp_path: Path) -> None:
    """Their names mean the same everywhere."""
    with pytest.raises(ConfigError, match="is LayerZero's own"):
        profiles.write(of_calls("nlp", [("silu", "float32")]), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "it must be"),
        ('{"schema": 2, "calls": {}}', "it must be"),
        ('{"schema": 1, "calls": {"slu": ["float32"]}}', "no op is called 'slu'; did you mean 'silu'"),
        ('{"schema": 1, "calls": {"silu": []}}', "silu must have a list of dtypes"),
        ('{"schema": 1, "calls": {"silu": ["float31"]}}', "no dtype is called 'float31'"),
        ('{"schema": 1, "calls": {"silu": [["float32"]]}}', "no dtype is called"),
    ],
)
def test_a_file_that_was_edited_wrongly_says_where(tmp_path: Path, text: str, said: str) -> None:
    """It may be edited by hand: half a profile would leave calls out in silence."""
    path = profiles.write(MINE, tmp_path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        profiles.read("mine", tmp_path)
