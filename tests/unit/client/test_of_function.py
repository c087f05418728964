"""client/capsules/of_function.py: what of a call's arguments is shown, and what is read of anybody's."""

from __future__ import annotations

import json

from layerzero.client.capsules import of_function
from layerzero.ipc.functions import values


def test_keys_of_dicts_are_texts_and_names_of_arguments_are_not() -> None:
    """At any depth, by place and by name; bytes by place, too."""
    secret = [values.DICT, "alice@example.com", [values.TUPLE, [values.DICT, "hush", b"hush"]], 3, "hush"]
    args, kwargs = of_function.given_of([values.LIST, secret, b"hush"], [values.DICT, "table", secret])
    said = json.dumps([args, kwargs])
    assert "alice" not in said
    assert "hush" not in said
    assert kwargs[1] == "table"
    assert args[1][1] == {of_function.TEXT: 17}
    assert args[1][3] == 3
    assert of_function.words_of(args, kwargs).endswith("table={text of 17: ({text of 4: bytes of 4}), 3: text of 4}")
    assert not of_function.Part("call", "", 0, (args, kwargs), (0, 1)).is_whole
