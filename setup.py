"""What pyproject.toml has no stable words for: the C of the client, one file for all Pythons from 3.11 on."""

from setuptools import Extension, setup

GPU = "src/layerzero/client/gpu"

setup(
    ext_modules=[
        Extension(
            f"layerzero.client.gpu.{name}",
            [f"{GPU}/{name}.c"],
            depends=[f"{GPU}/_call_key.h"],
            py_limited_api=True,
            optional=True,  # without a C compiler the same steps run in Python, and reports say so
        )
        for name in ("_fastpath", "_lifted")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
