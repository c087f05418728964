"""lz.isolated: what functions and classes of a module are decorated with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from layerzero.functions.code import reference
from layerzero.functions.environment import FunctionEnv, env_of
from layerzero.functions.isolated import Isolated
from layerzero.functions.objects import IsolatedClass
from layerzero.functions.options import Options, options_of
from layerzero.functions.places import Candidate
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions.surface import surface_of

P = ParamSpec("P")
R = TypeVar("R")


def isolated(
    where: FunctionEnv | Sequence[str] | Sequence[FunctionEnv],
    *,
    timeout_s: float | None = None,
    fallback: Callable[..., Any] | None = None,
    idempotent: bool = False,
    keep: bool = False,
    shapes: Callable[..., Any] | None = None,
    on_death: str | None = None,
    workers: int | None = None,
    shadow: float = 0.0,
    tolerance: float = 1e-5,
    process: str = "pool",
    placement: str = "worker",
    lift: bool = False,
    trial: Callable[..., Any] | None = None,
    device: Any = None,
) -> Callable[[Callable[P, R]], Isolated[P, R]]:
    """Let a function of a module run, or the objects of a class live, in an environment of their own: in a worker
    process that the broker keeps.

    where: what lz.env gives, or a list of requirements (its name is the function's then), or, for functions, a list of
    environments, the one that is wanted first in front: each is a candidate for each call. timeout_s: how long a call
    may run; its worker is killed then. fallback: what to call with the same arguments where the environment cannot
    serve: a function of this process, or an isolated one; classes have none. idempotent: a call whose worker died runs
    once more. keep, of functions: results stay in the worker, and calls return an lz.Handle. shapes, of functions:
    takes the same arguments and gives (shape, dtype) of the result, or a list of such, so that its memory is there
    before: a parameter `out` of the function gets it. on_death, of classes: "error" (default), or "rebuild": an object
    whose worker has died is constructed again, from the same arguments, by the next call of it. workers: how many
    processes of the environment serve it, so that calls run side by side; as the environment says when left out.
    shadow, of functions: this share of the calls runs in a second environment, too; results whose numbers differ by
    more than tolerance, absolute and relative, are reported. process, of classes: "pool": objects share the
    environment's workers; "own": each has a process of its own, which ends with it. placement, of functions of one
    environment: "worker"; "auto": in this process where Python and requirements of the environment hold in it and
    policy allows it, else in a worker; "in_process": there or not at all. There a call has no deadline, and what ends
    it hard ends this process. lift, of functions with shapes= whose result depends on their arguments alone: kernels
    of calls that repeat, with arrays on a GPU, are proved and then launched by this process; last_report().not_lifted
    says of others why not. trial, with lift=True: takes the same arguments and gives, by the names of those that are
    arrays of integers, which values these may have: {"index": range(table.shape[0])}. device: "cuda", "cuda:1" or a
    torch.device: arrays on a GPU that a call without any returns, or gives as items, are tensors of this process's
    torch on that GPU, in the order of its current stream; "cuda" is torch's current device at each call. A class
    becomes an IsolatedClass, whose objects are proxies.

    Raises InvalidArgument for what no other process can import: lambdas, closures, methods, nested classes.
    """
    given = {"timeout_s": timeout_s, "fallback": fallback, "idempotent": idempotent, "keep": keep, "workers": workers}
    more = {"shapes": shapes, "shadow": shadow, "tolerance": tolerance, "process": process, "placement": placement}
    options = options_of(Options, **given, **more, lift=lift, trial=trial, device=device)

    def decorate(function: Callable[P, R]) -> Isolated[P, R]:
        if isinstance(function, type):
            code = reference(function)
            if _several(where):
                raise InvalidArgument(f"lz.isolated: {code.label} is a class, whose objects live in one environment")
            made = IsolatedClass(
                function, surface_of(function), env_of(where, function.__name__), options, code, on_death or "error"
            )
            return cast("Isolated[P, R]", made)  # whose calls give what type checkers take for objects of the class
        if on_death is not None:
            raise InvalidArgument("lz.isolated: on_death is for classes; a function's call has idempotent=, fallback=")
        code = reference(function)
        first, *others = _several(where) or [env_of(where, function.__name__)]
        return Isolated(function, first, options, code, others=[Candidate(one, code) for one in others])

    if callable(where) and not isinstance(where, FunctionEnv):
        raise InvalidArgument("lz.isolated: name the environment: @lz.isolated(lz.env(...)) or @lz.isolated([...])")
    return decorate


def _several(where: object) -> list[FunctionEnv]:
    """The environments of a list; none of what is no such list."""
    if not isinstance(where, (list, tuple)) or not where:
        return []
    found = [one for one in where if isinstance(one, FunctionEnv)]
    if found and len(found) < len(where):
        text = "lz.isolated: a list has environments or requirements, not both; pass lz.env(requires=...)"
        raise InvalidArgument(text)
    return found
