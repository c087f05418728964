"""A further version of a toy backend: right for the cases of the probe, and faulty where a test asks for it by silu's
first element: WRONG, SLOW, RAISES, DIES. All are exact in float32, and no case of the probe has them."""

from __future__ import annotations

from tests.process.harness import BACKENDS

WRONG, SLOW, RAISES, DIES = 0.50390625, 0.50781250, 0.51171875, 0.515625
SLOW_S = 0.02
FAULTY = (
    (BACKENDS / "toy.py").read_text()
    + f"""
_right = _silu

def _silu(call, inputs, outputs):
    import numpy as np
    import time

    run, read, write = _right(call, inputs, outputs), _reader(inputs[0]), _writer(outputs[0])

    def faulty():
        first = float(read().flat[0]) if read().size else 0.0
        if first == {DIES}:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == {RAISES}:
            raise RuntimeError("the new version refuses this")
        if first == {SLOW}:
            time.sleep({SLOW_S})
        run()
        if first == {WRONG}:
            x = read()
            write(1.25 * x / (1 + np.exp(-x)))

    return faulty
"""
)
