import pytest

from tests.serving.batches.desk import Desk
from tokenmill.serving.batches import runner as module


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.005)
    monkeypatch.setattr(module, "GATE_SECONDS", 0.002)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return Desk(tmp_path / "batches")
