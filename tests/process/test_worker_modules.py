"""What a worker loads of ours: in an environment that is not ours, code that it cannot use can still break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.process.harness import BACKENDS, Site, wait_until

import layerzero as lz

# A worker whose kernels compute on the CPU loads these and no others, whatever it is asked to do.
CPU_WORKER = {
    "layerzero.ipc": {
        "confinement",
        "errors",
        "free_memory",
        "loading",
        "records",
        "shm",
        "spinning",
        "transport",
        "vocabulary",
        "wording",
    },
    "layerzero.ipc.shm": {"huge_pages", "lane", "memory", "recent_calls", "timeline_words"},
    "layerzero.ipc.transport": {
        "chains",
        "control",
        "counter_messages",
        "message",
        "messages",
        "plain",
        "sockets",
        "unwanted",
        "wire",
    },
    "layerzero.ipc.vocabulary": {
        "attention_ops",
        "attention_shapes",
        "neighbours",
        "elementwise_shapes",
        "expert_ops",
        "expert_shapes",
        "loss_shapes",
        "norm_shapes",
        "op",
        "ops",
        "quantized_shapes",
        "resampling",
        "sampling_shapes",
        "shape_checks",
        "shapes",
        "tensors",
        "vision_shapes",
        "windows",
        "worker_codes",
    },
    "layerzero.workers": {
        "_serving",
        "arenas",
        "blocks",
        "boot",
        "chains",
        "lanes",
        "loop",
        "outcomes",
        "prepared",
        "provider",
        "serving",
    },
}
TELL = """
import atexit, os, sys
def _tell():
    if "layerzero.workers.loop" in sys.modules:  # not the probe's process
        with open(os.environ["LZ_LOADED"], "w") as file:
            file.write("\\n".join(sorted(sys.modules)) + "\\nend\\n")
atexit.register(_tell)
"""


def test_a_worker_of_the_cpu_loads_nothing_of_cuda(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """It once loaded 35 of our modules, the client's side of GPU memory among them: 60 % of what it could not use."""
    loaded = tmp_path / "loaded"
    site = new_site()
    site.add_backend("watched", provider=(BACKENDS / "toy.py").read_text() + TELL, env={"LZ_LOADED": str(loaded)})
    with site.connect() as session:
        x = np.linspace(-3, 3, 8, dtype=np.float32)
        out = lz.empty_like(x)
        lz.silu(x, backend="watched")  # by the broker
        wait_until(lambda: _is_express(x, out))
        session.ask("shutdown")
    wait_until(lambda: loaded.exists() and loaded.read_text().endswith("\nend\n"))
    names = loaded.read_text().split()
    ours = {tuple(name.rpartition(".")[::2]) for name in names if name.startswith("layerzero.") and name.count(".") > 1}
    assert ours == {(package, name) for package, modules in CPU_WORKER.items() for name in modules}


def _is_express(x: np.ndarray, out: np.ndarray) -> bool:
    lz.silu(x, backend="watched", out=out)
    report = lz.last_report()
    return report is not None and report.path == "express"
