"""What a model computes with: a protocol, its torch form (the reference of every other) and faster ones."""
