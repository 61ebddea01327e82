"""Mini-SGLang's loop as a scheduler: prompts if there are any, else all decodes; no request is ever preempted.

    PYTHONPATH=examples tokenmill serve --scheduler-cls prefill_first:PrefillFirst

A request begins where its prompt and its longest output fit beside those of running ones. As there, prompts for one
token each that come for ever keep decodes waiting for ever. Run by itself, it answers two.
"""

from tokenmill import LLM, SamplingParams
from tokenmill.scheduling import PlanBuilder, Request, SimpleScheduler, StepPlan, most_tokens_held


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
        """Let a request begin, or return why it must wait: check, lock, and check again.

        Pages of the output are taken, not only counted: a page that a request fills may be in the cache already, and
        then both stay in use.
        """
        match, whole = self.match(plan, request), most_tokens_held(request)
        missing = self.kv.num_pages_for(whole) - len(match.pages)
        if missing > self.kv.num_available:
            return f"needs {missing} pages, and {self.kv.num_available} are free"
        # It locks the match, whose pages can then no longer be evicted for the rest, and checks again.
        return self.begin(plan, request, match, plan.budget, whole)


if __name__ == "__main__":
    llm = LLM(scheduler_cls="prefill_first:PrefillFirst")
    outputs = llm.generate(["Good morning!", "Who are you?"], SamplingParams(max_tokens=16, temperature=0.0))
    print(f"{len(outputs)} answers; the second: {outputs[1].outputs[0].text!r}")
