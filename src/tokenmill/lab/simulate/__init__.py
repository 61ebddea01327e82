"""Simulate engines on a clock of their own: a step log's arrivals under other policies, and exports of the log."""
