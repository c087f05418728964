"""Which library computes a vocabulary exactly (ipc/vocabulary/tokenizer_identity.py), kept for later processes.

One file for each vocabulary and its merges, in a folder beside the built environments. A file that does not hold, or
that another user may have written, is ignored; which library it is, is worked out again then.
"""

from __future__ import annotations

import os
from pathlib import Path

from layerzero.ipc import files, kept_files
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tokenizer_identity import LIBRARIES

FOLDER = "tokenizers"
MAX_ENTRIES = 256
MAX_BYTES = 256  # of one
LEAST_TOKENS = 4096  # smaller ones take less time than a file


class KeptLibraries:
    """Raises no error: where nothing can be written nothing is kept, and the log says why."""

    least_tokens = LEAST_TOKENS

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: by default in the store of this process's environment."""
        self.folder = folder or kept_files.store(os.environ) / FOLDER

    def find(self, key: str) -> str | None:
        """The library of this vocabulary, "" for none, None where that is not known."""
        path = self.folder / key
        try:
            found = unpack_body(kept_files.unseal(files.read(path, MAX_BYTES, is_own=True)))["library"]
            if found not in LIBRARIES and found != "":
                raise ValueError(f"no library is called {found!r:.80}")
        except FileNotFoundError:
            return None
        except NotADirectoryError:  # which `add` says
            return None
        except (OSError, kept_files.NotWhole, ProtocolError, KeyError, TypeError, ValueError) as exc:
            log("tokenizer.ignored", file=str(path), why=str(exc))
            return None
        kept_files.touch(path)
        return str(found)

    def add(self, key: str, library: str) -> None:
        """Keep it, and of all the ones that were used last."""
        try:
            kept_files.write(self.folder / key, kept_files.seal(pack_body({"library": library})))
        except OSError as exc:
            log("tokenizer.not_kept", folder=str(self.folder), why=str(exc))
            return
        kept_files.remove_drafts(self.folder)
        for path in kept_files.by_age(self.folder)[:-MAX_ENTRIES]:
            kept_files.remove(path)

    def __len__(self) -> int:
        return len(kept_files.by_age(self.folder))

    def clear(self) -> int:
        """Remove all. Returns how many there were."""
        return kept_files.remove_all(self.folder)
