"""The parts of `tools/recordings.py`: checkpoints and scenarios, traffic, and step logs in a stable form."""
