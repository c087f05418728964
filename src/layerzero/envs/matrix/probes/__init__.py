"""One file per library with a tiny op: `op(memory)` returns (what came out, what is right), both flat lists.

runner.py loads them by their path in the environment under test; nothing of ours is there. `memory.left` and
`memory.right` are 64x64 float32 views of memory that all ops of the process share, as an application's arrays would be;
`memory.product` is their exact matrix product, `memory.linear` that with `right` transposed.
"""
