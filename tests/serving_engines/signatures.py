"""Names of arguments and fields of the classes of vLLM and SGLang that ours wrap, read from their sources, which
nothing has to import: neither is installed where tests run.

    python -m tests.serving_engines.signatures vllm 0.33.0 FOLDER > tests/serving_engines/vllm.json"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

WANTED = {
    "vllm": {
        "vllm/v1/attention/backends/registry.py": ["register_backend"],
        "vllm/v1/attention/backends/flash_attn.py": [
            "FlashAttentionImpl.__init__",
            "FlashAttentionImpl.forward",
            "FlashAttentionMetadata",
            "FlashAttentionBackend.get_name",
            "FlashAttentionBackend.get_impl_cls",
        ],
        "vllm/v1/attention/backends/triton_attn.py": [
            "TritonAttentionImpl.__init__",
            "TritonAttentionImpl.forward",
            "TritonAttentionMetadata",
            "TritonAttentionBackend.get_name",
            "TritonAttentionBackend.get_impl_cls",
        ],
    },
    "sglang": {
        "sglang/srt/layers/attention/attention_registry.py": ["register_attention_backend"],
        "sglang/srt/layers/attention/torch_native_backend.py": [
            "TorchNativeAttnBackend.forward_decode",
            "TorchNativeAttnBackend.forward_extend",
        ],
        "sglang/srt/layers/attention/triton_backend.py": [
            "TritonAttnBackend.forward_decode",
            "TritonAttnBackend.forward_extend",
        ],
        "sglang/srt/layers/attention/flashinfer_backend.py": [
            "FlashInferAttnBackend.forward_decode",
            "FlashInferAttnBackend.forward_extend",
        ],
        "sglang/srt/layers/radix_attention.py": ["RadixAttention.__init__"],
        "sglang/srt/mem_cache/memory_pool.py": ["MHATokenToKVPool.set_kv_buffer", "KVWriteLoc"],
    },
}


def read(package: str, folder: Path) -> dict[str, list[str]]:
    """By function or class, its arguments or fields."""
    found: dict[str, list[str]] = {}
    for file, names in WANTED[package].items():
        body = ast.parse((folder / file).read_text(encoding="utf-8")).body
        module = file.removesuffix(".py").replace("/", ".")
        for name in names:
            node: Any = None
            for part in name.split("."):
                node = next(one for one in (node.body if node else body) if getattr(one, "name", None) == part)
            found[f"{module}.{name}"] = _fields(node) if isinstance(node, ast.ClassDef) else _arguments(node.args)
    return found


def _fields(node: ast.ClassDef) -> list[str]:
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def _arguments(node: ast.arguments) -> list[str]:
    last = [f"**{node.kwarg.arg}"] if node.kwarg else []
    return [one.arg for one in (*node.posonlyargs, *node.args, *node.kwonlyargs)] + last


def recorded(package: str) -> dict[str, Any]:
    """Those of the version that was tried."""
    text = Path(__file__).with_name(f"{package}.json").read_text(encoding="utf-8")
    made: dict[str, Any] = json.loads(text)
    return made


if __name__ == "__main__":
    package, version, folder = sys.argv[1:]
    print(json.dumps({"version": version, "signatures": read(package, Path(folder))}, indent=1))
