"""Batched sampling: from the logits of a step to one token per row that samples.

`draws` describes how a row comes to its token; `reference` (torch), `triton_draw` and `native/isa/draw.cpp` read that
description. `state` keeps the parameters of every row and selects what one step needs of them; `sampler` applies it:
`processors` and `bitmask` change logits, then the draw, then `logprobs`. `grammar_rows` has the masks of grammars. A
row's token depends on its logits, its parameters, its own tokens and its (seed, position), never on the other rows of
the batch.
"""
