"""What every process shares. Copied into foreign environments, so: Python 3.10, pyzmq, msgpack, nothing else."""
