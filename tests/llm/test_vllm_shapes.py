"""Programs as vLLM's documentation writes them: here only their imports are others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import load_oracle, make_checkpoint
from tokenmill import LLM, BeamSearchParams, SamplingParams
from tokenmill import StructuredOutputs as StructuredOutputsParams
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.llm.metrics import Counter, Gauge, Histogram

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the mill."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        model=str(folder),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=256,
        tensor_parallel_size=1,
        trust_remote_code=False,
        swap_space=4,
        block_size=16,
        quantization=None,
        seed=0,
        disable_log_stats=False,
        enable_sleep_mode=True,
    ) as engine:
        yield engine


def test_offline_batched_inference(llm):
    prompts = ["Hello, my name is", "The president of the mill is", "The capital of the mill is", "The future is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)

    outputs = llm.generate(prompts, sampling_params)

    for output, sent in zip(outputs, prompts, strict=True):
        prompt = output.prompt
        generated_text = output.outputs[0].text
        assert (prompt, output.finished) == (sent, True)
        assert isinstance(generated_text, str)
        assert len(output.outputs[0].token_ids) <= 16


def test_one_prompt_with_the_parameters_that_the_model_recommends(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
    (output,) = llm.generate("Hello, my name is", use_tqdm=False)
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_prompts_in_every_form(llm, rng):
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    ids = rng.integers(3, 300, 9).tolist()
    text = llm.get_tokenizer().decode(ids)
    forms = [text, {"prompt": text}, llm.get_tokenizer().encode(text), {"prompt_token_ids": ids}, ids]
    forms.append({"prompt_token_ids": ids, "prompt": "what they came from"})
    outputs = llm.generate(forms, greedy, use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, text, None, None, None, "what they came from"]
    found = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4] == found[5]
    alone = llm.generate({"prompt_token_ids": ids}, sampling_params=greedy, use_tqdm=False)
    assert alone[0].outputs[0].token_ids == found[3][1]


def test_each_prompt_has_its_own_parameters_and_stops(llm):
    params = [SamplingParams(max_tokens=n, min_tokens=n, temperature=0.0, stop=["zzzz"]) for n in (3, 5)]
    assert [len(one.outputs[0].token_ids) for one in llm.generate(["a", "b"], params, use_tqdm=False)] == [3, 5]
    (free,) = llm.generate("b", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    end = free.outputs[0].text[4:6]
    (cut,) = llm.generate("b", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=end), False)
    assert cut.outputs[0].text == free.outputs[0].text[: free.outputs[0].text.index(end)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", end)


def test_chat(llm, folder):
    sampling_params = SamplingParams(temperature=0.5, max_tokens=8, seed=1)
    outputs = llm.chat(CONVERSATION, sampling_params=sampling_params, use_tqdm=False)
    rendered = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    for output in outputs:
        assert output.prompt == rendered
        assert 0 < len(output.outputs[0].token_ids) <= 8, "the parameters count"
    conversations = [CONVERSATION for _ in range(3)]
    again = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True, lora_request=None)
    assert [one.outputs[0].token_ids for one in again] == [outputs[0].outputs[0].token_ids] * 3


def test_chat_with_a_final_message_to_go_on_with(llm):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    begun = [*CONVERSATION, {"role": "assistant", "content": "The mill"}]
    (open_end,) = llm.chat(begun, params, False, add_generation_prompt=False, continue_final_message=True)
    assert open_end.prompt.endswith("assistant\nThe mill")
    (no_answer,) = llm.chat(CONVERSATION, params, False, add_generation_prompt=False)
    assert no_answer.prompt.endswith("mill.<|im_end|>\n")


def test_tools_and_variables_reach_the_template(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}{{ mood }}{{ messages[0]['content'] }}"
    )
    tools = [{"type": "function", "function": {"name": "get_current_weather", "parameters": {}}}]
    with LLM(folder, dtype="float32", max_num_seqs=2, num_pages=64) as llm:
        chat = {"tools": tools, "chat_template_kwargs": {"mood": "glad "}}
        (output,) = llm.chat(CONVERSATION[1:], SamplingParams(max_tokens=1), False, **chat)
        assert output.prompt == "get_current_weather;glad Hello"
        ends = [delta.finish_reason for delta in llm.stream(CONVERSATION[1:], SamplingParams(max_tokens=1), **chat)]
        assert ends[-1] is not None
        assert llm.get_tokenizer().apply_chat_template(CONVERSATION[1:], tools, tokenize=False, mood="") == (
            "get_current_weather;Hello"
        )


def test_logprobs(llm, folder, rng):
    ids = rng.integers(3, 300, 12).tolist()
    sampling_params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids}, sampling_params, use_tqdm=False)
    continuation = output.outputs[0]
    whole = ids + list(continuation.token_ids)
    with torch.inference_mode():
        expected = load_oracle(folder)(torch.tensor([whole])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    positions = [*output.prompt_logprobs[1:], *continuation.logprobs]
    tokenizer = llm.get_tokenizer()
    for i, at in enumerate(positions):
        for token_id, logprob in at.items():
            assert logprob.logprob == pytest.approx(float(expected[i, token_id]), abs=2e-3)
            assert logprob.rank == int((expected[i] > expected[i, token_id]).sum()) + 1
            assert logprob.decoded_token == tokenizer.decode([token_id])
    chosen = [at[token].logprob for token, at in zip(continuation.token_ids, continuation.logprobs, strict=True)]
    assert continuation.cumulative_logprob == pytest.approx(sum(chosen))


def test_metrics_of_a_request(llm):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True, n=2), use_tqdm=False)
    metrics = output.metrics
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert (metrics.num_generation_tokens, output.request_id) == (10, output.request_ids[0])


def test_structured_outputs(llm):
    structured_outputs_params = StructuredOutputsParams(choice=["Positive", "Negative"])
    sampling_params = SamplingParams(structured_outputs=structured_outputs_params)
    outputs = llm.generate(prompts="Classify this sentiment: the mill is wonderful!", sampling_params=sampling_params)
    assert outputs[0].outputs[0].text in ("Positive", "Negative")


def test_embed(llm, rng):
    (output,) = llm.embed("Hello, my name is")
    embeds = output.outputs.embedding
    assert len(embeds) == 32
    assert math.hypot(*embeds) == pytest.approx(1.0, abs=1e-4)
    ids = rng.integers(3, 300, 7).tolist()
    mean, last = (llm.embed([ids], pooling=how, use_tqdm=False)[0] for how in ("mean", "last"))
    assert mean.prompt_token_ids == ids
    assert mean.outputs.embedding != last.outputs.embedding


def test_score_is_the_likelihood_of_a_prompt(llm, folder, rng):
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 9, 40)]
    scores = [output.outputs.score for output in llm.score(prompts, use_tqdm=False)]
    oracle = load_oracle(folder)
    for ids, score in zip(prompts, scores, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert score == pytest.approx(sum(float(expected[i, token]) for i, token in enumerate(ids[1:])), abs=1e-2)


def test_beam_search_finds_what_transformers_finds(llm, folder, rng):
    ids = rng.integers(3, 300, 11).tolist()
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True, length_penalty=0.0)
    (output,) = llm.beam_search([{"prompt_token_ids": ids}], params)
    oracle = load_oracle(folder)
    oracle.generation_config = transformers.GenerationConfig(
        num_beams=4, num_return_sequences=4, max_new_tokens=6, length_penalty=0.0, eos_token_id=None, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True, do_sample=False,
    )  # fmt: skip
    expected = oracle.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    np.testing.assert_allclose(
        [sequence.cum_logprob for sequence in output.sequences], expected.sequences_scores.numpy(), atol=5e-3
    )
    assert output.sequences[0].tokens == expected.sequences[0].tolist()
    assert output.sequences[0].text == llm.get_tokenizer().decode(output.sequences[0].tokens, skip_special_tokens=True)
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_a_beam_ends_at_eos_and_at_the_end_of_the_context(llm):
    wide = BeamSearchParams(beam_width=10, max_tokens=12, length_penalty=0.0)
    prompts = ["Hello, my name is", {"prompt": "The mill"}]
    ends = [sequence for output in llm.beam_search(prompts, wide) for sequence in output.sequences]
    assert len(ends) == 20
    eos = llm._local.engine.limits.eos_token_ids
    for sequence in ends:
        assert (sequence.stop_reason in eos) == (sequence.finish_reason == "stop")
        assert sequence.tokens[-1] not in eos
        assert len(sequence.logprobs) <= 12
    (output,) = llm.beam_search([[5] * 254], BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in output.sequences] == [256, 256]
    with pytest.raises(InvalidRequest, match="beam_width from 1 to 10"):
        BeamSearchParams(beam_width=11, max_tokens=3)


def test_the_tokenizer_is_the_one_of_transformers(llm, folder):
    own, theirs = llm.get_tokenizer(), transformers.AutoTokenizer.from_pretrained(folder)
    text = "the old mill, 12 sacks <|im_end|>"
    assert own.encode(text) == theirs.encode(text)
    assert own.decode(own.encode(text)) == theirs.decode(theirs.encode(text))
    assert len(own) == len(theirs)
    texts = own.apply_chat_template([CONVERSATION, CONVERSATION[:2]], tokenize=False, add_generation_prompt=True)
    assert texts == theirs.apply_chat_template(
        [CONVERSATION, CONVERSATION[:2]], tokenize=False, add_generation_prompt=True
    )
    assert own.apply_chat_template(CONVERSATION) == own.encode(own.apply_chat_template(CONVERSATION, tokenize=False))


def test_metrics(llm):
    llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    found = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge | Counter):
            found[metric.name] = metric.value
        elif isinstance(metric, Histogram):
            found[metric.name] = metric.count
            assert list(metric.buckets.values()) == sorted(metric.buckets.values())
            assert metric.buckets["+Inf"] == metric.count
    stats = llm.stats()
    assert found["tokenmill:generation_tokens"] == stats.generation_tokens > 0
    assert found["tokenmill:num_requests_running"] == 0
    assert found["tokenmill:step_seconds"] > 0
    assert any(metric.name == "vllm:generation_tokens" for metric in llm.get_metrics(prefix="vllm"))


def test_reset_prefix_cache(llm, rng):
    ids = rng.integers(3, 300, 80).tolist()
    params = SamplingParams(max_tokens=1)
    cached = [llm.generate([ids], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[1] == 64
    assert llm.reset_prefix_cache() is True
    assert llm.generate([ids], params, use_tqdm=False)[0].num_cached_tokens == 0
    open_one = llm.submit(ids, SamplingParams(max_tokens=20, ignore_eos=True))
    llm.step()
    assert llm.reset_prefix_cache() is False
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    while not open_one.finished:
        llm.step()


def test_priority(folder):
    with LLM(folder, dtype="float32", max_num_seqs=1, max_model_len=128, scheduling_policy="priority") as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        results = llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[2, 1, 0])
        assert [result.metrics.first_token_ts for result in results] == sorted(
            (result.metrics.first_token_ts for result in results), reverse=True
        )
        with pytest.raises(InvalidRequest, match="3 prompts, but 2 priority"):
            llm.generate(["a", "b", "c"], params, priority=[2, 1])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda llm: llm.chat(CONVERSATION, sampling_parms=None), TypeError, "did you mean sampling_params"),
        (lambda llm: llm.generate("x", use_tqmd=False), TypeError, "did you mean use_tqdm"),
        (lambda llm: llm.stream("x", chat_template_kwarg={}), TypeError, "did you mean chat_template_kwargs"),
        (lambda llm: llm.embed("x", temperature=1), TypeError, "no argument 'temperature'"),
        (lambda llm: llm.generate("x", lora_request=object()), InvalidRequest, "not a LoRARequest, but object"),
        (lambda llm: llm.chat(CONVERSATION, chat_template="x"), TypeError, "chat_template='x' is not supported"),
        (lambda llm: llm.chat("Hello"), InvalidRequest, "a list of messages"),
        (lambda llm: llm.generate(CONVERSATION), InvalidRequest, "conversations are for chat"),
        (lambda llm: llm.generate({"promt": "x"}), InvalidRequest, "'prompt_token_ids': ids"),
        (lambda llm: llm.generate("x", {"temperature": 0}), InvalidRequest, "not SamplingParams, but dict"),
        (lambda llm: llm.generate("x", priority=3), InvalidRequest, "scheduling_policy"),
        (lambda llm: list(llm.stream("x", tools=[{}])), InvalidRequest, "tools: only conversations"),
        (lambda llm: llm.score("a", "b"), InvalidRequest, "log-likelihood"),
        (lambda llm: llm.embed("a", pooling="first"), InvalidRequest, "mean or last"),
        (lambda llm: llm.wake_up(tags=["kv"]), InvalidRequest, "kv_cache, weights"),
        (lambda llm: llm.sleep(level=3), InvalidRequest, "level must be 1 or 2"),
        (lambda llm: LLM(max_model_length=3), InvalidConfig, "did you mean max_model_len"),
        (lambda llm: LLM(disable_prefix_caching=True), InvalidConfig, "no option 'disable_prefix_caching'$"),
        (
            lambda llm: LLM(max_logprobs=2),
            InvalidConfig,
            "max_logprobs=2 is not supported",
        ),
        (lambda llm: LLM(dtype="float17"), InvalidConfig, "must be one of auto, bfloat16"),
        (lambda llm: SamplingParams(max_new_tokens=3), TypeError, "did you mean max_tokens"),
        (lambda llm: SamplingParams(use_beam_search=True), TypeError, "use_beam_search=True is not supported"),
        (lambda llm: SamplingParams(stop=3), InvalidRequest, "stop must be a list"),
        (
            lambda llm: SamplingParams(structured_outputs={"jsn": {}}),
            InvalidRequest,
            "no field 'jsn'; did you mean json",
        ),
        (
            lambda llm: SamplingParams(structured_outputs={"choice": "a"}),
            InvalidRequest,
            "^structured_outputs: Expected",
        ),
        (lambda llm: SamplingParams(structured_outputs={}), InvalidRequest, "^structured_outputs: exactly one of"),
        (lambda llm: SamplingParams(structured_outputs="json"), InvalidRequest, "or a dict, got str"),
    ],
)
def test_nothing_is_ignored(llm, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(llm)


def test_what_asks_for_nothing_is_taken():
    params = SamplingParams(n=1, best_of=None, use_beam_search=False, detokenize=True, stop=None, stop_token_ids=[7])
    assert params == SamplingParams(stop_token_ids=(7,))
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"]) == SamplingParams(stop=("x",))


def test_a_form_may_be_a_dict(llm):
    params = SamplingParams(structured_outputs={"choice": ["aye", "nay"]}, temperature=0.0)
    assert llm.generate("x", params)[0].outputs[0].text in ("aye", "nay")
