import tempfile

import pytest
from support.ray_nodes import cluster


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, and this process connected to them. Ray's sockets need a short path."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(folder) as (address, started):
        yield address, started
        ray.shutdown()
