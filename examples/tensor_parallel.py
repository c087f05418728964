"""A transformer's MLP over two processes: its first layer split by columns, its second one by rows, one all_reduce.

python examples/tensor_parallel.py     # starts two ranks of itself; torchrun --nproc-per-node 2 does as well
"""

import os
import subprocess
import sys

import numpy as np

import layerzero as lz
from layerzero.groups.tensor_parallel import ColumnParallelLinear, RowParallelLinear

TOKENS, HIDDEN, INNER, RANKS = 64, 256, 1024, 2


def weights(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """The same on all ranks."""
    random = np.random.default_rng(0)
    return [(random.standard_normal(shape) / HIDDEN**0.5).astype(np.float32) for shape in shapes]


def main() -> None:
    lz.connect()
    x, w_up, b_up, w_down, b_down = weights((TOKENS, HIDDEN), (INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,))
    with lz.group("mlp") as group:  # rank and size are RANK and WORLD_SIZE
        up = ColumnParallelLinear(group, w_up, b_up)
        down = RowParallelLinear(group, w_down, b_down)
        y = down(lz.gelu(up(lz.share(x))))
        report = group.last_report()
        whole = lz.linear(lz.gelu(lz.linear(x, w_up, b_up)), w_down, b_down)
        difference = float(abs(y - whole).max())
        print(f"rank {group.rank} has {up.weight.shape} and {down.weight.shape}: largest difference {difference:.1e}")
        assert difference < 1e-5
        if group.rank == 0:
            print(report)
        group.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        lz.connect()  # one broker for all ranks, which ends with the last of them
        environs = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)} for rank in range(RANKS)]
        ranks = [subprocess.Popen([sys.executable, __file__], env=environ) for environ in environs]
        sys.exit(max(abs(rank.wait()) for rank in ranks))
