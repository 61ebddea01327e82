"""One Ray on the loopback of this machine, for all tests of this folder; they are skipped where there is no Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.ray.fleet import Fleet
from tests.serving.server.running_server import free_port

HAS_RAY = importlib.util.find_spec("ray") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="`make ray` installs what this needs")
    for item in items:
        if "tests/ray/" in item.nodeid and not HAS_RAY:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Ray Serve with nothing deployed."""
    # Else it writes a token of its own into the home of whoever runs the tests.
    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    # What a killed replica leaves behind lies there too.
    folder = tempfile.mkdtemp(prefix="tm-ray-")
    os.environ["TMPDIR"] = folder
    import ray
    from ray import serve

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=folder, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Fleet(port)
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
