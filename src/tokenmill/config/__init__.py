"""Configuration: the settings, their names, and the values that go together. Reads no environment."""
