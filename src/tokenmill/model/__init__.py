"""The model: from token ids to logits, and from logits to drawn tokens."""
