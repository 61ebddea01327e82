import pytest

from tests.checkpoints import make_checkpoint

NAMES = ("ant", "bee", "cat")


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """Three small models with weights of their own."""
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(NAMES):
        make_checkpoint(folder / name, "qwen3", seed=seed)
    return folder
