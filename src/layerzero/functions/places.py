"""Where calls of a function may run: environments, the one that is wanted first, and the workers of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from layerzero.functions.environment import FunctionEnv
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.vocabulary import pools

MAX_OF = 200  # characters of what times are kept by


class Candidate(NamedTuple):
    """An environment, and what is called in it."""

    env: FunctionEnv
    code: Code


class Places:
    """The candidates of a function, and the backends that are their workers. Threads may share it."""

    def __init__(self, candidates: Sequence[Candidate], workers: int | None = None) -> None:
        """`workers`: of each environment; as it was declared when left out. Raises InvalidArgument."""
        self.candidates = tuple(candidates)
        seen = [one.env.backend for one in candidates]
        twice = next((name for name in seen if seen.count(name) > 1), None)
        if twice is not None:
            text = f"lz.isolated: {twice} is named twice; allowed: one implementation in each environment"
            raise InvalidArgument(text)
        self._counts = {one.env.backend: one.env.workers if workers is None else workers for one in candidates}
        self.backends = tuple(backend for name, count in self._counts.items() for backend in pools.members(name, count))
        if len(self.backends) > pools.MAX_PINNED:
            text = f"lz.isolated: {len(self.backends)} workers of {len(seen)} environments"
            raise InvalidArgument(f"{text}; allowed: {pools.MAX_PINNED}")
        self._is_looked_at = len(self.backends) > 1 or any(one.env.interpreter or one.env.image for one in candidates)
        self._envs: dict[str, FunctionEnv] = {}  # by worker
        self._trees: dict[tuple[str, ...], list[Any]] = {}  # by backends
        self._known_to: Callable[[], Any] = lambda: None
        self.results_there: dict[str, tuple[Any, ...]] = {}  # by what is called: specs of the last results on a GPU

    @property
    def env(self) -> FunctionEnv:
        """The one that is wanted first."""
        return self.candidates[0].env

    def of(self, nbytes: int) -> str:
        """What the times of its calls with so many bytes of arrays are kept by; empty where there is no choice."""
        if len(self.candidates) == 1:
            return ""
        step = -(-max(nbytes - 1, 0).bit_length() // 4)  # powers of 16
        return f"{self.candidates[0].code.label[:MAX_OF]} up to {16**step} bytes"

    def count_of(self, where: FunctionEnv) -> int:
        """How many workers one of the environments has."""
        return self._counts[where.backend]

    def backends_of(self, where: FunctionEnv) -> tuple[str, ...]:
        """The workers of one of the environments."""
        return tuple(one for one in self.backends if pools.environment_of(one) == where.backend)

    def env_of(self, backend: str) -> FunctionEnv:
        """The environment that a worker is of."""
        found = self._envs.get(backend)
        if found is None:
            name = pools.environment_of(backend)
            found = next((one.env for one in self.candidates if one.env.backend == name), self.env)
            if backend in self.backends:
                self._envs[backend] = found
        return found

    def tree(self, backends: Sequence[str]) -> list[Any]:
        """What stands in a call for what these workers are to call: a reference, or one by environment."""
        key = tuple(backends)
        found = self._trees.get(key)
        if found is None:
            found = self._trees[key] = self._tree(key)
        return found

    def _tree(self, backends: Iterable[str]) -> list[Any]:
        names = dict.fromkeys(map(pools.environment_of, backends))
        several = {one.env.backend: one.code.to_tree() for one in self.candidates if one.env.backend in names}
        trees = list(several.values())
        if all(tree == trees[0] for tree in trees):
            return trees[0]
        return [frames.BY_ENVIRONMENT, *([name, tree] for name, tree in several.items())]

    def introduce(self, session: Any) -> None:
        """Have the broker know of all workers before the first call: it serves by those that it knows, and by what was
        imported there before an interpreter of the user's has changed."""
        if self._is_looked_at and self._known_to() is not session:
            if any(one.env.image for one in self.candidates):
                session.link.note_joined()
            self.are_served(session.ask)
            self._known_to = weakref.ref(session)

    def are_served(self, ask: Any) -> bool:
        """Have the broker look for them again. Whether one of the environments serves now."""
        found = [one.env.is_served(ask, self._counts[one.env.backend]) for one in self.candidates]  # all are asked
        return any(found)

    def explain_failure(self, error: LayerZeroError, ask: Any) -> LayerZeroError:
        """Why a call came to none of them: what the first one lacks, else `error`."""
        for one in self.candidates:
            found = one.env.explain_failure(error, ask)
            if found is not error:
                return found
        return error
