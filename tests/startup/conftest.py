from tests.seeding import rng  # noqa: F401
