"""Stages: a model's layers shared out over groups of ranks that follow each other, on one machine or several.

link   a connection between two stages: messages, and the hidden states behind them
chain  lets stages find each other, agree, and hand on what they have computed
node   a machine that runs ranks of another's engine
"""
