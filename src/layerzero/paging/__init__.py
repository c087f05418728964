"""Block tables of a paged cache: which blocks each sequence has, as it grows, forks and ends.

    from layerzero.paging import BlockTables

    held = BlockTables(blocks=1024, block_size=16)
    new = held.grow({"a": 40, "b": 3})  # so many tokens more of each
    lz.copy_kv_blocks(k_cache, v_cache, new.sources, new.targets)  # of blocks that sequences share
    lz.append_kv(key, value, k_cache, v_cache, new.slots)
    tables, lengths = held.arrays(["a", "b"])

Needs NumPy: `pip install 'layerzero-broker[paging]'`.
"""

from __future__ import annotations

from layerzero.paging.block_tables import BlockTables, Growth

__all__ = ["BlockTables", "Growth"]
