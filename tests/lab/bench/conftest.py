from tests.cli.conftest import tiny_model  # noqa: F401
