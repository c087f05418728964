"""Which tokens are kept, and for how long."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor

from layerzero.text.cache import Key, TokenCache, Tokens


def key(text: str) -> Key:
    return (text, True, None, False)


def tokens(*ids: int) -> Tokens:
    return Tokens(array("i", ids), array("i"))


def test_what_was_used_last_is_kept_within_the_bound() -> None:
    cache = TokenCache(3 * 450)
    for text in ("a", "b", "c"):
        cache.add(key(text), tokens(1))
    assert cache.find(key("a")) == tokens(1)
    cache.add(key("d"), tokens(2))
    assert cache.find(key("b")) is None
    assert [cache.find(key(text)) for text in "acd"] == [tokens(1), tokens(1), tokens(2)]
    info = cache.info()
    assert (info.hits, info.misses, info.entries) == (4, 1, 3)
    assert 0 < info.nbytes <= info.max_nbytes == 1350


def test_a_text_larger_than_the_cache_is_not_kept_and_nothing_goes_for_it() -> None:
    cache = TokenCache(1000)
    cache.add(key("a"), tokens(1))
    cache.add(key("a" * 1000), tokens(*range(1000)))
    assert cache.info().entries == 1


def test_the_same_text_otherwise_tokenized_is_another() -> None:
    cache = TokenCache(10_000)
    cache.add(("a", True, None, False), tokens(1))
    assert cache.find(("a", False, None, False)) is None
    assert cache.find(("a", True, 5, False)) is None
    cache.add(("a", True, None, False), tokens(1, 2))
    assert cache.info().entries == 1
    cache.clear()
    assert cache.info()[:4] == (0, 0, 0, 0)


def test_threads_share_a_cache() -> None:
    cache = TokenCache(50 * 450)

    def work(seed: int) -> bool:
        wrong = False
        for n in range(500):
            number = (seed * 31 + n * 7) % 100
            found = cache.find(key(str(number)))
            wrong |= found is not None and found != tokens(number)
            cache.add(key(str(number)), tokens(number))
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))
    info = cache.info()
    assert info.hits + info.misses == 2000
    assert info.nbytes <= info.max_nbytes
