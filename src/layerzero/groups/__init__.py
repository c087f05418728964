"""Collective communication between the processes of a program: lz.group. Loaded when it is asked for."""
