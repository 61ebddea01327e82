"""Attention backends, one file each; `model/attention/registry.py` lists their requirements and makes them."""
