from tests.cli.conftest import tiny_model  # noqa: F401
from tests.seeding import rng  # noqa: F401
