"""One program with NumPy 1.26 beside NumPy 2, and protobuf 3 beside protobuf 6: functions in environments of their own.

python examples/functions.py --build     # resolves, locks and builds both environments, once
python examples/functions.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

import layerzero as lz

OLD = lz.env("example-old", requires=["numpy==1.26.4", "protobuf==3.20.3"], python="3.11")
NEW = lz.env("example-new", requires=["numpy>=2.2,<3", "protobuf>=6,<7"], python="3.11")


@dataclass
class Versions:
    numpy: str
    protobuf: str


def spectrum(samples: np.ndarray) -> tuple[Versions, np.ndarray]:
    """Runs where it is sent: the same code, with other libraries."""
    import google.protobuf
    import numpy

    return Versions(numpy.__version__, google.protobuf.__version__), abs(numpy.fft.rfft(samples))


def message(peak: float) -> bytes:
    from google.protobuf.struct_pb2 import Struct

    found = Struct()
    found.update({"peak": peak})
    return bytes(found.SerializeToString())


old_spectrum, new_spectrum = lz.isolated(OLD, timeout_s=60)(spectrum), lz.isolated(NEW, timeout_s=60)(spectrum)
old_message, new_message = lz.isolated(OLD)(message), lz.isolated(NEW)(message)

if __name__ == "__main__":
    if "--build" in sys.argv:
        OLD.build()
        NEW.build()
    lz.connect()
    samples = lz.share(np.sin(np.linspace(0, 600, 1 << 17)))  # once into shared memory; all calls see it there
    (old, first), (new, second) = old_spectrum(samples), new_spectrum(samples)
    print(old, new, sep="\n")
    print("largest difference", float(abs(first - second).max()))
    print("the same message", old_message(2.5) == new_message(2.5))
    print(new_spectrum.last_report())
