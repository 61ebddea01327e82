"""Tool calls in a model's text: one small incremental parser for each notation.

A parser is fed text as it comes and gives events; how the text was cut makes no difference, and the work is linear in
its length. It never raises: what is no call after all comes back as content.
"""
