"""A word-level tokenizer on one sentence."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "kernels": 1, "cannot": 2, "share": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return list(tokenizer.encode("kernels cannot share memory").ids), [1, 2, 3, 0]
