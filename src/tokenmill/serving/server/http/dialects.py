"""Names that other servers give to fields of ours, and names of theirs that mean nothing here.

A synonym is taken only where it means the same; its value becomes fields of ours. What clients of other servers send
without need (`keep_alive`, `cache_prompt`, ...) is listed so that it is not mistaken for a misspelt field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Fields = dict[str, Any]


class Synonym(msgspec.Struct, frozen=True):
    """Another name of a field.

    Attributes:
        field: the field of ours, which the body must have for the synonym to count.
        value: converts the value; None: it asks for nothing.
    """

    field: str
    value: Callable[[Any], Any] = lambda value: value


def _limit(value: Any) -> Any:
    """Return a number of tokens; llama.cpp's and Ollama's -1 (no limit) and -2 (fill the context) set none."""
    return None if value in (-1, -2) else value


def _wrapped(key: str) -> Callable[[Any], Any]:
    """Return what makes {key: value} of a value."""
    return lambda value: {key: value}


def _thinking(value: Any) -> Any:
    return {"enable_thinking": value} if isinstance(value, bool) else None


def _greedy(value: Any) -> Any:
    """Return the temperature that `do_sample: false` stands for; true asks for nothing."""
    return 0.0 if value is False else None


def _effort(value: Any) -> Any:
    return value if isinstance(value, str) else None


# llama.cpp, Ollama, vLLM (before 0.12), SGLang, text-generation-inference. Of several rows the first that fits counts.
SYNONYMS: Mapping[str, tuple[Synonym, ...]] = {
    "n_predict": (Synonym("max_tokens", _limit), Synonym("max_output_tokens", _limit)),
    "num_predict": (Synonym("max_tokens", _limit), Synonym("max_output_tokens", _limit)),
    "max_new_tokens": (Synonym("max_tokens"), Synonym("max_output_tokens")),
    # llama.cpp and Ollama look at the last 64 tokens only, we at all of them.
    "repeat_penalty": (Synonym("repetition_penalty"),),
    "do_sample": (Synonym("temperature", _greedy),),
    "stop_sequences": (Synonym("stop"),),
    "think": (Synonym("chat_template_kwargs", _thinking), Synonym("reasoning_effort", _effort)),
    "enable_thinking": (Synonym("chat_template_kwargs", _thinking),),
    "thinking_budget_tokens": (Synonym("thinking_token_budget", _limit),),
    "thinking_budget": (Synonym("thinking_token_budget", _limit),),
    "guided_json": (Synonym("structured_outputs", _wrapped("json")),),
    "guided_regex": (Synonym("structured_outputs", _wrapped("regex")),),
    "guided_choice": (Synonym("structured_outputs", _wrapped("choice")),),
    "guided_grammar": (Synonym("structured_outputs", _wrapped("grammar")),),
    "json_schema": (Synonym("structured_outputs", _wrapped("json")),),
    "grammar": (Synonym("structured_outputs", _wrapped("grammar")),),
}
# Synonyms that count beside the field itself: transformers' `do_sample: false` is greedy at any temperature.
DECISIVE = frozenset({"do_sample"})
# Known elsewhere, without a meaning here.
FOREIGN = frozenset(
    {
        "cache_prompt",
        "client_metadata",
        "guided_decoding_backend",
        "keep_alive",
        "mirostat",
        "mirostat_eta",
        "mirostat_tau",
        "options",
        "provider",
        "reasoning",
        "route",
        "n_indent",
        "samplers",
        "slot_id",
        "id_slot",
        "t_max_predict_ms",
        "t_max_prompt_ms",
        "tfs_z",
        "top_a",
        "transforms",
        "ttl",
        "typical_p",
        "usage",
    }
)


def own_fields(name: str, value: Any, known: frozenset[str]) -> Fields | None:
    """Return what a field of another server means in ours; None: it is not a synonym for a body with these fields."""
    rows = [row for row in SYNONYMS.get(name, ()) if row.field in known]
    if not rows:
        return None
    found = [(row.field, converted) for row in rows if (converted := row.value(value)) is not None]
    return dict(found[:1])
