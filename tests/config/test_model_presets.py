"""Presets of several models in TOML: what they may say, and what is refused with the word that was meant."""

import math

import pytest

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.model_presets import parse_duration, read_presets
from tokenmill.core.errors import InvalidConfig


def read(tmp_path, text):
    (tmp_path / "models.toml").write_text(text)
    return read_presets(tmp_path / "models.toml")


def test_a_preset_stands_over_those_of_all_models(tmp_path):
    presets = read(
        tmp_path,
        """
        ["*"]
        max-model-len = "8k"
        ttl = "10m"
        max_num_seqs = 4
        [a]
        max-model-len = 100
        aliases = "one"
        pinned = true
        tool-call-parser = "hermes"
        sampling = {temperature = 0.5, top_k = 3}
        """,
    )
    a, b = presets.of("a"), presets.of("b")
    assert (a.apply(EngineConfig()).max_model_len, b.apply(EngineConfig()).max_model_len) == (100, 8192)
    assert a.apply(EngineConfig()).max_num_seqs == 4
    assert a.apply(ServerConfig()).tool_call_parser == "hermes"
    assert (a.aliases, a.pinned, a.ttl, b.pinned, b.ttl) == (("one",), True, 600.0, False, 600.0)
    assert a.sampling == {"temperature": 0.5, "top_k": 3}


def test_paths_are_seen_from_the_file_and_hub_ids_stay(tmp_path):
    (tmp_path / "here").mkdir()
    presets = read(tmp_path, '[a]\nmodel = "here"\n[b]\nmodel = "owner/name"\n[c]\nmodel = "./gone"')
    models = [preset.model for preset in presets.named.values()]
    assert models == [str(tmp_path / "here"), "owner/name", str(tmp_path / "gone")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[a]\nmax-model-length = 5", "did you mean max-model-len?"),
        ("[a]\npined = true", "did you mean pinned?"),
        ("[a]\nmax-model-len = 'much'", r"\[a\] max-model-len: 'much' is not a size"),
        ("[a]\nport = 5", "unknown key"),
        ("[a]\nttl = 'soon'", "is not a duration"),
        ("[a]\npinned = 'yes'", "is not true or false"),
        ("[a]\naliases = [5]", "is not a list of names"),
        ("[a]\nsampling = {temprature = 1.0}", "did you mean temperature?"),
        ("[a]\nsampling = {temperature = -1.0}", "temperature"),
        ("[a]\ndefault = true\n[b]\ndefault = true", "more than one model is the default"),
        ("['*']\npinned = true", "of all models, and pinned of one"),
        ("ttl = 5", "stands outside of a model"),
        ("[a", "is not valid TOML"),
    ],
)
def test_mistakes_are_refused_with_what_was_meant(tmp_path, text, error):
    with pytest.raises(InvalidConfig, match=error):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match="No such file"):
        read_presets(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90), ("90", 90), ("10m", 600), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), (0, 0), ("0s", 0)],
)
def test_durations(given, seconds):
    assert parse_duration(given) == seconds


@pytest.mark.parametrize("given", [-1, "-1", "-5m"])
def test_a_negative_duration_is_for_ever(given):
    assert parse_duration(given) == math.inf


@pytest.mark.parametrize("given", ["", "5 minutes", "m", True, None, "1h-5m"])
def test_what_is_no_duration(given):
    with pytest.raises(InvalidConfig):
        parse_duration(given)
