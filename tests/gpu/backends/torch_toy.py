"""A GPU backend for tests: torch kernels, a slow one, and real faults on request. LZ_TOY_NAME says which one it is.

gelu of SLOW elements keeps the GPU busy first. layer_norm with an eps of FAULTS strikes in backend "one". gelu of
TRAPPED elements costs the GPU's context where one of them is above TRAP: a fault that no proof sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from layerzero.ipc.cuda import driver
from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_cuda_gradients import Gradients
from layerzero.workers.providers._torch_norms import NormGradients
from layerzero.workers.providers._torch_ops import Run, TorchOps
from layerzero.workers.providers.torch_cuda import append_kv

ILLEGAL, ASSERT, RAISE, MEMORY = FAULTS = (0.4375, 0.21875, 0.109375, 0.0546875)  # values of eps
SLOW, SLOW_CYCLES = 4099, 300_000_000  # elements; 0.15 to 0.2 s
TRAPPED, TRAP = 4111, 1e4


def load() -> Loaded:
    import torch

    gpu = TorchCuda(torch)
    name = os.environ["LZ_TOY_NAME"]
    ops = TorchOps(torch, torch.nn.functional.scaled_dot_product_attention)

    def gelu(views: Sequence[Any], call: Call) -> Run:
        run = ops.gelu(views, call)

        def slow(out: Any) -> None:
            torch.cuda._sleep(SLOW_CYCLES)
            run(out)

        def trapped(out: Any) -> None:
            far = (views[0].amax() > TRAP).long() << 40
            views[0].flatten()[far.view(1)]  # torch asserts there, on the GPU
            run(out)

        return {SLOW: slow, TRAPPED: trapped}.get(views[0].numel(), run)

    def layer_norm(views: Sequence[Any], call: Call) -> Run:
        run, eps = ops.layer_norm(views, call), call.attrs["eps"]
        x = views[0]

        def strike(out: Any) -> None:
            if eps == ILLEGAL:
                sys.path.insert(0, os.environ["LZ_TESTS"])
                from tests.gpu.peer import launch

                launch(driver.load(), "illegal_address", torch.cuda.current_stream().cuda_stream)
            elif eps == ASSERT:
                x.flatten()[torch.full((1,), 1 << 40, device=x.device)]
            elif eps == RAISE:
                raise RuntimeError("the toy raises")
            else:
                torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            run(out)

        return strike if name == "one" and eps in FAULTS else run

    def attention(views: Sequence[Any], call: Call) -> Run:
        q, k, v, mask, *_ = views
        sdpa, is_causal = torch.nn.functional.scaled_dot_product_attention, call.attrs["is_causal"]
        options = {"attn_mask": mask, "is_causal": is_causal, "scale": call.attrs["scale"]}
        options["enable_gqa"] = q.shape[1] != k.shape[1]
        return lambda out: out.copy_(sdpa(q, k, v, **options))

    builders = {
        **{"silu": ops.silu, "matmul": ops.matmul, "gelu": gelu, "layer_norm": layer_norm, "attention": attention},
        "append_kv": lambda views, call: append_kv(torch, views),
        **NormGradients(torch, is_gpu=True).builders(),
    }
    builders |= {
        op: build
        for name, build in Gradients(torch, gpu).builders().items()
        for op in (name.removesuffix(".efficient_deterministic").removesuffix(".efficient"),)
        if "." not in op
    }
    return Loaded(
        versions={"torch": torch.__version__},
        kernels=gpu.binds({f"{name}.{op}": build for op, build in builders.items()}),
        on_stream=gpu.on_stream,
    )
