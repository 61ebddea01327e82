"""Parsers of tool calls in a model's text: one small incremental parser for each notation.

A parser takes text as it comes and returns events; how the text was cut makes no difference, and the work is linear in
its length. It never raises: text that turns out not to be a call comes back as content.
"""
