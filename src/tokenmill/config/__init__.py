"""Configuration: what can be set, by which name, and which values go together. Reads no environment."""
