"""A round robin over tokens: a step's budget is dealt out token by token, and the next step goes on where it ended.

    PYTHONPATH=examples tokenmill serve --scheduler-cls round_robin:RoundRobin

A request begins where its prompt and its longest output fit, and keeps these pages. Run by itself, it prints how a long
prompt and a short one share the first steps.
"""

from collections import Counter

from tokenmill import LLM, SamplingParams
from tokenmill.scheduling import PlanBuilder, Request, SimpleScheduler, StepPlan, most_tokens_held


class RoundRobin(SimpleScheduler):
    """Every request gets as many tokens of a step as every other, until it has all that it can run."""

    last = -1  # the arrival of the request that got the last token

    def schedule(self) -> StepPlan | None:
        """Deal out the budget to running requests and to those that can begin."""
        plan = self.begin_step()
        players = [*self.state.running, *self.newcomers()]
        players.sort(key=lambda request: (request.arrival <= self.last, request.arrival))
        shares = self.deal({request.arrival: self.num_left(request) for request in players}, plan.budget)
        for request in players:
            request.wait_reason = self.run(plan, request, shares[request.arrival])
        return self.launch(plan)

    def newcomers(self) -> list[Request]:
        """Return the candidates, in order, up to the first that finds no row or not the pages of its longest output."""
        found, num_free = [], self.kv.num_available
        for request in self.candidates()[: self.state.num_free_rows]:
            num_free -= self.kv.num_pages_for(most_tokens_held(request))
            if num_free < 0:
                request.wait_reason = "needs more pages than are free"
                break
            found.append(request)
        return found

    def deal(self, left: dict[int, int], budget: int) -> Counter[int]:
        """Return the tokens that each request gets, by its arrival, of those that are left for it to run."""
        shares = Counter[int]()
        while budget and (players := [number for number, count in left.items() if shares[number] < count][:budget]):
            shares.update(players)
            budget -= len(players)
            self.last = players[-1]
        return shares

    def run(self, plan: PlanBuilder, request: Request, share: int) -> str:
        """Let a request run its share, or return why it cannot."""
        if not share:
            return "its turn comes in the next step"
        if request.is_running:
            return self.advance(plan, request, share)
        return self.begin(plan, request, self.match(plan, request), share, most_tokens_held(request))


if __name__ == "__main__":
    llm = LLM(scheduler_cls="round_robin:RoundRobin", max_num_batched_tokens=32, max_num_seqs=8)
    outputs = [llm.submit(prompt, SamplingParams(max_tokens=8)) for prompt in ("A mill and its sacks. " * 40, "Hi")]
    ended: list[int] = []
    while len(ended) < len(outputs):
        llm.step()
        ended += [number for number, output in enumerate(outputs) if output.finished and number not in ended]
    print("the long prompt came first; in this order they ended:", ended)
