"""`python -P lz_call.py MODULE FUNCTION FOLDER`: call a user's function in the environment under test.

It fails by an exception or by returning False. The module may be one whose functions are isolated: `layerzero` is then
what a worker has of it, where the decorators do nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys


def main(module: str, name: str, folder: str) -> int:
    sys.path.insert(0, folder)
    if importlib.util.find_spec("layerzero") is not None:
        import layerzero

        if not hasattr(layerzero, "_HOME"):  # not the package itself, which a user may require
            from layerzero.workers.functions import stand_in

            stand_in.install()
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if not callable(function):
        print(f"{module}:{name} is no function: {function!r:.200}", file=sys.stderr)
        return 2
    if function() is False:
        print(f"{module}:{name} returned False", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
