"""Runs inside a foreign environment, one process per backend: imports layerzero.ipc and the stdlib, and one library.

To read it: provider.py says what a provider is, providers/openblas.py is a small one, loop.py is a worker's life, and
certify/ has the calls by which probe.py certifies kernels. Modules that are processes of their own: __main__, which is
a worker, probe, compiler, prove, switching, join and health.
"""
