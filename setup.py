"""What pyproject.toml has no stable words for: what is in C, one file of each for all Pythons from 3.11 on."""

from setuptools import Extension, setup

CLIENT, ACCELERATION = "src/layerzero/client", "src/layerzero/torch/acceleration"
C = (
    "client.gpu._fastpath",
    "client.gpu._lifted",
    "client.session._repeats",
    "torch.acceleration._look",
)

setup(
    ext_modules=[
        Extension(
            f"layerzero.{name}",
            [f"src/layerzero/{name.replace('.', '/')}.c"],
            depends=[
                f"{CLIENT}/gpu/_call_key.h",
                f"{CLIENT}/gpu/_counting.h",
                *(f"{CLIENT}/session/_{part}.h" for part in ("arenas", "blocks", "kept", "line", "waiting")),
                *(f"{ACCELERATION}/_look_{part}.h" for part in ("key", "layers")),
            ],
            py_limited_api=True,
            optional=True,  # without a C compiler the same steps run in Python, and reports say so
        )
        for name in C
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
