"""Which releases can read a tokenizer.json: a name for the features it uses, matched against descriptors.

tokenizers 0.13 refuses merges written as pairs and component types that came later. Worse, it ignores settings it
does not know (`ignore_merges`, Unigram's `byte_fallback`, Metaspace's `prepend_scheme` and `split`) and then gives
other ids than the file means. Anything not listed below therefore counts as newer. Found by loading one file per
component and setting in 0.13.3 and 0.23.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = "plain"  # no merges (WordPiece, WordLevel, Unigram); components that 0.13 knows
MERGES_STRINGS = "merges-strings"  # BPE merges as "a b"; components that 0.13 knows
MERGES_PAIRS = "merges-pairs"  # BPE merges as ["a", "b"], written since 0.20
EXTENDED = "extended"  # components or settings that came after 0.13
FORMATS = (PLAIN, MERGES_STRINGS, MERGES_PAIRS, EXTENDED)

# Component types of 0.13.3, by section of the file.
# fmt: off
_KNOWN: dict[str, frozenset[str]] = {
    "normalizer": frozenset(
        {
            "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace",
            "Sequence", "Strip", "StripAccents",
        }
    ),
    "pre_tokenizer": frozenset(
        {
            "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence",
            "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
        }
    ),
    "post_processor": frozenset(
        {
            "BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing",
        }
    ),
    "decoder": frozenset(
        {
            "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip",
            "WordPiece",
        }
    ),
}
# fmt: on
_CHILDREN = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def tokenizer_format(document: Mapping[str, Any]) -> str:
    """The format name of a parsed tokenizer.json: one of FORMATS. A file that makes no sense is "extended"."""
    model = document.get("model")
    if not isinstance(model, Mapping) or _is_extended_model(model):
        return EXTENDED
    for section in _KNOWN:
        for component in _components(document.get(section), _CHILDREN[section]):
            if component.get("type") not in _KNOWN[section]:
                return EXTENDED
            if component["type"] == "Metaspace" and _is_extended_metaspace(component):
                return EXTENDED
    merges = model.get("merges")
    if not merges:
        return PLAIN
    return MERGES_STRINGS if all(isinstance(merge, str) for merge in merges) else MERGES_PAIRS


def _is_extended_model(model: Mapping[str, Any]) -> bool:
    is_unigram = model.get("type") == "Unigram"
    return bool(model.get("ignore_merges") or (is_unigram and model.get("byte_fallback")))


def _is_extended_metaspace(component: Mapping[str, Any]) -> bool:
    """0.13 needs `add_prefix_space` and knows two of today's three schemes, under that name."""
    prefix = component.get("add_prefix_space")
    scheme = component.get("prepend_scheme", "always" if prefix else "never")
    return prefix is None or scheme != ("always" if prefix else "never") or component.get("split") is False


def _components(value: object, children: str) -> Iterator[Mapping[str, Any]]:
    """A section's component, and those inside it when it is a sequence."""
    if isinstance(value, Mapping):
        yield value
        for child in value.get(children) or ():
            yield from _components(child, children)
