"""Who may connect: users by number, as the kernel knows them, and where there is a secret, those who can prove that
they know it."""

from __future__ import annotations

import os
from collections.abc import Collection

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.io.peers import Peer, check_version
from layerzero.ipc.errors import ConfigError, NotAllowed
from layerzero.ipc.transport import control, messages, secret
from layerzero.ipc.version import __version__


class Authentication:
    def __init__(self, key: bytes | None, uids: Collection[int]) -> None:
        self._key = key
        self.uids = frozenset({os.getuid(), *uids})

    @classmethod
    def of(cls, settings: Settings) -> Authentication:
        """Raises ConfigError."""
        texts = [text.strip() for text in settings.allow_uids.split(",") if text.strip()]
        wrong = [text for text in texts if not (text.isascii() and text.isdigit() and int(text) < 2**32 - 1)]
        if wrong:
            raise ConfigError(f"setting allow_uids (LAYERZERO_ALLOW_UIDS): {wrong[0]!r:.40}; allowed: numbers of users")
        if texts and settings.secret_file is None:
            raise ConfigError(
                "setting allow_uids (LAYERZERO_ALLOW_UIDS) lets other users connect; that needs a secret, too: lz keys "
                "secret FILE, then secret_file (LAYERZERO_SECRET_FILE)"
            )
        key = None if settings.secret_file is None else secret.read(settings.secret_file)
        return cls(key, [int(text) for text in texts])

    @property
    def is_shared(self) -> bool:
        """Whether other users may connect."""
        return len(self.uids) > 1

    def knows(self, peer: Peer) -> bool:
        """Whether this user may connect."""
        return control.peer_credentials(peer.sock)[1] in self.uids

    def examine(self, peer: Peer, hello: messages.Hello) -> messages.Challenge | None:
        """What the peer has to answer before it is welcome, if anything. A worker's ticket is proof enough.

        Raises NotAllowed, ProtocolError or VersionMismatch.
        """
        pid, uid, _ = control.peer_credentials(peer.sock)
        peer.uid = uid
        if uid not in self.uids:
            raise NotAllowed(
                f"user {uid} may not use the broker of user {os.getuid()}; its setting allow_uids lets others connect"
            )
        check_version(hello, __version__)
        peer.pid = pid or hello.pid
        if self._key is None or hello.role == "worker":
            return None
        if len(hello.nonce) != secret.NONCE_BYTES:
            raise NotAllowed(
                "this broker asks for the stack's secret; name its file: --secret-file FILE, LAYERZERO_SECRET_FILE, or "
                "lz.connect(secret_file=...)"
            )
        peer.hello = hello
        peer.proofs = secret.Handshake(self._key, hello.role, hello.nonce, secret.new_nonce())
        return messages.Challenge(nonce=peer.proofs.broker_nonce)

    @staticmethod
    def verify(peer: Peer, proof: messages.Proof) -> None:
        """Raises NotAllowed."""
        if peer.proofs is None or not secret.is_equal(proof.mac, peer.proofs.peer_mac):
            raise NotAllowed("the secret is not the broker's; both sides need the same secret file")
