"""What `tools/recordings.py` consists of: checkpoints and scenarios, traffic, and step logs in a stable form."""
