"""How many examples a test of properties tries: all of them, or the share in percent that LZ_EXAMPLES names."""

import os

SHARE = int(os.environ.get("LZ_EXAMPLES", "100"))


def examples(count: int) -> int:
    return max(1, count * SHARE // 100)
