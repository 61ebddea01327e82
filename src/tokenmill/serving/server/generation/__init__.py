"""What all APIs that generate share: the call that a body asks for, the reply, its usage and content blocks."""
