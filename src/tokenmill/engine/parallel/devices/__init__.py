"""Ranks that have a device each: their messages go from device to device.

One rank schedules. All run its plans, each over tables of its own; rank 0 alone samples, and shares the tokens. Of
several stages each hands hidden states on to the next one, and the last one's outputs go back to the first (`ring`).
"""
