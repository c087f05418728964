"""The policy file: what of YAML it may have, which line a problem is in, and what a change of it does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.broker.configuration import policy_source
from layerzero.broker.configuration.policy_source import CHECK_S, MAX_FILE_BYTES, PolicySource, load_layer, parse_layer
from layerzero.broker.configuration.settings import POLICY_FILE, load
from layerzero.broker.selection.policy import compose
from layerzero.broker.selection.policy_values import Known
from layerzero.ipc.errors import ConfigError, InvalidArgument

KNOWN = Known(("mlx", "torch"), {"torch.attention": "attention", "mlx.attention": "attention"}, ("attention",))

GOOD = """\
# what this host runs
locks:
  attention: torch.attention

avoid_sources: [mlx]
rules:
  - match: {seq_len: ">16384"}
    prefer: "torch.*"
  - match:
      sm: ">=90"
    avoid: mlx
"""


def source(file: Path, variables: list[dict[str, object]] | None = None) -> PolicySource:
    return PolicySource(file, is_optional=False, variables=variables or [], known=KNOWN)


def problems(text: str) -> list[str]:
    policy, found = compose((parse_layer(text, "f"),), KNOWN)
    assert (policy is None) == bool(found)
    return found


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    """`lz policy show --origin` and every rejection name it."""
    file = tmp_path / "policy.yaml"
    file.write_text(GOOD)
    rows = source(file).policy.describe()
    origins = {key: row["origin"] for key, row in rows.items() if row["origin"] != "default"}
    lines = {"locks.attention": 3, "avoid_sources": 5, "rules.0": 7, "rules.1": 9}
    assert origins == {key: f"{file}:{line}" for key, line in lines.items()}


def test_all_problems_of_a_file_come_with_their_lines() -> None:
    """Also those of the values when the YAML itself has some."""
    text = "locks:\n  attention: torch.atention\nstict_mode: true\nplan_mode: maybe\nplan_mode: true\n"
    found = problems(text + "rules:\n  - match:\n      smm: 1\n    prefer: torch\n")
    assert [problem.partition(": ")[0] for problem in found] == ["f:2", "f:3", "f:4", "f:5", "f:8"]
    found = problems("locks:\n  attention: torch.atention\nrules:\n  - match:\n      smm: 1\n    prefer: torch\n")
    assert [problem.partition(": ")[0] for problem in found] == ["f:2", "f:5"]
    assert "did you mean 'sm'" in found[1]
    assert "did you mean 'torch.attention'" in found[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strict_mode: true\nstrict_mode: false\n", "f:2: key 'strict_mode' is given twice, first in line 1"),
        ("locks: &a {attention: torch.*}\nweights: *a\n", "f:1: anchors and aliases are not allowed"),
        ("strict_mode: !!python/object/apply:os.system [ls]\n", "f:1: a value of YAML's kind 'python/object/apply"),
        ("strict_mode: 2020-01-01\n", "f:1: a value of YAML's kind 'timestamp'"),
        ("? [a]\n: 1\n", "f:1: a key that is not a name"),
        ("- 1\n", "f:1: a policy is a map of keys, not a list"),
    ],
)
def test_yaml_that_a_policy_must_not_have(text: str, message: str) -> None:
    """Duplicates hide a value, aliases can grow without end, and tags make objects."""
    assert problems(text)[0].startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules:\n  - match: {sm: >=90}\n", "f:2: not YAML: "),
        ("avoid_kernels: *.attention\n", "f:1: not YAML: "),
        ("a: [1\n", "f:2: not YAML: "),
        ("a: 1\n---\nb: 2\n", "f:2: not YAML: "),
        ("a: \x01", "f: not YAML: "),
        ("[" * 5000, "f:1: not YAML: nested more than 32 deep"),
        ("- " * 5000, "f:1: not YAML: nested more than 32 deep"),
    ],
)
def test_what_is_not_yaml_names_the_line(text: str, message: str) -> None:
    """The usual mistake is a comparison without quotes, so the message says to quote it."""
    with pytest.raises(ConfigError) as caught:
        parse_layer(text, "f")
    assert caught.value.message.startswith(message)
    assert "not YAML" not in message or "\n" not in caught.value.message


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any file is a policy or a ConfigError."""
    with contextlib.suppress(ConfigError):
        compose((parse_layer(text, "f"),), KNOWN)


def test_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A policy that was asked for and is not there must not be dropped in silence."""
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        source(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_layer(tmp_path)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_layer(large)
    large.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_layer(large)


def test_default_file_need_not_exist_and_may_appear(tmp_path: Path) -> None:
    """Most users have none; one who writes it need not restart anything."""
    file = tmp_path / "policy.yaml"
    found = PolicySource(file, is_optional=True, variables=[], known=KNOWN)
    assert found.policy.locks == ()
    file.write_text(GOOD)
    assert found.refresh(10.0) is found.policy
    assert [lock.kernel for lock in found.policy.locks] == ["torch.attention"]
    file.unlink()
    emptied = found.refresh(20.0)
    assert emptied is not None
    assert emptied.locks == ()


def test_changed_file_is_noticed_once(tmp_path: Path) -> None:
    """By its time, size or inode, and not more often than CHECK_S."""
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: true\n")
    found = source(file)
    assert found.refresh(1.0) is None
    file.write_text("strict_mode: false\nplan_mode: true\n")
    assert found.refresh(1.0 + CHECK_S / 2) is None
    changed = found.refresh(1.0 + CHECK_S)
    assert changed is not None
    assert (changed.strict_mode, changed.plan_mode) == (False, True)
    assert found.refresh(9.0) is None


def test_broken_change_keeps_the_policy_and_says_so(tmp_path: Path) -> None:
    """A typo in a file must not take a running service down, nor pass unseen."""
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: true\n")
    found = source(file)
    before = found.policy
    file.write_text("strict_mode: true\nlocks: {attention: nobody}\n")
    assert found.refresh(5.0) is None
    assert found.policy is before
    assert f"{file}:2: no kernel is called 'nobody'" in found.problem
    assert found.describe({})["problem"] == found.problem
    replacement = tmp_path / "new"
    replacement.write_text("strict_mode: false\n")
    os.replace(replacement, file)
    assert found.refresh(10.0) is found.policy
    assert (found.policy.strict_mode, found.problem) == (False, "")
    file.unlink()
    assert found.refresh(15.0) is None
    assert "does not exist" in found.problem


NO_SIZE_IN_BYTES = {
    "text of 400 digits": "9" * 400,
    "text with a unit": "9" * 400 + "GiB",
    "hexadecimal of 4000 digits": "0x" + "f" * 4000,
    "decimal of 5000 digits": "9" * 5000,
    "sexagesimal": ":".join(["59"] * 4000),
    "sexagesimal, no integer": ":".join(["59"] * 4000) + ".5",
    "float": "1e400",
}


@pytest.mark.parametrize("key", ["memory_headroom_bytes", "shadow_rate", "strict_mode", "locks", "match"])
@pytest.mark.parametrize("number", NO_SIZE_IN_BYTES.values(), ids=NO_SIZE_IN_BYTES)
def test_no_number_in_a_file_ends_a_broker(
    key: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python refuses to show the longest integers, and floats end before them; the last policy stays."""
    monkeypatch.setattr(policy_source, "PATIENCE_S", 30.0)
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: true\n")
    found = source(file)
    for text in (number, f'"{number}"'):
        rule = f"rules: [{{match: {{seq_len: {text}}}, prefer: mlx}}]\n"
        written = (
            rule if key == "match" else f"locks: {{attention: {text}}}\n" if key == "locks" else f"{key}: {text}\n"
        )
        with pytest.raises(ConfigError, match="the policy is wrong"):
            source_of(tmp_path / "other.yaml", written)
        os.utime(file)
        file.write_text(written)
        assert found.refresh(100.0 + len(text)) is None
        assert found.problem
        assert found.policy.strict_mode


def source_of(file: Path, text: str) -> PolicySource:
    file.write_text(text)
    return source(file)


def test_no_fault_of_the_reader_ends_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: the file is another's, the fault may be ours."""
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: true\n")
    found = source(file)

    def fail(*_: object) -> None:
        raise OverflowError("cannot convert")

    monkeypatch.setattr(policy_source, "compose", fail)
    file.write_text("strict_mode: false\n")
    assert found.refresh(5.0) is None
    assert "OverflowError: cannot convert" in found.problem
    assert found.policy.strict_mode


def test_variables_go_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Precedence: environment > file; settings say which file and which variables."""
    file = tmp_path / "policy.yaml"
    file.write_text("locks: {attention: torch.attention}\nstrict_mode: true\n")
    monkeypatch.setenv("LAYERZERO_POLICY", str(file))
    monkeypatch.setenv("LAYERZERO_LOCKS", "attention=mlx.*")
    settings = load()
    assert settings.policy_file() == (file, False)
    found = source(file, settings.policy_variables()).policy
    assert [(lock.kernel, lock.origin) for lock in found.locks] == [("mlx.*", "LAYERZERO_LOCKS")]
    assert found.strict_mode
    monkeypatch.delenv("LAYERZERO_POLICY")
    assert load().policy_file() == (POLICY_FILE, True)


def test_description_has_what_a_client_needs(tmp_path: Path) -> None:
    """It is the answer to the request `policy`."""
    file = tmp_path / "policy.yaml"
    file.write_text(GOOD)
    answer = source(file).describe({"layers": [{"origin": "lz.configure", "values": {"shadow_rate": 0.5}}]})
    assert answer["values"]["shadow_rate"] == {"value": 0.5, "origin": "lz.configure"}
    assert answer["known"]["backends"] == ["mlx", "torch"]
    assert (answer["file"], answer["problem"]) == (str(file), "")
    with pytest.raises(InvalidArgument, match=r"lz\.configure: no backend is called 'trch'"):
        source(file).describe({"layers": [{"origin": "lz.configure", "values": {"avoid_sources": ["trch"]}}]})
