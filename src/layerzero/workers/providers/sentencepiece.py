"""SentencePiece: byte pairs of characters, with bytes for unknown ones, of tokenizer.json files of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.ipc.vocabulary.tokenizer_identity import SENTENCEPIECE, SPACE, BytePairs
from layerzero.workers.provider import Loaded
from layerzero.workers.providers._byte_pairs import ByteRowsKept, Offsets


def load() -> Loaded:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as model

    def make(pairs: BytePairs) -> _Encoder:
        return _Encoder(sentencepiece.SentencePieceProcessor, model, pairs)

    kept = ByteRowsKept(SENTENCEPIECE, make)
    return Loaded(
        versions={"sentencepiece": sentencepiece.__version__}, kernels={"sentencepiece.tokenize": kept.tokenize}
    )


class _Encoder:
    """A model of SentencePiece's with the order of tokens as scores, and no rules of its own about blanks."""

    def __init__(self, processor: Any, model: Any, pairs: BytePairs) -> None:
        symbols = [token for token in pairs.vocab if len(token) == 1]
        proto, kinds = model.ModelProto(), model.ModelProto.SentencePiece
        proto.trainer_spec.model_type = model.TrainerSpec.BPE
        proto.trainer_spec.byte_fallback = True
        for name in ("bos_id", "eos_id", "pad_id"):
            setattr(proto.trainer_spec, name, -1)
        rules = proto.normalizer_spec
        rules.name = "identity"
        rules.add_dummy_prefix = rules.remove_extra_whitespaces = rules.escape_whitespaces = False
        proto.pieces.add(piece="<unk>\n", type=kinds.UNKNOWN)  # a text that no token has
        proto.trainer_spec.unk_piece = "<unk>\n"
        for byte in range(256):
            proto.pieces.add(piece=f"<0x{byte:02X}>", type=kinds.BYTE)
        for rank, token in enumerate((*symbols, *pairs.order.made)):
            proto.pieces.add(piece=token, score=-rank, type=kinds.NORMAL)
        self._encode = processor(model_proto=proto.SerializeToString()).encode
        self._ids = [pairs.vocab.get(piece.piece, 0) for piece in proto.pieces]
        self._lengths = {pairs.vocab[token]: len(token) for token in (*symbols, *pairs.order.made)}

    def ids(self, text: str) -> list[int]:
        table = self._ids
        return [table[index] for index in self._encode(_normalized(text))]

    def offsets(self, text: str, ids: Sequence[int]) -> Offsets:
        """Of the text; the blank before it is its first character."""
        normalized = _normalized(text)
        found, at, left = [], 0, 0  # a position, and how many bytes of that character are still to come
        for index in ids:
            length = self._lengths.get(index)
            if length is None:  # a byte
                left = left or len(normalized[at].encode())
                left -= 1
                found.append((at, at + 1))
                at += not left
                continue
            found.append((at, at + length))
            at += length
        return [(max(start - 1, 0), max(end - 1, 1)) for start, end in found]


def _normalized(text: str) -> str:
    return SPACE + text.replace(" ", SPACE)
