"""A scheduling policy that is not ours: short prompts first, and nobody waits for ever.

    PYTHONPATH=examples tokenmill serve --scheduling-policy shortest_first:ShortestFirst

Run by itself, it answers a long prompt and three short ones, one at a time, and prints the order in which they end.
"""

from tokenmill import LLM, SamplingParams
from tokenmill.plugins import QueuePolicy, Request


class ShortestFirst(QueuePolicy):
    """64 tokens more to read count as much as having come 8 requests later: no prompt is overtaken for ever."""

    def rank(self, request: Request) -> int:
        """The lowest is served first."""
        return request.num_prompt_tokens // 64 + request.arrival // 8


if __name__ == "__main__":
    llm = LLM(scheduling_policy="shortest_first:ShortestFirst", max_num_seqs=1)
    prompts = ["Count the sacks of flour in the mill. " * 20, "Good morning!", "Who are you?", "Thank you."]
    outputs = [llm.submit(prompt, SamplingParams(max_tokens=8)) for prompt in prompts]
    ended: list[int] = []
    while len(ended) < len(outputs):
        llm.step()
        ended += [number for number, output in enumerate(outputs) if output.finished and number not in ended]
    print("the long prompt came first and ended last:", ended)
