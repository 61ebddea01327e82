"""One file for each backend; `model/attention/registry.py` says what each needs and makes it."""
