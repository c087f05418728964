"""What calls of two ranks with a GPU each cost by lz.group, beside torch.distributed's NCCL in the same processes:
all_reduce, and there and back by send and recv; a layer of a Llama split over both, and two layers as a pipeline,
beside one GPU. Writes results/gpu_groups.md.

    python bench/gpu_groups.py [--quick] [--toys] [--out FILE]

Needs two NVIDIA GPUs, torch, and built environments of GPU backends; or, with --toys, the repository on PYTHONPATH and
nothing built: the tests' backend of torch serves then, whose kernels are torch's own. All ways run in turn in each
round; a figure is the median of the rounds, on rank 0. bfloat16.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, at_most, finish, parser
from gpu_common import F, connected, torch, versions

import layerzero as lz

SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 26, 1 << 28)
PASSED = (1 << 12, 1 << 26)
LIMIT, AIM = 1.05, 1.7
LAYERS = 32  # in a row, as a Llama of 8 billion parameters has
MICRO_BATCHES, ROWS = 4, 8192
HIDDEN, INNER, HEADS = 4096, 14336, 32
SETTLE_S = 30.0
Way = Callable[[], Any]


def layer(parts: int, rank: int, ops: Any, attention: Any) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """This rank's part of a Llama's layer, where `parts` have it together: `collect` adds up what the ranks have."""
    random = torch.Generator("cuda").manual_seed(0)

    def weight(rows: int, columns: int, dim: int) -> Any:
        whole = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=random) / rows**0.5
        return whole.chunk(parts, dim)[rank].contiguous()

    w_q, w_k, w_v = (weight(HIDDEN, HIDDEN, 1) for _ in range(3))
    w_o, w_gate, w_up = weight(HIDDEN, HIDDEN, 0), weight(HIDDEN, INNER, 1), weight(HIDDEN, INNER, 1)
    w_down, scale = weight(INNER, HIDDEN, 0), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run(x: Any, collect: Callable[[Any], Any]) -> Any:
        tokens = x.shape[0]
        n = F.layer_norm(x, (HIDDEN,), scale)
        q, k, v = (ops.matmul(n, w).reshape(1, tokens, HEADS // parts, HIDDEN // HEADS) for w in (w_q, w_k, w_v))
        h = x + collect(ops.matmul(attention(q, k, v).reshape(tokens, HIDDEN // parts), w_o))
        n = F.layer_norm(h, (HIDDEN,), scale)
        return h + collect(ops.matmul(ops.silu(ops.matmul(n, w_gate)) * ops.matmul(n, w_up), w_down))

    return run


class Torch:
    matmul, silu = staticmethod(torch.matmul), staticmethod(F.silu)


def torch_attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def lz_attention(q: Any, k: Any, v: Any) -> Any:
    return lz.attention(q, k, v, is_causal=True, layout="BSHD")


class Rank:
    """What each of the two processes does."""

    def __init__(self, rank: int, folder: Path, *, is_quick: bool) -> None:
        from torch import distributed

        self.rank, self.rounds = rank, 3 if is_quick else 15
        self.distributed = distributed
        torch.cuda.set_device(rank)
        store = distributed.FileStore(str(folder / "store"), 2)
        device = torch.device("cuda", rank)
        distributed.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
        lz.connect()
        self.group = lz.group("bench", rank, 2)

    def us(self, ways: dict[str, Way], count: int) -> dict[str, list[float]]:
        """Of a call, of each round."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for name, way in ways.items():
                self.distributed.barrier()
                torch.cuda.synchronize()
                start_ns = time.perf_counter_ns()
                for _ in range(count):
                    way()
                self.group.synchronize()
                torch.cuda.synchronize()
                if turn:
                    found[name].append((time.perf_counter_ns() - start_ns) / count / 1e3)
        return found

    def reduces(self, nbytes: int) -> dict[str, list[float]]:
        x = torch.ones(nbytes // 2, device="cuda", dtype=torch.bfloat16)

        def theirs_waited() -> None:
            self.distributed.all_reduce(x)
            torch.cuda.synchronize()

        ways: dict[str, Way] = {
            "waited": lambda: self.group.all_reduce(x, "max", out=x),
            "torch waited": theirs_waited,
            "stream": lambda: self.group.all_reduce(x, "max", out=x, wait=False),
            "torch stream": lambda: self.distributed.all_reduce(x),
        }
        return self.us(ways, 50 if nbytes <= 1 << 26 else 10)

    def layers(self, tokens: int) -> dict[str, list[float]]:
        x = torch.randn(
            tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1)
        )
        whole, mine = layer(1, 0, lz, lz_attention), layer(2, self.rank, Torch, torch_attention)
        floor = layer(1, 0, Torch, torch_attention)
        one = lz.plan(lambda x: whole(x, lambda y: y), fixed_weights=True)
        split = lz.split_plan(lambda x: whole(x, lambda y: y), self.group)

        def summed(y: Any) -> Any:
            self.distributed.all_reduce(y)
            return y

        ways: dict[str, Way] = {
            "one": lambda: one(x),
            "split": lambda: split(x),
            "torch one": lambda: floor(x, lambda y: y),
            "torch split": lambda: mine(x, summed),
        }
        with torch.no_grad():
            expected = ways["torch one"]().float()
            for way in ways.values():
                torch.testing.assert_close(way().float(), expected, rtol=5e-2, atol=0.1)
            self.settle(ways["one"], lambda: one.explain().counters["replays"])
            self.settle(ways["split"], lambda: split.explain().replays)
            found = self.us(ways, LAYERS)
        if self.rank == 0:
            print(split.explain(), one.explain(), sep="\n", file=sys.stderr, flush=True)
        return found

    def passes(self, nbytes: int) -> dict[str, list[float]]:
        """From rank 0 to the other, and back."""
        x = torch.ones(nbytes // 2, device="cuda", dtype=torch.bfloat16)
        other = 1 - self.rank

        def there_and_back(send: Callable[[], Any], receive: Callable[[], Any]) -> None:
            first, then = (send, receive) if self.rank == 0 else (receive, send)
            first()
            then()

        def ours(*, wait: bool) -> None:
            group = self.group
            there_and_back(lambda: group.send(x, other, wait=wait), lambda: group.recv(other, out=x, wait=wait))

        def theirs(*, wait: bool) -> None:
            def then(work: Any) -> None:
                if wait:
                    torch.cuda.synchronize()

            distributed = self.distributed
            there_and_back(lambda: then(distributed.send(x, other)), lambda: then(distributed.recv(x, other)))

        ways: dict[str, Way] = {
            "waited": lambda: ours(wait=True),
            "torch waited": lambda: theirs(wait=True),
            "stream": lambda: ours(wait=False),
            "torch stream": lambda: theirs(wait=False),
        }
        return self.us(ways, 50)

    def flows(self) -> dict[str, list[float]]:
        """Two layers, one for each rank; all ranks get the result."""
        x = torch.randn(
            ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1)
        )
        mine, floor = layer(1, 0, lz, lz_attention), layer(1, 0, Torch, torch_attention)
        stage = lz.plan(lambda x: mine(x, lambda y: y), fixed_weights=True)
        stages = [stage if rank == self.rank else None for rank in range(2)]
        pipeline = lz.pipeline(stages, self.group, micro_batches=MICRO_BATCHES)

        def at_once() -> Any:
            return torch.cat([floor(floor(part, lambda y: y), lambda y: y) for part in x.chunk(MICRO_BATCHES)])

        def by_hand() -> Any:
            whole = torch.empty_like(x)
            for part, out in zip(x.chunk(MICRO_BATCHES), whole.chunk(MICRO_BATCHES), strict=True):
                if self.rank == 0:
                    self.distributed.send(floor(part, lambda y: y), 1)
                    continue
                got = torch.empty_like(part)
                self.distributed.recv(got, 0)
                out.copy_(floor(got, lambda y: y))
            self.distributed.broadcast(whole, 1)
            return whole

        ways: dict[str, Way] = {"one": at_once, "flow": lambda: pipeline(x), "by hand": by_hand}
        with torch.no_grad():
            expected = at_once().float()
            for way in ways.values():
                torch.testing.assert_close(way().float(), expected, rtol=5e-2, atol=0.1)
            self.settle(ways["flow"], lambda: stage.explain().counters["replays"], MICRO_BATCHES)
            found = self.us(ways, 10)
        if self.rank == 0:
            print(pipeline.explain(), stage.explain(), sep="\n", file=sys.stderr, flush=True)
        return found

    def settle(self, way: Way, replays: Callable[[], int], runs: int = 1) -> None:
        """Until all of it is replayed, on both ranks, or time is up. `replays`: how many there were; `runs`: in one."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            before = replays()
            for _ in range(20):
                way()
            torch.cuda.synchronize()
            is_settled = replays() - before == 20 * runs
            # Both ranks go on, or none.
            word = torch.tensor([is_settled or time.monotonic() > end_s], device="cuda", dtype=torch.int32)
            self.distributed.all_reduce(word)
            if word.item() == 2:
                return


def work(rank: int, folder: Path, *, is_quick: bool) -> None:
    one = Rank(rank, folder, is_quick=is_quick)
    told = {
        "reduces": {n: one.reduces(n) for n in SIZES},
        "passes": {n: one.passes(n) for n in PASSED},
        "layers": {n: one.layers(n) for n in (512, 8192)},
        "flows": one.flows(),
    }
    if rank == 0:
        told["versions"] = versions()  # type: ignore[assignment]
        (folder / "told.json").write_text(json.dumps(told))
    one.group.close()
    one.distributed.destroy_process_group()


def rows_of(told: dict[str, Any]) -> Iterator[list[str]]:
    def cells(figure: str, ours: list[float], theirs: list[float], *, limit: float | None) -> list[str]:
        ratio = statistics.median(one / two for one, two in zip(ours, theirs, strict=True))
        verdict = f"{ratio:.2f}" if limit is None else at_most(ratio, limit)
        return [figure, f"{statistics.median(ours):,.1f}", f"{statistics.median(theirs):,.1f}", verdict]

    for nbytes, found in told["reduces"].items():
        size = f"{int(nbytes) >> 10:,} KiB"
        limit = LIMIT if int(nbytes) == 1 << 26 else None
        yield cells(f"all_reduce, {size}, each waited for", found["waited"], found["torch waited"], limit=None)
        yield cells(f"all_reduce, {size}, wait=False", found["stream"], found["torch stream"], limit=limit)
    for nbytes, found in told["passes"].items():
        size = f"{int(nbytes) >> 10:,} KiB"
        yield cells(f"send and back, {size}, each waited for", found["waited"], found["torch waited"], limit=None)
        yield cells(f"send and back, {size}, wait=False", found["stream"], found["torch stream"], limit=None)
    for tokens, found in told["layers"].items():
        name = f"a layer, {int(tokens):,} tokens"
        yield cells(f"{name}: lz.plan on one GPU / torch", found["one"], found["torch one"], limit=None)
        yield cells(f"{name}: lz.split_plan / torch split by hand", found["split"], found["torch split"], limit=None)
        gain = statistics.median(one / two for one, two in zip(found["one"], found["split"], strict=True))
        theirs = statistics.median(one / two for one, two in zip(found["torch one"], found["torch split"], strict=True))
        aim = f" (at least {AIM}: {'met' if gain >= AIM else 'MISSED'})" if int(tokens) == 8192 else ""
        yield [
            f"{name}: two GPUs' gain over one",
            f"{gain:.2f} times{aim}",
            f"{theirs:.2f} times",
            f"{gain / theirs:.2f}",
        ]
    found, name = told["flows"], f"two layers, {MICRO_BATCHES} micro-batches of {ROWS // MICRO_BATCHES:,} tokens"
    yield cells(f"{name}: lz.pipeline of two GPUs / by hand", found["flow"], found["by hand"], limit=None)
    gain, theirs = (
        statistics.median(one / two for one, two in zip(found["one"], found[way], strict=True))
        for way in ("flow", "by hand")
    )
    figures = f"{gain:.2f} times", f"{theirs:.2f} times", f"{gain / theirs:.2f}"
    yield [f"{name}: two GPUs' gain over one, by torch", *figures]


def main() -> None:
    arguments = parser(__doc__, "three rounds")
    arguments.add_argument(
        "--toys", action="store_true", help="with the tests' backend of torch; nothing need be built"
    )
    arguments.add_argument("--out", type=Path, help="write the table here, too")
    arguments.add_argument("--rank", nargs=2, help="a rank of this bench, and its folder")
    args = arguments.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit("needs two NVIDIA GPUs")
    if args.rank:
        work(int(args.rank[0]), Path(args.rank[1]), is_quick=args.quick)
        return
    with connected(with_toys=args.toys), tempfile.TemporaryDirectory() as folder:
        more = ["--quick"] if args.quick else []
        command = [sys.executable, __file__, *more, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank), folder]) for rank in range(2)]
        ends = [rank.wait() for rank in ranks]
        if any(ends):
            sys.exit(f"ranks ended with {ends}")
        told = json.loads((Path(folder) / "told.json").read_text())
    finish(
        "gpu_groups",
        "Calls and layers of two ranks with a GPU each",
        told["versions"],
        ("bfloat16", "LayerZero, us", "beside, us", "ratio"),
        list(rows_of(told)),
        (
            "Beside: torch.distributed's NCCL in the same two processes; all_reduce in place. Waited for: each call's "
            "end before the next begins, as a call of lz.group does it unless it is told not to.",
            f"A layer: {HIDDEN} wide, {INNER} inside, {HEADS} heads; two all_reduces where it is split. As a pipeline "
            "a layer is a rank's, and all ranks get the result; by hand: torch's layers, send, recv and broadcast.",
        ),
        is_quick=args.quick,
        command="python bench/gpu_groups.py" + (" --toys" if args.toys else ""),
    )
    if args.out and not args.quick:
        args.out.write_text((RESULTS / "gpu_groups.md").read_text())


if __name__ == "__main__":
    main()
