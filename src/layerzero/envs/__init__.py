"""Backend environments: a manifest and a lock become a private venv, staged worker code and a probed verdict.

To read it in the order of a build: manifest.py, build/lock.py, build/build.py, build/stage.py, probe/probe.py; what a
backend claims is read by descriptors.py. functions.py, locked.py and declared.py are of environments that programs
declare with `lz.env`. Nothing here runs a library: workers/ does, in the environment.
"""
