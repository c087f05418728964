"""Texts as models take them: padded batches, answers as they come token by token, chats. Behind it lz.tokenize and
lz.detokenize, of whichever library serves them.

    from layerzero import text

    tokenizer = text.Tokenizer("a-model's-folder")
    batch = tokenizer(["Kernels run", "in environments"])  # batch.ids, batch.attention_mask: arrays that workers reach
    stream = tokenizer.stream()
    print(stream.add(token), end="")  # each token of an answer
    tokenizer.chat([{"role": "user", "content": "Hello"}], add_generation_prompt=True)

Needs NumPy; chats need Jinja: `pip install 'layerzero-broker[text]'`.
"""

from __future__ import annotations

from layerzero.text.cache import CacheInfo
from layerzero.text.chat import ChatTemplate
from layerzero.text.padding import TokenBatch
from layerzero.text.streams import DetokenizeStream, DetokenizeStreams
from layerzero.text.tokenizer import Tokenizer

__all__ = ["CacheInfo", "ChatTemplate", "DetokenizeStream", "DetokenizeStreams", "TokenBatch", "Tokenizer"]
