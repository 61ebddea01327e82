"""`--speculative-config`: vLLM's names, our sentences for what is not there."""

from __future__ import annotations

import pytest

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculativeConfig, parse_config, settled
from tokenmill.core.errors import InvalidConfig
from tokenmill.llm.arguments import engine_config


def test_vllms_names_are_taken() -> None:
    config = parse_config(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    )
    assert config == SpeculativeConfig("ngram", 5, prompt_lookup_min=3, prompt_lookup_max=4)
    assert parse_config('{"method": "[ngram]"}') == parse_config("ngram") == parse_config("NGRAM")
    for one in ("", ', "draft_tensor_parallel_size": 1'):
        drafting = parse_config(f'{{"model": "some/draft", "num_speculative_tokens": 3{one}}}')
        assert drafting == SpeculativeConfig("draft_model", 3, "some/draft")
    assert [parse_config(text) for text in (None, "{}", "null", "None", "")] == [None] * 5


def test_a_dictionary_does_for_llm() -> None:
    options = engine_config("", {"speculative_config": {"method": "suffix"}})
    assert parse_config(options.speculative_config) == SpeculativeConfig("suffix")


def test_auto_is_suffix_on_a_cpu_and_nothing_elsewhere() -> None:
    auto = parse_config("auto")
    assert settled(auto, is_accelerator=True) is None
    chosen = settled(auto, is_accelerator=False)
    assert chosen is not None
    assert (chosen.method, chosen.most_tokens) == ("suffix", 24)
    assert settled(None, is_accelerator=False) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eagle3", "the methods draft_model and eagle3 need a model"),
        ("medusa", "no drafter medusa"),
        ('{"method": "mlp_speculator"}', "no drafter mlp_speculator; of heads that .* EAGLE-3 and MTP are supported"),
        ('{"method": "mtp", "model": "x"}', "other methods take none"),
        ('{"method": "suffix", "eagle_aux_hidden_state_layer_ids": [2]}', "is for the method eagle3"),
        ('{"model": "x", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size must be 1"),
        ("magic", "Invalid enum value 'magic'"),
        ('{"method": "ngram", "tokens": 4}', "unknown field `tokens`"),
        ('{"method": "ngram"', "Input data was truncated"),
        ("[1]", "Expected `object`"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens must be 0 .* to 32"),
        ('{"method": "ngram", "num_speculative_tokens": -1}', "num_speculative_tokens must be 0 .* to 32"),
        ('{"method": "ngram", "prompt_lookup_min": 6}', "prompt_lookup_min and prompt_lookup_max"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 5}', "suffix_decoding_max_tree_depth must be 6"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1000000000}', "suffix_decoding_max_tree_depth"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 1e300}', "suffix_decoding_max_spec_factor above 0"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 0}', "suffix_decoding_max_spec_factor above 0"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}', "suffix_decoding_min_token_prob"),
        ('{"method": "draft_model"}', "the methods draft_model and eagle3 need a model"),
        ('{"method": "suffix", "model": "x"}', "the methods draft_model and eagle3 need a model"),
    ],
)
def test_what_is_not_there_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--speculative-config: .*{said}"):
        EngineConfig(speculative_config=text).resolve()
