"""Texts of several pieces become one transcript, whatever order their deltas come in."""

from __future__ import annotations

import json
import random

from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.timed_transcript import TimedTranscriptWriter, Timing
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


def timed(form: str, seconds: list[float], *pieces: tuple[str, list[int]]) -> bytes:
    timing = Timing(
        form=form, task="transcribe", language="en", temperature=0.5, seconds=seconds, times_begin=TIMES_BEGIN
    )
    outputs = {}
    for index, (text, ids) in enumerate(pieces):
        logprobs = [TokenLogprobs(Logprob(token_id, -token_id / 10, 1), []) for token_id in ids]
        outputs[index] = TextOutput("", text, ids, 10, 0, FinishReason.STOP, logprobs=logprobs)
    return TimedTranscriptWriter(timing, 30, " ").document(outputs, UsageCounter(1))


TIMES_BEGIN = 100
PIECES = (
    # |0.00 (of the prompt)| The mill|1.50| |1.50| turns --> on|30.00, behind the end|
    (" The mill<|1.50|><|1.50|> turns -->\n\non<|30.00|>", [1, 2, 175, 175, 3, 4, 1600]),
    (" and <|en|>stands", [5, 6]),
)


def test_what_stands_between_two_marks_of_time_is_a_segment() -> None:
    told = json.loads(timed("verbose_json", [28.7, 4.02], *PIECES))
    assert told["text"] == "The mill turns -->\n\non and stands"
    assert (told["task"], told["language"], told["duration"]) == ("transcribe", "en", 32.72)
    assert told["usage"] == {"type": "duration", "seconds": 33}
    found = [(one["id"], one["seek"], one["start"], one["end"], one["tokens"]) for one in told["segments"]]
    assert found == [
        (0, 0, 0.0, 1.5, [1, 2]),
        (1, 0, 1.5, 28.7, [3, 4]),
        (2, 2870, 28.7, 32.72, [5, 6]),
    ]
    assert [round(one["avg_logprob"], 6) for one in told["segments"]] == [-0.15, -0.35, -0.55]
    assert {one["temperature"] for one in told["segments"]} == {0.5}


def test_captions_have_no_blank_lines_and_no_arrows_of_their_own() -> None:
    assert timed("srt", [28.7, 4.02], *PIECES).decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nThe mill\n\n"
        "2\n00:00:01,500 --> 00:00:28,700\nturns -> on\n\n"
        "3\n00:00:28,700 --> 00:00:32,720\nand stands\n"
    )
    late = timed("vtt", [3661.25, 1.0], ("", []), (" so", [7]))
    assert late.decode() == "WEBVTT\n\n01:01:01.250 --> 01:01:02.250\nso\n"
    assert timed("vtt", [1.0], ("", [])).decode() == "WEBVTT\n"
