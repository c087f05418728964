"""What pyproject.toml has no stable words for: the C of the client, one file for all Pythons from 3.11 on."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "layerzero.client.gpu._fastpath",
            ["src/layerzero/client/gpu/_fastpath.c"],
            py_limited_api=True,
            optional=True,  # without a C compiler the same steps run in Python, and reports say so
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
