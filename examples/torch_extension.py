"""An op in C++ that was compiled for another environment's torch, under torch.compile in the torch of this program.

python examples/torch_extension.py --build     # where layerzero-broker[torch] is installed
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

import layerzero as lz

ENV = lz.env("example-extension", requires=["torch==2.13.0", "ninja"], python="3.11")
SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>
at::Tensor scan(const at::Tensor& x, double decay) {
  at::Tensor y = x.clone(at::MemoryFormat::Contiguous);
  double* p = y.data_ptr<double>();
  for (int64_t row = 0, size = y.size(-1); row < y.numel() / size; ++row, p += size)
    for (int64_t i = 1; i < size; ++i) p[i] += decay * p[i - 1];
  return y; }
TORCH_LIBRARY(old, m) { m.def("scan", &scan); }
"""


@lz.isolated(ENV, timeout_s=300)
def compiled(folder: str) -> str:
    """Of the environment's torch, whose libraries it is linked with."""
    from torch.utils import cpp_extension

    Path(folder, "scan.cpp").write_text(SOURCE)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
    cpp_extension.load("scan", [f"{folder}/scan.cpp"], build_directory=folder, is_python_module=False)
    return str(torch.__version__)


@lz.isolated(ENV, timeout_s=60)
def scan(x: torch.Tensor, decay: float) -> torch.Tensor:
    return torch.ops.old.scan(x, decay)


op = scan.as_torch_op(
    "example::scan",
    fake=lambda x, decay: torch.empty_like(x),
    backward=lambda grad, x, decay: op(grad.flip(-1), decay).flip(-1),
)

if __name__ == "__main__":
    if "--build" in sys.argv:
        ENV.build()
    lz.connect()
    with tempfile.TemporaryDirectory() as folder:
        print("compiled for torch", compiled(folder), "called from torch", torch.__version__)
        x = torch.randn(8, 100, dtype=torch.float64, requires_grad=True)
        y = torch.compile(lambda x: op(x * 2, 0.5) + 1, fullgraph=True)(x)
        y.sum().backward()
        print("largest difference", float(abs(y[:, 1:] - 1 - 2 * x[:, 1:] - 0.5 * (y[:, :-1] - 1)).max()), x.grad.shape)
