"""The operations that a model computes with: a protocol, its torch reference, and faster implementations."""
