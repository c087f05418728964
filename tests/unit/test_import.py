"""What `import layerzero` costs and gives."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()  # what other processes do is not its cost
import layerzero
took = time.process_time() - start
print(json.dumps({"ms": took * 1e3, "modules": sorted(set(sys.modules) - before), "names": dir(layerzero)}))
"""


def test_import_is_light() -> None:
    """Applications import us at start-up: under 150 ms, no framework, nothing of ours but the facade."""
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT], text=True)) for _ in range(3)]
    assert min(run["ms"] for run in runs) < 150
    loaded = set(runs[0]["modules"])
    assert not loaded & {"torch", "numpy", "jax", "mlx", "transformers", "diffusers", "zmq", "pydantic", "rich"}
    assert {m for m in loaded if m.startswith("layerzero")} == {"layerzero"}


def test_every_public_name_resolves() -> None:
    """Lazy names fail late: a typo in the table would only show when someone uses it."""
    import layerzero as lz

    for name in lz.__all__:
        assert getattr(lz, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    """hasattr() and completion rely on it."""
    import layerzero as lz

    assert not hasattr(lz, "no_such_name")


@pytest.mark.parametrize("name", ["bmm", "mm", "mv"])
def test_torchs_names_of_products_lead_to_ours(name: str) -> None:
    """matmul takes batches, matrices and vectors."""
    import layerzero as lz

    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean lz.matmul"):
        getattr(lz, name)


def test_a_name_that_is_nearly_one_of_ours_leads_there() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import layerzero as lz\nlz.soft_max"], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'softmax'?" in ran.stderr


def test_a_name_that_is_none_of_ours_imports_nothing() -> None:
    """Programs ask all modules for some name while they walk through sys.modules."""
    code = "import sys, layerzero\nfor module in sys.modules.values(): hasattr(module, 'soft_max')"
    subprocess.run([sys.executable, "-c", code], check=True)
