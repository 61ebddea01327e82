"""Grammars that outputs must match: compiled by llguidance under limits, kept in a cache bounded in bytes.

Knows no torch and no sockets. How a grammar is put together from a client's fields is the frontend's part
(`serving/frontend/grammar_builder.py`); how its masks reach the logits is `model/sampling/grammar_rows.py`.
"""
