from tests.seeding import rng  # noqa: F401 - a fixture
