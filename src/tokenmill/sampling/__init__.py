"""Batched sampling: from the logits of a step to one token per request that samples.

`table` keeps the parameters of every row, `batch` is what one step needs of them, `sampler` applies it, and the other
modules do one part each: `random` the uniform draws, `penalties`, `candidates` the exact largest logits without a sort,
`draw` and `wide` the draws, `logprobs` the reports. A row's token depends on its logits, its parameters, its own tokens
and its (seed, position), never on the other rows of the batch.
"""
