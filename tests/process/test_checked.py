"""LAYERZERO_DEBUG=1 finds a kernel that writes where it must not and one that makes NaN, and tells each decision."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import BACKENDS, Site

TOY = (BACKENDS / "toy.py").read_text()
WRITES = "            write(x / (1 + np.exp(-x)))\n"
START = "ctypes.addressof(ctypes.c_char.from_buffer(target.memory))"
PROGRAM = """
import numpy as np
lz.connect()
x = np.linspace(-3, 3, 7, dtype="float32")
for name in ("alpha", "{name}", "alpha"):
    try:
        print(np.allclose(lz.silu(x, backend=name), lz.silu(x, backend="alpha")))
    except lz.BackendError as exc:
        print(str(exc).replace(chr(10), " "))
try:
    lz.silu(np.array([np.nan, 1], "float32"), backend="alpha")
    print("NaN of NaN is right")
except lz.BackendError as exc:
    print(exc)
"""


def run(site: Site, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What it printed, and the lines that it was told."""
    process = site.python(PROGRAM.format(name=name), stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.splitlines(), [json.loads(line) for line in err.splitlines() if line.startswith("{")]


def test_a_kernel_that_reads_beyond_an_array_dies_there(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Of the input: there is no memory for it, not that of other arrays either. The capsule has the stacks."""
    site = new_site()
    wrong = (
        "            if x.size == 7:  # which no probe tries\n                ctypes.string_at(x.ctypes.data + 64, 1)\n"
    )
    site.add_backend("bad", provider=TOY.replace(WRITES, WRITES + wrong))
    site.environ |= {"LAYERZERO_DEBUG": "1", "LAYERZERO_CAPSULE_DIR": str(tmp_path / "capsules")}
    printed, _ = run(site, "bad")
    assert (printed[0], printed[2], printed[3]) == ("True", "True", "NaN of NaN is right")
    assert "signal 11" in printed[1]
    [capsule] = (tmp_path / "capsules").iterdir()
    assert "SIGSEGV" in capsule.name
    assert "Segmentation fault" in (capsule / "worker.log").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"ctypes.memset({START} + 28, 1, 1)", "behind the end of an array of 28 bytes"),
        (f"ctypes.memset({START} - 1, 1, 1)", "before the beginning of an array of 28 bytes"),
        ("target.memory[4:8] = b'\\x00\\x00\\xc0\\x7f'", "result 0 has NaN at [1], and no input has any"),
        ("target.memory[8:12] = b'\\x00\\x00\\x80\\xff'", "result 0 has infinity at [2], and no input has any"),
    ],
    ids=["behind", "before", "nan", "infinity"],
)
def test_what_a_kernel_does_wrong(new_site: Callable[..., Site], line: str, said: str) -> None:
    """The error names it, the other kernels' calls are as ever, and what comes in as NaN may go out as one."""
    site = new_site()
    assert TOY.count(WRITES) == 1
    wrong = f"            if x.size == 7:  # which no probe tries\n                {line}\n"
    site.add_backend("bad", provider=TOY.replace(WRITES, WRITES + wrong))
    site.environ["LAYERZERO_DEBUG"] = "1"
    printed, told = run(site, "bad")
    assert (printed[0], printed[2], printed[3]) == ("True", "True", "NaN of NaN is right")
    assert "avoid bad.silu for this call" in printed[1]
    assert said in printed[1]
    decided = [one for one in told if one["event"] == "call.decided"]
    assert [one["kernel"] for one in decided[:3]] == ["alpha.silu", "alpha.silu", "bad.silu"]
    assert decided[0]["us"] > 0
    assert decided[0]["inputs"][0].startswith("x ")
    [wrong] = [one for one in told if one["event"] == "call.wrong"]
    assert (wrong["op"], wrong["kernel"]) == ("silu", "bad.silu")
