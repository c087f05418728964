"""workers/functions/serving.py: what a worker keeps between calls, and for whom."""

from __future__ import annotations

import copy
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import pytest

from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code, Frame
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions import kept, serving
from layerzero.workers.functions.device import device
from layerzero.workers.functions.output import Output
from layerzero.workers.functions.placing import placing
from layerzero.workers.functions.serving import Functions
from layerzero.workers.provider import Block, Call

CODE = Code("shop", "total", "/srv/shop.py", "0" * 64, "/srv", is_main=False).to_tree()
LONG = "x" * 5000


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TextIO]:
    """That of a worker."""
    root, shown = logging.getLogger(), (sys.stdout, sys.stderr)
    level, handlers = root.level, list(root.handlers)
    with warnings.catch_warnings(), (tmp_path / "log").open("w") as log:
        sys.stdout = log
        output = Output()
        found, (sys.stdout, sys.stderr) = sys.stdout, shown
        monkeypatch.setattr(serving, "Output", lambda: output)
        yield found
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, stdout: TextIO) -> Functions:
    """Its function returns a text that the first answer has no room for."""
    monkeypatch.setattr(serving, "Modules", lambda: mock.Mock(function=lambda _: lambda: LONG))
    return Functions(mock.Mock(put=lambda *_: None), "plain")


def send(served: Functions, client: int, head: list[Any], room: int = 512) -> list[Any]:
    """The head of the answer."""
    made, answer = bytes(Frame(head)), memoryview(bytearray(room))
    call = Call("function", "plain.call", (), ())
    blocks = [Block(part, TensorSpec.contiguous("uint8", (len(part),))) for part in (memoryview(made), answer)]
    served.bind_of(client)(call, blocks[:1], blocks[1:])()
    return frames.read(answer)[0]


def call_of(served: Functions, client: int) -> int:
    """The token of an answer that is kept for the client."""
    told = send(served, client, [frames.CALL, CODE, [values.LIST], [values.DICT], 30])
    assert told[0] == frames.KEPT
    return int(told[1])


def test_an_answer_that_is_kept_is_for_its_client_alone(served: Functions) -> None:
    """Tokens are small numbers, which any other could guess."""
    token = call_of(served, 1)
    assert send(served, 2, [frames.FETCH, token])[0] == frames.REFUSED
    assert send(served, 1, [frames.FETCH, token], 8192)[:2] == [frames.RETURNED, LONG]
    assert send(served, 1, [frames.FETCH, token])[0] == frames.REFUSED


def test_answers_that_nobody_fetches_are_bounded(served: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, the oldest first; the newest is kept whatever its size."""
    monkeypatch.setattr(kept, "MAX_BYTES", 12_000)
    tokens = [call_of(served, 1) for _ in range(3)]
    told = send(served, 1, [frames.FETCH, tokens[0]])
    assert (told[0], "it was fetched, or more than" in told[2]) == (frames.REFUSED, True)
    assert [send(served, 1, [frames.FETCH, token], 8192)[0] for token in tokens[1:]] == [frames.RETURNED] * 2
    monkeypatch.setattr(kept, "MAX_BYTES", 10)
    assert send(served, 1, [frames.FETCH, call_of(served, 1)], 8192)[0] == frames.RETURNED


def test_what_is_kept_for_a_client_goes_with_it(served: Functions) -> None:
    """And nothing that is another one's."""
    gone, left = call_of(served, 1), call_of(served, 2)
    served.forget(1)
    assert send(served, 1, [frames.FETCH, gone])[0] == frames.REFUSED
    assert send(served, 2, [frames.FETCH, left], 8192)[0] == frames.RETURNED


def test_an_object_is_its_clients_alone_and_goes_with_it(served: Functions) -> None:
    """Here it is a text; a reference of another client, or of another start of the worker, finds nothing."""
    nothing = [[values.LIST], [values.DICT], 30]
    hold = [frames.HOLD, [frames.CALL, CODE, *nothing], frames.ALL]
    _, (tag, nonce, number, kind), _ = send(served, 1, hold)
    assert (tag, kind) == (values.HELD, "str")
    use = [frames.METHOD, "upper", *nothing]
    assert send(served, 1, [frames.USE, [nonce, number], *use], 8192)[:2] == [frames.RETURNED, LONG.upper()]
    for client, reference in ((2, [nonce, number]), (1, [nonce ^ 1, number]), (1, [nonce, number ^ 1])):
        assert send(served, client, [frames.RELEASE, [reference]])[0] == frames.RETURNED
        assert send(served, client, [frames.USE, reference, *use]) == [frames.GONE, reference, ""]
        call = [frames.CALL, CODE, [values.LIST, [values.HELD, *reference]], [values.DICT], 30]
        assert send(served, client, call) == [frames.GONE, reference, "args[0]: the object is lost"]
    assert send(served, 1, [frames.USE, [nonce, number], frames.METHOD, "__class__", *nothing])[0] == frames.REFUSED
    assert send(served, 1, [frames.USE, [nonce, number], 4, "upper", *nothing])[0] == frames.REFUSED
    served.forget(1)
    assert send(served, 1, [frames.USE, [nonce, number], *use])[0] == frames.GONE


def test_a_value_that_cannot_cross_has_not_run(served: Functions) -> None:
    served._modules.named_by.return_value = {1}  # type: ignore[attr-defined]
    told = send(served, 1, [frames.NAME, CODE, 30])
    assert told[0] == frames.REFUSED
    assert told[2].startswith("shop.total is a value, and result[1]: set cannot go to another environment")


def test_a_call_on_a_gpu_without_a_stream_is_refused(served: Functions) -> None:
    """Whoever sends it spoils no other client's calls."""
    call = [frames.CALL, CODE, [values.LIST], [values.DICT], 30]
    for head in ([frames.GPU, call, [], False], [frames.TAKE, 1, []]):
        assert send(served, 1, head)[0] == frames.REFUSED
        assert device.results is None
    assert send(served, 2, call, 8192)[:2] == [frames.RETURNED, LONG]


@pytest.mark.parametrize("name", ["_secret", "__reduce_ex__"])
def test_a_private_name_is_refused_each_time(served: Functions, name: str) -> None:
    """Calls that come again as the same bytes are not read again, and are held to the same."""
    hold = [frames.HOLD, [frames.CALL, CODE, [values.LIST], [values.DICT], 30], frames.ALL]
    _, (_, *reference, _), _ = send(served, 1, hold)
    head = [frames.USE, reference, frames.METHOD, name, [values.LIST, 2], [values.DICT], 30]
    made, answer = bytes(Frame(head)), memoryview(bytearray(512))
    blocks = [Block(part, TensorSpec.contiguous("uint8", (len(part),))) for part in (memoryview(made), answer)]
    bound = served.bind_of(1)(Call("function", "plain.call", (), ()), blocks[:1], blocks[1:])
    for _ in range(4):
        bound()
        told = frames.read(answer)[0]
        assert (told[0], "is private" in told[2]) == (frames.REFUSED, True)


def test_a_kept_answer_is_what_it_was_when_the_call_ended() -> None:
    """The next call may write to the array that it was made of."""
    payload, data = frames.Payload(), bytearray(b"one")

    def write(target: memoryview) -> None:
        target[:] = data

    payload.add(3, write)
    made = kept.Written(Frame([frames.RETURNED, "x", []], payload))
    data[:] = b"two"
    answer = bytearray(made.nbytes)
    made.write(memoryview(answer))
    assert b"one" in answer


def test_what_cannot_be_encoded_has_run(served: Functions) -> None:
    """A library that has no memory for a dense copy must not have the function run again."""

    def put(*_: Any) -> None:
        raise MemoryError("no memory for a dense copy")

    served._arrays.put = put  # type: ignore[method-assign]
    served._modules.function = lambda _: object  # type: ignore[method-assign, assignment]
    told = send(served, 1, [frames.CALL, CODE, [values.LIST], [values.DICT], 30])
    assert (told[0], "shop.total has run, and its result cannot cross: MemoryError" in told[2]) == (
        frames.REFUSED,
        True,
    )


def says_much(_: int = 0) -> str:
    print("before it cannot cross")
    return LONG


def says_much_beside_an_array() -> str:
    placing.take(64)
    return says_much()


def says_much_one_by_one() -> Iterator[str]:
    yield says_much()


@pytest.mark.parametrize(
    ("function", "head"),
    [
        (says_much, [frames.CALL, CODE, [values.LIST], [values.DICT], 30]),
        (says_much_beside_an_array, [frames.CALL, CODE, [values.LIST], [values.DICT], 30]),
        (says_much, [frames.MANY, CODE, [values.LIST, [values.TUPLE, 1]], [values.DICT], 30]),
        (says_much_one_by_one, [frames.NEXT, [], 30]),
    ],
)
def test_what_was_said_before_a_result_is_refused_is_shown(
    served: Functions, stdout: TextIO, monkeypatch: pytest.MonkeyPatch, function: Any, head: list[Any]
) -> None:
    """And once: the next answer has none of it."""
    monkeypatch.setattr(sys, "stdout", stdout)
    served._modules.function = lambda _: function  # type: ignore[method-assign, assignment]
    if head[0] == frames.NEXT:
        hold = [frames.HOLD, [frames.CALL, CODE, [values.LIST], [values.DICT], 30], frames.ALL]
        head[1] = send(served, 1, hold)[1][1:3]
    monkeypatch.setattr(frames, "MAX_HEAD_BYTES", 4000)
    kind, _, message, output = send(served, 1, head, 8192)
    assert (kind, "put bytes, texts and numbers into arrays" in message) == (frames.REFUSED, True)
    assert "".join(text for _, text in output) == "before it cannot cross\n"
    assert send(served, 1, [frames.RELEASE, []]) == [frames.RETURNED, None, []]


def test_what_is_made_of_the_output_closes_no_log(
    served: Functions, stdout: TextIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script wraps the buffer of its terminal; here that is every function's."""
    monkeypatch.setattr(sys, "stdout", stdout)
    wrapped = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    wrapped.write("wrapped")
    del wrapped
    copy.copy(sys.stdout).write("copied, ")
    print("after")
    said = send(served, 1, [frames.RELEASE, []])[2]
    assert "".join(text for _, text in said) == "copied, after\n"
    assert (tmp_path / "log").read_text().startswith("wrapped")
