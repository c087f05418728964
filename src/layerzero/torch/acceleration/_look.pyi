"""What torch/acceleration/_look.c has. Keyword arguments and their meaning: looking.py, interception.py and seam.py."""

from collections.abc import Callable, Mapping
from typing import Any

class Looks:
    def __new__(cls, **told: Any) -> Looks: ...
    def call(
        self,
        rule: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        above: int,
        /,
    ) -> Any: ...
    def learn(self, **told: Any) -> None: ...

class Override:
    def __new__(cls, **told: Any) -> Override: ...
    def __call__(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any: ...
