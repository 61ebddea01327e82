"""Mini-SGLang's loop as a scheduler: prompts if there are any, else all decodes; no request is ever preempted.

    PYTHONPATH=examples tokenmill serve --scheduler-cls prefill_first:PrefillFirst

A request begins where its prompt, its longest output and what running ones may still take fit into the free pages. As
there, prompts for one token each that come for ever keep decodes waiting for ever. Run by itself, it answers two.
"""

from tokenmill import LLM, SamplingParams
from tokenmill.scheduling import PlanBuilder, PrefixMatch, Request, SimpleScheduler, StepPlan, most_tokens_held


class PrefillFirst(SimpleScheduler):
    """Admit until something does not fit; the prompt that the budget cuts goes on first in the next step."""

    def schedule(self) -> StepPlan | None:
        """Plan a step of prompts; if there are none, a step of decodes."""
        plan = self.begin_step()
        self.prefill(plan)
        if not plan.requests:
            for request in self.state.running:
                request.wait_reason = self.advance(plan, request, 1)
        return self.launch(plan)

    def prefill(self, plan: PlanBuilder) -> None:
        """Run the prompt that was cut, then new ones in order, up to the first that does not fit."""
        for request in self.state.running:
            if self.num_left(request) > 1 or request.num_computed_tokens < request.num_prompt_tokens:
                request.wait_reason = self.advance(plan, request, plan.budget)
        for request in self.candidates():
            request.wait_reason = self.admit(plan, request)
            if request.wait_reason:
                return

    def admit(self, plan: PlanBuilder, request: Request) -> str:
        """Let a request begin, or return why it must wait: check, lock, and check again."""
        match = self.match(plan, request)
        if not self.fits(request, match):
            return "needs more pages than running requests leave"
        self.kv.cache.lock(match.node)  # its pages can no longer be evicted for others
        fits = self.fits(request, match)
        self.kv.cache.unlock(match.node, plan.step)
        if not fits:
            return "needs pages that its own prefix in the cache takes"
        return self.begin(plan, request, match, plan.budget, request.num_tokens)

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        """Return True if a request leaves running ones the pages of their longest outputs."""
        reserved = sum(self.kv.num_missing_pages(one, most_tokens_held(one)) for one in self.state.running)
        own = self.kv.num_pages_for(most_tokens_held(request)) - len(match.pages)
        return own + reserved <= self.kv.num_available


if __name__ == "__main__":
    llm = LLM(scheduler_cls="prefill_first:PrefillFirst")
    for output in llm.generate(["Good morning!", "Who are you?"], SamplingParams(max_tokens=16, temperature=0.0)):
        print(output.outputs[0].text)
