"""A broker with GPU backends of its own for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.process.harness import ROOT, Site

PROVIDER = Path(__file__).parent / "backends" / "torch_toy.py"
DTYPES = ["float16", "bfloat16", "float32"]


def gpu_site(store: Path, *names: str, isolation: str = "subprocess", **settings: object) -> Site:
    """A site, not yet started, whose backends are `names`, first choice first; they run in this interpreter's torch."""
    site = Site(store, **{"restart_budget": 1000, "backoff_s": 0.01, "backoff_max_s": 0.01, **settings})
    site.manifests.mkdir()
    for rank, name in enumerate(names):
        (site.manifests / f"{name}.py").write_text(PROVIDER.read_text())
        kernel: dict[str, Any] = {
            "source": "test",
            "priority": 70 - rank,
            "dtypes": DTYPES,
            "deterministic": True,
            "is_cuda_graph_safe": True,
            "supports_empty": True,
        }
        attention = {
            **kernel,
            "supports_empty": False,
            "min_ndim": 4,
            "max_ndim": 4,
            "requires_layouts": ["BHSD", "BSHD"],
        }
        attention |= {
            "min_head_dim": 8,
            "head_dim_multiple": 8,
            "causal_alignments": ["top_left"],
            "masked_rows": "nan",
        }
        ops = {op: [{**kernel, "kernel_id": f"{name}.{op}"}] for op in ("silu", "matmul", "gelu", "layer_norm")}
        append = {"dtypes": [*DTYPES, "float8_e4m3fn"], "index_dtypes": ["int32", "int64"]}
        ops["append_kv"] = [{**kernel, **append, "kernel_id": f"{name}.append_kv"}]
        norm = {"kernel_id": f"{name}.layer_norm_backward", "optional_args": ["weight"]}
        ops["layer_norm_backward"] = [{**kernel, **norm}]
        ops["attention"] = [{**attention, "kernel_id": f"{name}.attention"}]
        ops["attention_forward"] = [{**attention, "kernel_id": f"{name}.attention_forward"}]
        ops["attention_backward"] = [{**attention, "kernel_id": f"{name}.attention_backward"}]
        descriptor = {
            "schema_version": "1.0",
            "backend": name,
            "backend_version": "1",
            "platform": "cuda",
            "ops": ops,
        }
        (site.manifests / f"{name}.json").write_text(json.dumps(descriptor))
        manifest = f'summary = "test"\nprovider = "{name}.py"\ndescriptor = "{name}.json"\ninterpreter = "host"\n'
        (site.manifests / f"{name}.toml").write_text(
            f'{manifest}env = {{LZ_TOY_NAME = "{name}", LZ_TESTS = "{ROOT}"}}\n'
        )
    site.environ["LAYERZERO_MANIFEST_DIRS"] = str(site.manifests)
    site.environ["LAYERZERO_BACKEND_ISOLATION"] = isolation
    return site
