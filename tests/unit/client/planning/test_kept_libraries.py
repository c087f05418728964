"""client/planning/kept_libraries.py: which library computes a vocabulary is worked out by one process for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.client.planning import kept_libraries
from layerzero.client.planning.kept_libraries import KeptLibraries
from layerzero.ipc.vocabulary.tokenizer_identity import byte_symbols

# Opens a tokenizer.json, and says its identity and whether the order of its tokens has been worked out for that.
PROCESS = """
import sys
from layerzero.ipc.vocabulary import tokenizer_identity
worked_out, order = [], tokenizer_identity.merge_order
def counted(*args):
    worked_out.append(1)
    return order(*args)
tokenizer_identity.merge_order = counted
import layerzero as lz
print(lz.TokenizerFile.from_file(sys.argv[1]).attrs["tokenizer_id"], len(worked_out))
"""


def byte_level(count: int) -> dict[str, object]:
    """A tokenizer.json of GPT-2's form, of all bytes and `count` pairs of them."""
    symbols = byte_symbols()
    pairs = [(a, b) for a in symbols for b in symbols][:count]
    vocab = {token: index for index, token in enumerate([*symbols, *("".join(pair) for pair in pairs)])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in pairs]}
    return {"model": model, "pre_tokenizer": level, "decoder": level, "normalizer": None, "post_processor": None}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(byte_level(kept_libraries.LEAST_TOKENS)))
    return path


def opened(file: Path, store: Path) -> tuple[str, int, str]:
    """By a process of its own: the identity, how often the order was worked out, and what it wrote to stderr."""
    env = {**os.environ, "LAYERZERO_STORE": str(store)}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(file)], env=env, capture_output=True, text=True, check=True
    )
    name, count = done.stdout.split()
    return name, int(count), done.stderr


def kept(store: Path) -> list[Path]:
    return sorted((store / "tokenizers").iterdir())


def test_a_second_process_does_not_work_it_out_again(file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert [opened(file, store) for _ in range(2)] == [("tiktoken", 1, ""), ("tiktoken", 0, "")]
    (only,) = kept(store)
    assert only.stat().st_mode & 0o777 == 0o600

    document = byte_level(kept_libraries.LEAST_TOKENS)
    document["model"]["merges"].reverse()  # type: ignore[index]
    file.write_text(json.dumps(document))
    assert opened(file, store)[1] == 1  # other merges
    assert len(kept(store)) == 2


def test_a_file_that_does_not_hold_is_ignored_and_written_anew(file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    opened(file, store)
    (only,) = kept(store)
    good = only.read_bytes()
    for wrong in (good[:-1], b"", bytes([good[0] ^ 1]) + good[1:], good + bytes(1 << 16)):
        only.write_bytes(wrong)
        name, count, said = opened(file, store)
        record = json.loads(said)
        assert (name, count, record["event"], record["file"]) == ("tiktoken", 1, "tokenizer.ignored", str(only))
        assert only.read_bytes() == good
    only.chmod(0o666)
    assert opened(file, store)[1] == 1  # anybody may have written it
    assert (only.stat().st_mode & 0o777, opened(file, store)[1]) == (0o600, 0)


def test_where_nothing_can_be_written_nothing_is_kept_and_that_is_said(file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_bytes(b"no folder")
    for _ in range(2):
        name, count, said = opened(file, store)
        assert (name, count, json.loads(said)["event"]) == ("tiktoken", 1, "tokenizer.not_kept")


def test_the_ones_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_libraries, "MAX_ENTRIES", 2)
    libraries = KeptLibraries(tmp_path / "tokenizers")
    for index, key in enumerate(("first", "second")):
        libraries.add(key, "tiktoken")
        os.utime(libraries.folder / key, (index, index))
    assert libraries.find("first") == "tiktoken"  # used now
    libraries.add("third", "")
    assert [libraries.find(key) for key in ("first", "second", "third")] == ["tiktoken", None, ""]
    assert (len(libraries), libraries.clear(), len(libraries)) == (2, 2, 0)


def test_small_vocabularies_leave_no_file(tmp_path: Path) -> None:
    """They are worked out in less time than a file takes to write."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(byte_level(100)))
    assert opened(file, tmp_path / "store") == ("tiktoken", 1, "")
    assert not (tmp_path / "store").exists()
