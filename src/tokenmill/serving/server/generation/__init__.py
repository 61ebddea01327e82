"""The parts that all generating APIs share: the call a body asks for, the reply, its usage and content blocks."""
