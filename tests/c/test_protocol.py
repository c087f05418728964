"""The C library's encoder and decoder: docs/protocol.md by its vectors, and bytes that are no such thing."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.c.conftest import LIBRARY, Built, run
from tests.unit.ipc.test_protocol_vectors import plain

from layerzero.ipc.shm.counter_words import CODES

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "samples" / "protocol_vectors.json").read_text())
# Of what a client sends or gets, those of a GPU and of lifted calls are not this library's.
MESSAGES = {"hello", "challenge", "proof", "welcome", "redirect", "refused", "add_arena", "arena_added", "retire_arena"}
MESSAGES |= {"route", "request", "decision", "lease", "outcome"}
MESSAGES |= {"add_lane", "lane_added", "add_counters", "counters_added"}


def asked(built: Built, lines: list[str]) -> list[str]:
    """What the C program answers, line by line."""
    answers = run(built["vectors"], stdin="".join(f"{line}\n" for line in lines).encode()).stdout.decode().splitlines()
    assert len(answers) == len(lines)
    return answers


def test_messages_hold_both_ways(built: Built) -> None:
    """The same bytes from what was read of them, and from the fields."""
    vectors = [vector for vector in VECTORS["messages"] if vector["kind"] in MESSAGES]
    lines = [f"message {vector['kind']} {vector['hex']}" for vector in vectors]
    assert asked(built, lines) == [vector["hex"] for vector in vectors]
    whole = [plain(vector["fields"]) for vector in vectors]
    for vector, fields in zip(vectors, whole, strict=True):  # defaults are the decoder's: the encoder is given all
        fields |= {k: v for k, v in msgpack.unpackb(bytes.fromhex(vector["hex"])).items() if k != "kind"}
    lines = [f"encode {v['kind']} {msgpack.packb(f).hex()}" for v, f in zip(vectors, whole, strict=True)]
    assert asked(built, lines) == [vector["hex"] for vector in vectors]


def test_left_out_fields_have_their_defaults(built: Built) -> None:
    """As in the Python decoder: a shorter message is the longer one."""
    vectors = [vector for vector in VECTORS["messages"] if vector["kind"] in MESSAGES]
    lines = [f"message {v['kind']} {msgpack.packb({'kind': v['kind'], **plain(v['fields'])}).hex()}" for v in vectors]
    assert asked(built, lines) == [vector["hex"] for vector in vectors]


def test_frames_hold_both_ways(built: Built) -> None:
    """Header, references, and the bodies that are messages."""
    vectors = VECTORS["frames"]
    for vector, answer in zip(vectors, asked(built, [f"frame {v['hex']}" for v in vectors]), strict=True):
        header = vector["header"]
        names = ("kind", "flags", "route", "seq", "attempt", "aux", "time")
        assert answer == " ".join([*(str(header[name]) for name in names), vector["hex"]])
    with_refs = [vector for vector in vectors if "refs" in vector["body"]]
    for vector in with_refs:
        refs, body = vector["body"]["refs"], vector["hex"][64:]
        [answer] = asked(built, [f"refs {len(refs)} {body}"])
        *read, again = answer.split()
        assert [[int(part) for part in ref.split(",")] for ref in read] == refs
        assert body.startswith(again)
    ours = [v for v in vectors if v["body"].get("message") in MESSAGES]
    answers = asked(built, [f"message {v['body']['message']} {v['hex'][64:]}" for v in ours])
    assert answers == [vector["hex"][64:] for vector in ours]


def test_errors_hold_both_ways(built: Built) -> None:
    """Code, retry class and message; the first line says what to do."""
    for vector, answer in zip(
        VECTORS["errors"], asked(built, [f"error {v['hex']}" for v in VECTORS["errors"]]), strict=True
    ):
        said, _, packed = answer.rpartition(" ")
        code, retry, advice, message, needed = said.split("|")
        assert (code, ("never", "same", "other_backend")[int(retry)]) == (vector["code"], vector["retry"])
        assert (message, packed) == (vector["message"], vector["hex"])
        assert advice.endswith(".")
        assert int(needed) == len(vector["facts"].get("needed", ()))


def test_what_must_be_refused_is(built: Built) -> None:
    """The same bytes as every other implementation."""
    vectors = [v for v in VECTORS["refused"] if v["as"] == "frame" or v["as"] in MESSAGES]
    assert len(vectors) == len(VECTORS["refused"])
    lines = [f"{'frame' if v['as'] == 'frame' else 'message ' + v['as']} {v['hex']}" for v in vectors]
    answers = asked(built, lines)
    assert [a for a in answers if not a.startswith("refused ")] == []


def poked(page: list[list[Any]]) -> list[str]:
    """Lines that make a page, which is zeros, this one. What is long is written in parts."""
    return [
        f"poke {at + part // 2} {text[part : part + 2048]}" for at, text in page for part in range(0, len(text), 2048)
    ]


def shown(page: list[list[Any]]) -> str:
    return " ".join(f"{at}:{text}" for at, text in page)


def test_pages_of_lanes_hold_both_ways(built: Built) -> None:
    """What a client writes to a lane's page, and what it reads of what a worker wrote there."""
    for vector in VECTORS["lanes"]:
        call, plan = vector["call"], vector["plan"]
        if vector["what"] == "call":
            answers = asked(built, [f"put {call} {plan} {vector['refs']}", "page 217088"])
            assert answers[-1] == shown(vector["page"])
            continue
        answers = asked(built, [*poked(vector["page"]), f"end {call}", f"end {call + 1}", "page 217088"])
        assert answers[-3] == f"{vector['status']} {vector['kernel_ns']} {vector['said']}"
        assert answers[-2] == "none"
        if not vector["said"]:
            answers = asked(built, [f"ended {call} {vector['status']} {vector['kernel_ns']} {plan}", "page 217088"])
            assert answers[-1] == shown(vector["page"])
    for vector in VECTORS["lanes_refused"]:
        answers = asked(built, [*poked(vector["page"]), f"end {vector['call']}", "page 217088"])
        assert answers[-2].startswith("refused ")


def test_pages_of_counters_hold(built: Built) -> None:
    """Calls that ended well, in the words of a row. The rest of a page is that of real brokers: test_lanes.py."""
    vector = VECTORS["counters"][0]
    counted = [(ns, copied) for what, _, ns, *rest in vector["notes"] if what == "count" for copied in rest]
    [answer] = asked(built, [*(f"counter {ns} {copied}" for ns, copied in counted), "page 131072"])[-1:]
    words = {at for at, _ in vector["page"] if 1024 + 256 <= at < 1024 + 480}
    assert {int(run.partition(":")[0]) for run in answer.split()} == words


def test_codes_of_counters_are_the_protocols(built: Built) -> None:
    """A word of a row is named by its place."""
    source = (LIBRARY / "src" / "counters.c").read_text(encoding="utf-8")
    table = re.findall(r'"(\w+)"', source[source.index("CODES[] =") :].split(";")[0])
    assert tuple(table) == CODES


VALUES = [None, True, False, 0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
VALUES += [-1, -32, -33, -128, -129, -(2**15), -(2**15) - 1, -(2**31), -(2**31) - 1, -(2**63), 0.0, -1.5, float("inf")]
VALUES += ["", "é漢😀", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "x" * 65536, b"", b"\0" * 255, b"\1" * 256]
VALUES += [[], [1] * 15, [1] * 16, [[[]]], {}, {"a": {"b": [1, "c", None]}}, {str(i): i for i in range(16)}]


def nested(depth: int) -> list[Any]:
    """So many lists in each other, the innermost empty."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_values_are_those_of_msgpack(built: Built) -> None:
    """Every size class of every type has the shortest form, as Python's encoder writes it."""
    packed = [msgpack.packb(value).hex() for value in [*VALUES, nested(32)]]
    assert asked(built, [f"value {text}" for text in packed]) == packed


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (msgpack.packb(nested(34)), "deep"),
        (b"\x81\x01\x01", "key"),
        (b"\xdd\xff\xff\xff\xff", "within"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "within"),
        (b"\xc6\xff\xff\xff\xff", "within"),
        (b"\xa2\xc0\x80", "UTF-8"),
        (b"\xa3\xed\xa0\x80", "UTF-8"),
        (b"\xa4\xf4\x90\x80\x80", "UTF-8"),
        (b"\xa2\xc3", "within"),
        (b"\xd4\x01\x01", "extended"),
        (b"\xc1", "extended"),
        (b"\x01\x01", "behind"),
    ],
)
def test_values_that_are_none_are_refused(built: Built, packed: bytes, why: str) -> None:
    """With the reason, and without memory for what is only claimed."""
    [answer] = asked(built, [f"value {packed.hex()}"])
    assert answer.startswith("refused ")
    assert why in answer


def test_proofs_are_hmac_sha256(built: Built) -> None:
    """Keys and texts around the block's size; the padding's every case."""
    cases = [(bytes([7]) * key, bytes(range(256))[:text]) for key in (1, 16, 64, 65, 200) for text in range(0, 140, 7)]
    cases += [(b"k" * 32, bytes(range(256))[:text]) for text in (54, 55, 56, 63, 64, 118, 119, 120)]
    answers = asked(built, [f"hmac {key.hex()} {text.hex()}" for key, text in cases])
    assert answers == [hmac.digest(key, text, hashlib.sha256).hex() for key, text in cases]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_bytes_hurt_the_decoders(built: Built, seed: int) -> None:
    """Random bytes and changed vectors, under ASan and UBSan: whatever is taken encodes to what is taken again."""
    samples = [vector["hex"] for kind in ("messages", "errors", "refused") for vector in VECTORS[kind]]
    samples += [vector["hex"][64:] for vector in VECTORS["frames"]]
    run(built["fuzz"], seed, 15_000, stdin="\n".join(samples).encode())
