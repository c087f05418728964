"""What pyproject.toml has no stable words for: what is compiled, one file for all Pythons: of the client from 3.11 on,
of workers, whose environments are others', from 3.10 on."""

from setuptools import Extension, setup

CLIENT, SHM, ACCELERATION = (f"src/layerzero/{folder}" for folder in ("client", "ipc/shm", "torch/acceleration"))


def extension(folder: str, name: str) -> Extension:
    return Extension(
        f"layerzero.{folder.replace('/', '.')}.{name}",
        [f"src/layerzero/{folder}/{name}.c"],
        depends=[
            f"{SHM}/_words.h",
            f"{SHM}/_lane.h",
            f"{SHM}/_counters.h",
            f"{CLIENT}/gpu/_call_key.h",
            f"{CLIENT}/gpu/_counting.h",
            *(f"{CLIENT}/session/_{part}.h" for part in ("arenas", "blocks", "kept", "lending", "line", "waiting")),
            *(f"{ACCELERATION}/_look_{part}.h" for part in ("key", "layers")),
        ],
        py_limited_api=True,
        optional=True,  # without a C compiler the same steps run in Python, and reports say so
    )


setup(
    ext_modules=[
        extension(folder, name)
        for folder, name in (
            ("client/gpu", "_fastpath"),
            ("client/gpu", "_lifted"),
            ("client/session", "_repeats"),
            ("torch", "_calls"),
            ("torch/acceleration", "_look"),
            ("workers", "_serving"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
