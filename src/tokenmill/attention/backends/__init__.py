"""One file for each backend; `attention/registry.py` says what each needs and makes it."""
