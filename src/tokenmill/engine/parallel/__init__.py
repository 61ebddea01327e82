"""One model, several processes: ranks that each have a part of it and run every step together.

    shard       which part a rank has
    collective  how ranks put together what each has computed; `shared_memory` is that of one machine
    model       what rank 0 gives its runner as the model: it posts each pass to the others (`messages`)
    follower    what the other ranks do: take a message, do their part, wait for the next one
    group       the ranks of an engine: who starts them, how they find each other, how they end
    pipeline    stages that follow each other, each of several ranks

Only rank 0 schedules, samples and answers. The others know neither requests nor tokens' meaning, and keep nothing
between two passes but their weights and their part of the KV cache.
"""
