"""What a worker's process inherits."""

from __future__ import annotations

from layerzero.envs.build.environ import worker_environ


def test_streams_that_wait_get_connections_of_their_own_unless_the_user_says_otherwise() -> None:
    """With the driver's default of eight, a stream that waits for a word holds up others of its worker."""
    assert worker_environ({}, {})["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert worker_environ({}, {}, has_mps=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"  # MPS has some hundred for all
    assert worker_environ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_worker_gets_its_own_settings_and_no_secrets() -> None:
    """A library must not find what it has no use for."""
    parent = {"LAYERZERO_WORKER_GRAPH_MIB": "0", "HF_TOKEN": "secret", "LAYERZERO_POLICY": "/p"}
    given = worker_environ({}, parent)
    assert given["LAYERZERO_WORKER_GRAPH_MIB"] == "0"
    assert not {"HF_TOKEN", "LAYERZERO_POLICY"} & {*given}
