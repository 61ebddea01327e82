from pathlib import Path

import pytest

from tests.serving.frontend import template_shapes as shapes
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, word_tokenizer, wrapped
from tokenmill.config.configs import EngineConfig
from tokenmill.config.server_settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from tokenmill.core.text_queries import FindParsers, ParsersFound
from tokenmill.demo import demo_model_path
from tokenmill.serving.frontend import parser_finder
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.parser_finder import ParserFinder
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.text_processor import TextProcessor

ROOT = Path(__file__).parents[3]
HERMES = ["<tool_call>", "</tool_call>"]
THINK = ["<think>", "</think>"]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
GEMMA_4 = ["<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"]
PHI = ["<|tool_call|>", "<|/tool_call|>"]
LFM2 = ["<|tool_call_start|>", "<|tool_call_end|>"]

# Of each family in docs/models.md: its shape, the marks in its vocabulary, and what is found.
FAMILIES = {
    "Qwen3": ("Qwen3ForCausalLM", shapes.chatml(shapes.HERMES, shapes.THOUGHT), HERMES + THINK, "hermes", "qwen3"),
    "Qwen3, instruct": ("Qwen3ForCausalLM", shapes.chatml(shapes.HERMES), HERMES + THINK, "hermes", ""),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", shapes.chatml(shapes.HERMES, shapes.THOUGHT), HERMES, "hermes", "qwen3"),
    "Qwen3-Coder": ("Qwen3MoeForCausalLM", shapes.chatml(shapes.QWEN_CODER), HERMES, "qwen3_coder", ""),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", shapes.chatml(shapes.HERMES), HERMES, "hermes", ""),
    "Qwen3-VL-MoE": ("Qwen3VLMoeForConditionalGeneration", shapes.chatml(), HERMES, "hermes", ""),
    "Qwen2-Audio": ("Qwen2AudioForConditionalGeneration", shapes.chatml(), [], "", ""),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration", shapes.chatml(), HERMES, "hermes", ""),
    "Qwen2.5": ("Qwen2ForCausalLM", shapes.chatml(shapes.HERMES, shown=shapes.QWEN_TEXT), HERMES, "hermes", ""),
    "QwQ": ("Qwen2ForCausalLM", shapes.chatml(shapes.HERMES, prompt="<think>\n"), HERMES, "hermes", "qwen3"),
    "Llama 3": ("LlamaForCausalLM", shapes.LLAMA, [], "llama3_json", ""),
    "Llama 3, tuned as Hermes": ("LlamaForCausalLM", shapes.chatml(shapes.HERMES), [], "hermes", ""),
    "Llama, pythonic": (
        "LlamaForCausalLM",
        shapes.chatml("[{{ call.name }}(city={{ call.arguments.city | tojson }})]"),
        [],
        "pythonic",
        "",
    ),
    "Mistral": ("MistralForCausalLM", shapes.MISTRAL, ["[TOOL_CALLS]"], "mistral", ""),
    "Mistral, new": ("MistralForCausalLM", shapes.NEW_MISTRAL, ["[TOOL_CALLS]", "[ARGS]"], "mistral", ""),
    "SmolLM3": ("SmolLM3ForCausalLM", shapes.chatml(prompt=shapes.CLOSED), HERMES + THINK, "hermes", "qwen3"),
    "Granite": ("GraniteForCausalLM", shapes.GRANITE, ["<|tool_call|>"], "granite", "granite"),
    "Granite 4": ("GraniteForCausalLM", shapes.chatml(shapes.HERMES), [*HERMES, "<|tool_call|>"], "hermes", ""),
    "Granite 4, hybrid": ("GraniteMoeHybridForCausalLM", shapes.chatml(), HERMES, "hermes", ""),
    "gpt-oss": ("GptOssForCausalLM", shapes.HARMONY, HARMONY, "openai", "openai_gptoss"),
    "Phi-3": ("Phi3ForCausalLM", shapes.PHI, [], "", ""),
    "Phi-4-mini": ("Phi3ForCausalLM", shapes.PHI, PHI, "phi4_mini_json", ""),
    "Gemma 3": ("Gemma3ForCausalLM", shapes.GEMMA, [], "", ""),
    "Gemma 3, 4B": ("Gemma3ForConditionalGeneration", shapes.GEMMA, [], "", ""),
    "Gemma 4": ("Gemma4ForCausalLM", shapes.GEMMA_4, GEMMA_4, "gemma4", "gemma4"),
    "Gemma 4, whole": ("Gemma4ForConditionalGeneration", shapes.GEMMA_4, GEMMA_4, "gemma4", "gemma4"),
    "LFM2": ("Lfm2ForCausalLM", shapes.chatml(shown="List of tools: <|tool_list_start|>["), LFM2, "lfm2", ""),
    "LFM2.5": ("Lfm2ForCausalLM", shapes.chatml(shown="List of tools: ["), LFM2, "lfm2", ""),
    "LFM2-MoE": ("Lfm2MoeForCausalLM", shapes.chatml(), LFM2, "lfm2", ""),
    "OLMo-2": ("Olmo2ForCausalLM", shapes.chatml(), [], "", ""),
    "Arcee": ("ArceeForCausalLM", shapes.chatml(), [], "", ""),
    "Qwen3.5": (
        "Qwen3_5ForCausalLM",
        shapes.chatml(shapes.QWEN_CODER, shapes.THOUGHT, shapes.OPENED),
        HERMES + THINK,
        "qwen3_coder",
        "qwen3",
    ),
    "Qwen3.5, whole": (
        "Qwen3_5ForConditionalGeneration",
        shapes.chatml(shapes.QWEN_CODER, prompt=shapes.OPENED),
        HERMES + THINK,
        "qwen3_coder",
        "qwen3",
    ),
    "Qwen3.5-MoE": (
        "Qwen3_5MoeForCausalLM",
        shapes.chatml(shapes.QWEN_CODER, shapes.THOUGHT, shapes.OPENED),
        HERMES + THINK,
        "qwen3_coder",
        "qwen3",
    ),
    "Qwen3.5-MoE, whole": (
        "Qwen3_5MoeForConditionalGeneration",
        shapes.chatml(prompt=shapes.OPENED),
        HERMES + THINK,
        "qwen3_coder",
        "qwen3",
    ),
    "Qwen3-Next": ("Qwen3NextForCausalLM", shapes.chatml(shapes.HERMES), HERMES + THINK, "hermes", ""),
    "EXAONE's marks": ("LlamaForCausalLM", shapes.chatml(shapes.EXAONE), HERMES, "hermes", ""),
    # Notations without a parser: what a template writes goes before the family.
    "GLM": ("Qwen3ForCausalLM", shapes.chatml(shapes.GLM), HERMES, "", ""),
    "DeepSeek, distilled": ("Qwen2ForCausalLM", shapes.DEEPSEEK, HERMES + THINK, "", "qwen3"),
}


def finder(source: str, marks: list[str], architecture: str = "", special: bool = False) -> ParserFinder:
    backend = byte_level_tokenizer()
    add = backend.add_special_tokens if special else backend.add_tokens
    add(marks)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ParserFinder(ChatTemplate(source, tokens), wrapped(backend), architecture)


@pytest.mark.parametrize("family", FAMILIES)
def test_parsers_of_each_family(family: str) -> None:
    architecture, source, marks, notation, style = FAMILIES[family]
    found = finder(source, marks, architecture)
    assert (found.notation().name, found.style().name) == (notation, style), (found.notation(), found.style())


def test_every_family_of_the_docs_is_in_the_table() -> None:
    documented = {
        cell.strip().strip("`")
        for line in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and "`architectures`" not in line
        for cell in line.split("|")[2:3]
        if cell.strip().startswith("`") and cell.strip("` ").endswith(("ForCausalLM", "ForConditionalGeneration"))
    }
    assert len(documented) > 15
    assert documented - {row[0] for row in FAMILIES.values()} == {"WhisperForConditionalGeneration"}, "it does not chat"


def test_the_demo_model_says_how_it_calls_and_thinks() -> None:
    processor = load_text_processor(demo_model_path(), EngineConfig(model=str(demo_model_path())))
    (found,) = processor.process(FindParsers("f")).to_api
    assert isinstance(found, ParsersFound)
    assert (found.id, found.notation, found.style) == ("f", "hermes", "qwen3")


def test_a_model_without_a_template_has_no_parsers() -> None:
    (found,) = TextProcessor(wrapped(byte_level_tokenizer()), None).process(FindParsers("f")).to_api
    assert isinstance(found, ParsersFound)
    assert (found.notation, found.style, found.style_reason) == ("", "", "the model has no chat template")


def test_every_parser_can_be_found() -> None:
    found = {row[3] for row in FAMILIES.values()} | {row[4] for row in FAMILIES.values()}
    assert {*TOOL_CALL_PARSERS, *REASONING_PARSERS} - found == {"deepseek_r1"}


def test_a_template_beats_the_family() -> None:
    found = finder(shapes.chatml(shapes.HERMES), HERMES, "MistralForCausalLM").notation()
    assert (found.name, found.reason) == ("hermes", "the template writes calls with <tool_call>")


def test_a_template_of_marks_that_the_vocabulary_lacks_is_not_believed() -> None:
    assert finder(shapes.MISTRAL, [], "MistralForCausalLM").notation().name == ""
    assert finder(shapes.GEMMA_4, [], "Gemma4ForCausalLM").style().name == ""
    assert finder(shapes.PHI, [], "Phi3ForCausalLM").notation().name == ""


def test_marks_that_the_text_would_lose_are_not_believed() -> None:
    # Special tokens are not part of the text that these parsers read.
    found = finder(shapes.chatml(shapes.HERMES, shapes.THOUGHT), HERMES + THINK, special=True)
    assert (found.notation().name, found.style().name) == ("", "")


def test_a_vocabulary_without_the_characters_of_a_mark() -> None:
    template = ChatTemplate(shapes.chatml(shapes.HERMES, shapes.THOUGHT))
    found = ParserFinder(template, wrapped(word_tokenizer()), "Qwen3ForCausalLM")
    assert (found.notation().name, found.style().name) == ("", "")


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{ nothing.at.all }}"])
def test_a_template_that_refuses_everything_has_no_parsers(source: str) -> None:
    found = finder(source, HERMES, "OtherForCausalLM")
    assert (found.notation().name, found.style().name) == ("", "")


def test_a_template_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_finder, "RENDER_SECONDS", 0.01)
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{{ a }}{% endfor %}{% endfor %}"
    assert finder(endless, []).notation().name == ""
