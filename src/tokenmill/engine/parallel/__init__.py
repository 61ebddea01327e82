"""Run one model in several processes: ranks that each have a part of it and run every step together.

    shard       the part of a rank
    collective  combines what the ranks have computed; `shared_memory` is that of one machine
    model       the model of rank 0's runner: it posts each pass to the others (`messages`)
    follower    the loop of the other ranks: take a message, do their part, wait for the next one
    group       starts the ranks of an engine, lets them find each other, and ends them
    pipeline    stages that follow each other, each of several ranks

Only rank 0 schedules, samples and answers. The others know neither requests nor tokens' meaning, and keep nothing
between two passes but their weights and their part of the KV cache.
"""
