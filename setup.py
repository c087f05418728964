"""What pyproject.toml has no stable words for: the C of the client, one file for all Pythons from 3.11 on."""

from setuptools import Extension, setup

CLIENT = "src/layerzero/client"

setup(
    ext_modules=[
        Extension(
            f"layerzero.client.{folder}.{name}",
            [f"{CLIENT}/{folder}/{name}.c"],
            depends=[
                f"{CLIENT}/gpu/_call_key.h",
                f"{CLIENT}/gpu/_counting.h",
                *(f"{CLIENT}/session/_{part}.h" for part in ("arenas", "blocks", "kept", "line", "waiting")),
            ],
            py_limited_api=True,
            optional=True,  # without a C compiler the same steps run in Python, and reports say so
        )
        for folder, name in (("gpu", "_fastpath"), ("gpu", "_lifted"), ("session", "_repeats"))
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
