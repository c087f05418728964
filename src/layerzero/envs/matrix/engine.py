"""The matrix: every subject alone, every pair, sets on request, and the fewest environments that serve them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from layerzero.envs.matrix.cover import Cover, fewest
from layerzero.envs.matrix.subjects import Subject
from layerzero.envs.matrix.trial import Lab, Stopped, attempt
from layerzero.envs.matrix.verdict import Kind, Verdict


@dataclass(frozen=True)
class Cell:
    """Subjects in one environment. `plain`: as their metadata has it, which is what installing them together gives.
    `careful`: with `care`, what they need beyond that; None when plain works, or when that cannot help."""

    subjects: tuple[str, ...]
    plain: Verdict
    careful: Verdict | None = None
    care: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.plain.ok or (self.careful is not None and self.careful.ok)

    @property
    def state(self) -> str:
        """ok; care: works with what metadata does not say; conflict."""
        return "ok" if self.plain.ok else "care" if self.ok else "conflict"

    @property
    def kind(self) -> Kind:
        """Of what installing them together gives."""
        return self.plain.kind

    def to_json(self) -> dict[str, Any]:
        return {
            "subjects": list(self.subjects),
            "state": self.state,
            "kind": self.kind.value,
            "plain": self.plain.to_json(),
            "care": list(self.care),
            "careful": self.careful and self.careful.to_json(),
        }


@dataclass(frozen=True)
class Isolated:
    """A subject in an environment and a process of its own. `through`: a LayerZero worker, or a process."""

    ok: bool
    through: str
    summary: str


@dataclass(frozen=True)
class Matrix:
    """`cells`: of one subject and of two, in the order of `subjects`; `sets`: larger ones."""

    subjects: tuple[Subject, ...]
    cells: Mapping[tuple[str, ...], Cell]
    sets: tuple[Cell, ...]
    isolated: Mapping[str, Isolated]
    cover: Cover
    unserved: tuple[str, ...]  # subjects that work in no environment

    def alone(self, name: str) -> Cell:
        return self.cells[(name,)]

    @property
    def conflicts(self) -> list[Cell]:
        return [cell for cell in self.cells.values() if len(cell.subjects) == 2 and not cell.plain.ok]


# More requirements do not help against these.
_HOPELESS = (Kind.PYTHON, Kind.RESOLVER)
OLD_NUMPY = "numpy<2"
OnCell = Callable[[int, int, Cell], None]
Isolate = Callable[[Sequence[Subject]], Mapping[str, Isolated]]


def make(
    subjects: Sequence[Subject],
    lab: Lab,
    *,
    sets: Sequence[Sequence[str]] = (),
    isolate: Isolate | None = None,
    jobs: int = 2,
    on_cell: OnCell = lambda done, total, cell: None,
) -> Matrix:
    """Try everything, `jobs` cells at a time. `isolate` serves those subjects that are backends of ours through their
    workers; it gets them all at once. Raises EnvError when the resolver cannot work; Stopped after `lab.stop()`."""
    by_name = {one.name: one for one in subjects}
    names = tuple(by_name)
    wanted = [*((name,) for name in names), *combinations(names, 2), *map(tuple, sets)]
    cells = _examine_all([[by_name[name] for name in group] for group in wanted], lab, jobs, on_cell)
    pairs = {frozenset(cell.subjects) for cell in cells.values() if len(cell.subjects) == 2 and cell.ok}
    # One that fails alone may work beside another, whose requirements keep a dependency back.
    served = [name for name in names if cells[(name,)].ok or any(name in pair for pair in pairs)]
    tried = {group: cells[group] for group in map(tuple, sets)}

    def works(group: tuple[str, ...]) -> bool:
        if group not in tried:
            tried[group] = examine([by_name[name] for name in group], lab)
            count = len(cells) + len(tried)
            on_cell(count, count, tried[group])
        return tried[group].ok

    cover = fewest(served, pairs, works)
    backends = [one for one in subjects if one.backend]
    isolated = dict(isolate(backends)) if isolate is not None and backends else {}
    for name in names:
        isolated.setdefault(name, _in_process(cells[(name,)]))
    return Matrix(
        subjects=tuple(subjects),
        cells={key: cell for key, cell in cells.items() if len(key) < 3},
        sets=tuple(tried.values()),
        isolated=isolated,
        cover=cover,
        unserved=tuple(name for name in names if name not in served),
    )


def examine(subjects: Sequence[Subject], lab: Lab) -> Cell:
    """Let the subjects share an environment as they are and, if that fails, with what they need. That a library is of
    before NumPy 2 is seen, too, where subjects.toml does not know it."""
    plain = attempt(lab, subjects, with_care=False)
    if plain.is_of_numpy_2:
        subjects = [one.with_need(OLD_NUMPY) if one.name == plain.subject else one for one in subjects]
    care = tuple(dict.fromkeys(text for one in subjects for text in one.care))
    careful = None
    if care and not plain.ok and plain.kind not in _HOPELESS:
        careful = attempt(lab, subjects, with_care=True)
    return Cell(tuple(one.name for one in subjects), plain, careful, care if careful is not None else ())


def _examine_all(
    groups: Iterable[Sequence[Subject]], lab: Lab, jobs: int, on_cell: OnCell
) -> dict[tuple[str, ...], Cell]:
    cells: dict[tuple[str, ...], Cell] = {}
    with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="lz-matrix") as pool:
        keys = {pool.submit(examine, group, lab): tuple(one.name for one in group) for group in groups}
        pending: set[Future[Cell]] = set(keys)
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    cells[keys[future]] = future.result()
                    on_cell(len(cells), len(keys), cells[keys[future]])
        except BaseException:  # a failure or Ctrl-C ends the others, too, before the pool is waited for
            lab.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {key: cells[key] for key in keys.values()}


def _in_process(alone: Cell) -> Isolated:
    """A cell of one subject is that subject in a process and an environment of its own."""
    verdict = alone.careful if alone.careful is not None else alone.plain
    return Isolated(verdict.ok, "process", verdict.summary)


__all__ = ["Cell", "Isolated", "Matrix", "Stopped", "examine", "make"]
