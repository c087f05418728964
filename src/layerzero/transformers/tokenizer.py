"""Tokenizers of Transformers whose texts go to LayerZero's kernels."""

from __future__ import annotations

import copy
import os
from typing import Any

from transformers import AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from layerzero.ipc.errors import InvalidArgument
from layerzero.transformers.tokenizing import Rust, State, plain

_RUST, _STATE = "_tokenizer", "_layerzero"
_types: dict[type, type[Tokenizer]] = {}


class Tokenizer(TokenizersBackend):
    """A fast tokenizer of Transformers with selection behind it. Kernels of `lz.tokenize` and `lz.detokenize` do what
    its rust tokenizer did. Special tokens, truncation, padding, tensors, chat templates and files are Transformers'.

    Make it by `Tokenizer.of(fast_tokenizer)` or `Tokenizer.from_pretrained(folder_or_name)`, or by the arguments of
    Transformers' TokenizersBackend: `Tokenizer(tokenizer_file=..., pad_token=...)`. Its type is a subclass of the fast
    tokenizer's own type too, and has its name.

    Each call counts in `layerzero.transformers.report()`; what cannot be served is handed to the library."""

    _plain: type[TokenizersBackend] = TokenizersBackend

    def __new__(cls, *args: Any, **kwargs: Any) -> Tokenizer:
        return object.__new__(_served(TokenizersBackend) if cls is Tokenizer else cls)

    @classmethod
    def of(cls, tokenizer: TokenizersBackend) -> Tokenizer:
        """A copy of a fast tokenizer that is served. The original stays as it is.

        tokenizer: what Transformers' AutoTokenizer gives, if it is a fast one; one of ours is returned itself. Raises
        InvalidArgument (a ValueError) for any other."""
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if not isinstance(tokenizer, TokenizersBackend):
            raise InvalidArgument(
                f"tokenizer is {type(tokenizer).__name__}; allowed: a fast tokenizer of Transformers, with is_fast True"
            )
        ours = copy.deepcopy(tokenizer)
        ours.__class__ = _served(type(tokenizer))
        if hasattr(ours, "_wrap_decode_method_backend_tokenizer"):  # CLIP's, which copies lose
            ours._wrap_decode_method_backend_tokenizer()
        return ours

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Tokenizer:
        """The tokenizer of a folder, of a name that Transformers knows, or of a tokenizer.json.

        name: a folder, a name, or the path of a file. The other arguments are AutoTokenizer.from_pretrained's; for a
        file, those of TokenizersBackend. Raises what Transformers raises, and InvalidArgument (a ValueError) where
        there is no fast tokenizer."""
        if os.path.isfile(name):
            return cls.of(TokenizersBackend(*args, tokenizer_file=os.fspath(name), **kwargs))
        return cls.of(AutoTokenizer.from_pretrained(name, *args, **kwargs))

    @property
    def _tokenizer(self) -> Rust | None:
        """What Transformers' own code asks to encode and decode."""
        rust = self.__dict__.get(_RUST)
        return None if rust is None else Rust(rust, self.__dict__.setdefault(_STATE, State()), self)

    @_tokenizer.setter
    def _tokenizer(self, rust: Any) -> None:
        self.__dict__[_RUST] = plain(rust)
        self.__dict__[_STATE] = State()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The type is made when it is needed: a file names the fast tokenizer's own."""
        _, _, *state = super().__reduce_ex__(max(2, protocol))
        return (_new, (self._plain,), *state)


def _served(cls: type[TokenizersBackend]) -> type[Tokenizer]:
    """A subclass of both, with the name under which Transformers' files know it."""
    if issubclass(cls, Tokenizer):
        return cls
    found = _types.get(cls)
    if found is not None:
        return found
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_plain": cls}
    bases = (Tokenizer,) if cls is TokenizersBackend else (Tokenizer, cls)
    return _types.setdefault(cls, type(cls.__name__, bases, names))


def _new(cls: type[TokenizersBackend]) -> Tokenizer:
    served = _served(cls)
    return served.__new__(served)
