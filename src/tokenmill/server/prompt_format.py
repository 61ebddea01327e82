"""How replies spell what they tell of a prompt: its token ids and its log probabilities, with vLLM's names."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.messages import TextOutput
from tokenmill.server.fields import GenerationFields
from tokenmill.server.reply_format import finite, spell


class PromptLogprob(msgspec.Struct):
    """One token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt: token id -> what is known of it; nothing is known of the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields of a reply that tell of its prompt; those that were not asked for are absent."""

    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class PromptShown(msgspec.Struct, frozen=True):
    """Which of them a client asked for."""

    logprobs: bool
    token_ids: bool

    @classmethod
    def of(cls, body: GenerationFields) -> PromptShown:
        """Read it from a request's fields."""
        return cls(body.prompt_logprobs is not None, bool(body.return_token_ids))

    def fields(self, output: TextOutput) -> PromptFields:
        """What an output tells; nothing if it does not carry the prompt."""
        prompt = output.prompt
        if prompt is None:
            return PromptFields()
        return PromptFields(
            prompt_logprobs=_logprobs(output) if self.logprobs else UNSET,
            prompt_token_ids=prompt.token_ids if self.token_ids else UNSET,
        )


def _logprobs(output: TextOutput) -> PromptLogprobs:
    assert output.prompt is not None, "only outputs with a prompt are spelled"
    told: PromptLogprobs = [None]
    for position in output.prompt.logprobs or ():
        # Of a token that is both, the entry of the token that stands there comes first.
        told.append(
            {
                entry.token_id: PromptLogprob(
                    finite(entry.logprob), entry.rank, spell(output, entry.token_id).decode("utf-8", "replace")
                )
                for entry in (position.sampled, *position.top)
            }
        )
    return told
