import random

import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tokenmill.config.configs import EngineConfig
from tokenmill.core.answer import AnswerPiece, PieceKind, joined
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    CallRules,
    GenerateText,
    PromptProgress,
    RequestRejected,
    StepOutputs,
    TextOutputs,
    TokenOutput,
)
from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import Decoded, DecodeTokens, Encoded, EncodeText
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.text_processor import TextProcessor

EOS = 2
MAX_MODEL_LEN = 64


def ready(**changes) -> EngineReady:
    fields = {
        "model": "m",
        "architecture": "Qwen3ForCausalLM",
        "num_parameters": 1,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
        "attention_reason": "",
        "kernels": "",
        "kernels_reason": "",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 420,
        "page_size": 16,
        "num_pages": 8,
        "kv_bytes": 1,
        "weight_bytes": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "threads_reason": "--num-threads",
        "seconds": {},
    }
    return EngineReady(**(fields | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(
        tmp_path_factory.mktemp("model"), byte_level_tokenizer(), generation_config={"eos_token_id": [EOS]}
    )


@pytest.fixture
def processor(folder) -> TextProcessor:
    processor = load_text_processor(folder, EngineConfig(), worker="worker-3")
    processor.process(ready())
    return processor


def start(processor, ids=("a",), **fields) -> list[AddRequest]:
    params = fields.pop("params", SamplingParams())
    if not {"token_ids", "messages"} & set(fields):
        fields.setdefault("text", "hello")
    routed = processor.process(GenerateText(ids=list(ids), params=params, **fields))
    assert routed.to_api == []
    return routed.to_engine


def rejection(processor, **fields) -> RequestRejected:
    params = fields.pop("params", SamplingParams())
    routed = processor.process(GenerateText(ids=["a", "b"], params=params, **fields))
    assert routed.to_engine == []
    assert processor.num_open == 0
    (reply,) = routed.to_api
    assert reply.ids == ["a", "b"]
    return reply


def step(processor, *outputs: TokenOutput):
    """Returns (text outputs, messages to the engine)."""
    routed = processor.process(StepOutputs(1, list(outputs)))
    return [o for message in routed.to_api for o in message.outputs], routed.to_engine


def feed(processor, text, finish=FinishReason.LENGTH):
    """Feed a text token by token; returns all outputs."""
    ids = processor.tokenizer.encode(text)
    outputs, to_engine = [], []
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        new_outputs, new_messages = step(processor, TokenOutput("a", [token_id], finish if last else None))
        outputs += new_outputs
        to_engine += new_messages
    return outputs, to_engine


def test_a_text_prompt_becomes_one_request_per_id(processor):
    requests = start(processor, ids=("a", "b"), text="hello world", cache_salt="s", priority=4)
    ids = processor.tokenizer.encode("hello world")
    assert [(r.id, r.prompt_token_ids, r.worker, r.cache_salt, r.priority) for r in requests] == [
        ("a", ids, "worker-3", "s", 4),
        ("b", ids, "worker-3", "s", 4),
    ]


def test_each_continuation_has_a_seed_of_its_own(processor):
    requests = start(processor, ids=("a", "b", "c"), params=SamplingParams(n=3, seed=2**63 - 2))
    assert [r.params.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [r.params.seed for r in start(processor, ids=("d", "e"))] == [None, None]


def test_a_chat_is_rendered_without_a_second_bos(processor):
    (request,) = start(processor, messages=[{"role": "user", "content": "hi"}])
    text = processor.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": ""}, "prompt", "empty"),
        ({"token_ids": []}, "prompt", "empty"),
        ({"token_ids": [5, 420]}, "prompt", "420 is outside the vocabulary"),
        ({"token_ids": [-1, 5]}, "prompt", "-1 is outside the vocabulary"),
        ({"token_ids": [5] * MAX_MODEL_LEN}, "prompt", "maximum context length is 64 tokens"),
        ({"text": "z" * 100_000}, "prompt", "100000 characters"),
        ({"text": "a", "params": SamplingParams(logit_bias={420: 1.0})}, "logit_bias", "420"),
        ({"text": "a", "params": SamplingParams(stop_token_ids=(9999,))}, "stop_token_ids", "9999"),
        ({"text": "a", "params": SamplingParams(stop=("x" * 5000,))}, "stop", "5000 characters"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "no images"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_rejected_naming_the_field(processor, fields, param, words):
    reply = rejection(processor, **fields)
    assert (reply.status, reply.param) == (400, param)
    assert words in reply.error


def test_a_prompt_that_leaves_room_for_one_token_is_accepted(processor):
    (request,) = start(processor, token_ids=[5] * (MAX_MODEL_LEN - 1), params=SamplingParams(max_tokens=1000))
    assert len(request.prompt_token_ids) == MAX_MODEL_LEN - 1


def test_an_unforeseen_error_ends_its_request_alone(processor, monkeypatch):
    start(processor)
    with monkeypatch.context() as patch:
        patch.setattr(processor.tokenizer, "encode", lambda *_, **__: 1 / 0)
        reply = processor.process(GenerateText(ids=["b"], params=SamplingParams(), text="boom")).to_api
    assert reply == [RequestRejected(ids=["b"], status=500, error="the request could not be handled")]
    outputs, _ = feed(processor, "still here")
    assert "".join(o.text for o in outputs) == "still here"


def test_deltas_concatenate_and_the_last_one_ends_the_request(processor):
    start(processor)
    outputs, to_engine = feed(processor, "héllo 👩‍👩‍👧 world")
    assert "".join(o.text for o in outputs) == "héllo 👩‍👩‍👧 world"
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    assert to_engine == []
    assert processor.num_open == 0


def test_a_stop_string_ends_the_request_here_and_in_the_engine(processor):
    start(processor, params=SamplingParams(stop=("lo wo",)))
    outputs, to_engine = feed(processor, "hello world and more")
    assert "".join(o.text for o in outputs) == "hel"
    assert [(o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason] == [(FinishReason.STOP, "lo wo")]
    assert to_engine == [AbortRequests(["a"])]


def test_a_stop_string_completed_by_the_last_token_needs_no_abort(processor):
    start(processor, params=SamplingParams(stop=("d",), include_stop_str_in_output=True))
    outputs, to_engine = feed(processor, "hello world")
    assert "".join(o.text for o in outputs) == "hello world"
    assert outputs[-1].stop_reason == "d"
    assert to_engine == []


def test_half_a_stop_string_is_shown_when_nothing_comes_of_it(processor):
    start(processor, params=SamplingParams(stop=("rld!",)))
    outputs, _ = feed(processor, "hello world")
    assert "".join(o.text for o in outputs) == "hello world"


def test_stop_strings_wait_for_min_tokens(processor):
    text = "abab"
    num_tokens = len(processor.tokenizer.encode(text))
    start(processor, params=SamplingParams(stop=("a",), min_tokens=num_tokens))
    outputs, _ = feed(processor, text)
    assert "".join(o.text for o in outputs) == text


def test_ending_on_eos_shows_no_text_and_no_stop_reason(processor):
    start(processor, params=SamplingParams(skip_special_tokens=False))
    (output,), _ = step(processor, TokenOutput("a", [50, EOS], FinishReason.STOP, EOS))
    assert (output.text, output.stop_reason) == (processor.tokenizer.decode([50]), None)
    assert output.token_ids == [50, EOS]


def test_a_stop_token_of_the_client_is_named(processor):
    start(processor, params=SamplingParams(stop_token_ids=(60,)))
    (output,), _ = step(processor, TokenOutput("a", [50, 60], FinishReason.STOP, 60))
    assert (output.text, output.stop_reason) == (processor.tokenizer.decode([50]), 60)


THOUGHT_AND_CALL = '<think>hm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> <tool'


def test_an_answer_leaves_taken_apart(processor):
    rules = CallRules("hermes", ["f"], is_required=False, is_parallel=True)
    tools = [{"type": "function", "function": {"name": "f"}}]
    start(processor, calls=rules, tools=tools, reasoning="qwen3")
    outputs, _ = feed(processor, THOUGHT_AND_CALL)
    assert {output.text for output in outputs} == {""}
    assert joined(piece for output in outputs for piece in output.answer) == [
        AnswerPiece(PieceKind.REASONING, "hm"),
        AnswerPiece(PieceKind.TEXT, "so"),
        AnswerPiece(PieceKind.CALL, '{"a": 1}', "f"),
        AnswerPiece(PieceKind.TEXT, " <tool"),
    ]
    assert outputs[-1].answer[-1].text.endswith("<tool"), "what was held back comes with the last one"
    num_marked = len(processor.tokenizer.encode("<think>hm</think>"))
    assert outputs[-1].num_reasoning_tokens == num_marked


def test_an_answer_that_nobody_takes_apart_is_text(processor):
    start(processor)
    outputs, _ = feed(processor, THOUGHT_AND_CALL)
    assert "".join(output.text for output in outputs) == THOUGHT_AND_CALL
    assert {(output.answer, output.num_reasoning_tokens) for output in outputs} == {(None, 0)}


def test_after_an_abort_nothing_more_is_sent(processor):
    start(processor, ids=("a", "b"))
    assert processor.process(AbortRequests(["a", "unknown"])).to_engine == [AbortRequests(["a", "unknown"])]
    outputs, _ = step(processor, TokenOutput("a", [50]), TokenOutput("b", [50]))
    assert [o.id for o in outputs] == ["b"]


def test_logprobs_come_with_the_bytes_of_their_tokens(processor):
    start(processor, params=SamplingParams(logprobs=1))
    logprobs = [TokenLogprobs(Logprob(50, -1.0, 2), [Logprob(51, -0.5, 1)])]
    (output,), _ = step(processor, TokenOutput("a", [50], logprobs=logprobs))
    assert output.token_bytes == {i: processor.tokenizer.token_bytes(i) for i in (50, 51)}


def test_texts_are_encoded_and_decoded_without_generating(processor):
    (encoded,) = processor.process(EncodeText(id="e", text="hello")).to_api
    assert isinstance(encoded, Encoded)
    assert processor.process(DecodeTokens("d", encoded.token_ids)).to_api == [Decoded("d", "hello")]
    (reply,) = processor.process(DecodeTokens("d", [10**6])).to_api
    assert (reply.status, reply.param) == (400, "tokens")


def test_every_request_gets_exactly_one_terminal_output(processor):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    params = SamplingParams(stop=("e", "th"))
    ids = [f"r{i}" for i in range(40)]
    for request_id in ids:
        start(processor, ids=(request_id,), params=params)
    terminal: list[str] = []
    aborted: set[str] = set()
    for _ in range(30):
        batch = rng.sample(ids, 20)
        outputs, _ = step(
            processor,
            *(
                TokenOutput(i, [rng.randrange(3, 400)], rng.choice([None, None, None, FinishReason.LENGTH]))
                for i in batch
            ),
        )
        terminal += [o.id for o in outputs if o.finish_reason]
        victim = rng.choice(ids)
        if victim not in terminal:
            aborted.add(victim)
        processor.process(AbortRequests([victim]))
    for request_id in ids:
        outputs, _ = step(processor, TokenOutput(request_id, [5], FinishReason.LENGTH))
        terminal += [o.id for o in outputs]
    assert sorted(terminal + list(aborted)) == sorted(ids), f"seed {seed}"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InvalidCheckpoint, match=r"has no tokenizer\.json"):
        load_text_processor(tmp_path, EngineConfig())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json is not a tokenizer"):
        load_text_processor(tmp_path, EngineConfig())


def test_outputs_are_sent_as_one_message_a_step(processor):
    start(processor, ids=("a", "b"))
    routed = processor.process(StepOutputs(1, [TokenOutput("a", [50]), TokenOutput("b", [51])]))
    assert [type(message) for message in routed.to_api] == [TextOutputs]


def test_the_progress_of_a_prompt_is_sent_before_its_first_token(processor):
    start(processor, ("a",))
    progress = TokenOutput("a", [], progress=PromptProgress(2, 0, 2, None))
    routed = processor.process(StepOutputs(1, [progress, TokenOutput("a", [50])]))
    first, second = routed.to_api[0].outputs
    assert first.progress is not None and not first.token_ids
    assert second.progress is None and second.token_ids == [50]


def test_first_tokens_are_sent_before_those_of_others(processor):
    start(processor, ids=("a", "b", "c"))
    step(processor, TokenOutput("b", [50]))
    outputs, _ = step(processor, *(TokenOutput(one, [51]) for one in ("b", "a", "c")))
    assert [output.id for output in outputs] == ["a", "c", "b"]
