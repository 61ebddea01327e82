"""Texts of several pieces become one transcript, whatever order their deltas come in."""

from __future__ import annotations

import json
import random

from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.transcript import TranscriptWriter

TEXTS = ["<|en|> The mill stands ", "", " by the <river> ", "<|zh|>", "and turns"]
WHOLE = "The mill stands by the <river> and turns"


def output_of(text: str, is_last: bool) -> TextOutput:
    reason = FinishReason.STOP if is_last else None
    return TextOutput(id="", text=text, token_ids=[1], finish_reason=reason, num_prompt_tokens=10, num_cached_tokens=0)


def told(events: bytes) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in events.decode().split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_deltas_in_any_order_make_the_same_text() -> None:
    seed = random.randrange(1 << 30)
    for number in range(200):
        random_ = random.Random(f"{seed}/{number}")
        left = {index: [*text, ""] for index, text in enumerate(TEXTS)}
        writer, usage, text = TranscriptWriter(False, 30, " "), UsageCounter(1), ""
        while left:
            index = random_.choice(sorted(left))
            count = random_.randint(1, 6)
            taken, left[index] = left[index][:count], left[index][count:]
            output = output_of("".join(taken), not left[index])
            usage.add(index, output)
            if not left[index]:
                del left[index]
            for event in told(writer.events(index, output, usage)):
                text += str(event["delta"])
                assert WHOLE.startswith(text), f"seed {seed}/{number}"
        *deltas, done = told(writer.last_events(usage))
        assert text + "".join(str(one["delta"]) for one in deltas) == WHOLE == done["text"]
        assert done["usage"]["input_token_details"] == {"audio_tokens": 30, "text_tokens": 20}


def test_a_whole_reply_is_json_or_text() -> None:
    outputs = {index: output_of(text, True) for index, text in enumerate(TEXTS)}
    assert json.loads(TranscriptWriter(False, 0, " ").document(outputs, UsageCounter(1)))["text"] == WHOLE
    assert TranscriptWriter(True, 0, " ").document(outputs, UsageCounter(1)) == f"{WHOLE}\n".encode()
