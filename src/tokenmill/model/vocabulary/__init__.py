"""Vocabularies in mapped files: tokens, merges and flags as flat arrays that all processes share."""
