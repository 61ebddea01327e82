import dataclasses
import itertools
import random
import re
from pathlib import Path

import pytest

from tokenmill.cli.main import main
from tokenmill.cli.serve import make_parser, read_configs
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.flag_groups import GROUPS
from tokenmill.config.flags import Given, build, check_names
from tokenmill.config.parse import settings
from tokenmill.core.errors import InvalidConfig

CONFIGS = (EngineConfig, ServerConfig)
FLOATS = {setting.name for config in CONFIGS for setting in settings(config) if setting.kind == "float"}
NOT_NUMBERS = ["nan", "NAN", "-nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "²x", ""]


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        make_parser().parse(arguments)
    assert ending.value.code == 2
    return capsys.readouterr().err.strip()


def sample(setting, draw: random.Random):
    """A text for the setting, and the value it stands for."""
    if setting.how.choices:
        choice = draw.choice(setting.how.choices)
        return choice, choice
    number = draw.randrange(1, 10**6)
    match setting.kind:
        case "bool":
            return draw.choice([("true", True), ("0", False)])
        case "int":
            return str(number), number
        case "float":
            return f"{number}.5", number + 0.5
        case "str":
            return f"text-{number}", f"text-{number}"
    return f"a{number}", (f"a{number}",)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_flag_beats_environment_beats_file_beats_default(config_class):
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for setting in settings(config_class):
        for places in itertools.product([False, True], repeat=3):
            samples = [sample(setting, draw) for _ in places]
            (_, flag), (env_text, env), (file_text, file) = samples
            given = Given(
                {setting.name: flag} if places[0] else {},
                {f"TOKENMILL_{setting.name.upper()}": env_text} if places[1] else {},
                {setting.flag[2:]: file_text} if places[2] else {},
                "file.yaml",
            )
            order = [value for value, there in zip((flag, env, file), places, strict=True) if there]
            expected = order[0] if order else setting.default
            assert getattr(build(config_class, given), setting.name) == expected, f"seed {seed}: {given}"


def test_every_flag_and_alias_reaches_its_field():
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for config_class in CONFIGS:
        for setting in settings(config_class):
            for name in (setting.flag, *setting.how.aliases):
                if setting.kind == "bool":
                    for words, expected in (([name], True), ([f"--no-{name[2:]}"], False)):
                        given = Given(vars(make_parser().parse(words)))
                        assert getattr(build(config_class, given), setting.name) is expected
                    continue
                text, expected = sample(setting, draw)
                for words in ([name, text], [f"{name}={text}"]):
                    given = Given(vars(make_parser().parse(words)))
                    assert getattr(build(config_class, given), setting.name) == expected, f"seed {seed}: {words}"


# What a server works out for each of its engines, or of its models.
NO_FLAGS = ["weight_memory", "kv_share_bytes", "replica", "rank", "rendezvous", "rank_timeout", "is_behind"]


def test_every_field_of_the_configs_is_a_flag():
    for config_class in CONFIGS:
        fields = [name for name in config_class.__dataclass_fields__ if name not in NO_FLAGS]
        assert [s.name for s in settings(config_class)] == fields


def test_repeatable_flag_collects(capsys):
    given = Given(vars(make_parser().parse(["--api-key", "a,b", "--api-key=c"])))
    assert build(ServerConfig, given).api_key == ("a,b", "c")


def test_several_values_may_follow_one_flag(capsys):
    arguments = ["somewhere", "--served-model-name", "a", "org/b", "--api-key", "k", "l", "--served-model-name=c"]
    _, server = read_configs(arguments, {})
    assert (server.served_model_name, server.api_key) == (("a", "org/b", "c"), ("k", "l"))
    assert capsys.readouterr().err == ""


def test_the_model_after_such_a_flag_stays_the_model(tmp_path, capsys):
    for model in (str(tmp_path), "org/model"):
        engine, server = read_configs(["--api-key", "secret", "secret-too", model], {})
        assert (engine.model, server.api_key) == (model, ("secret", "secret-too"))
    assert capsys.readouterr().err == ""
    engine, server = read_configs(["--api-key", "secret", "word"], {})
    assert (engine.model, server.api_key) == ("", ("secret", "word"))
    assert capsys.readouterr().err == "tokenmill serve: --api-key takes 2 values, and no MODEL is given\n"


def test_a_suggestion_never_says_the_opposite(capsys):
    known = make_parser()._option_string_actions
    for flag in [name for name in known if name.startswith("--no-")] + ["--disable-prefix-caching", "--no-log-stats"]:
        message = refusal(capsys, flag + "s")
        meant = re.search(r"did you mean (\S+)\?", message)
        assert meant is None or meant[1].startswith(("--no-", "--disable-")), message
    assert refusal(capsys, "--enable-log-stats").endswith("did you mean --no-disable-log-stats?")


def test_unknown_flag_is_answered_with_the_one_that_was_meant(capsys):
    assert refusal(capsys, "--max-model-length", "5") == (
        "tokenmill serve: unknown flag --max-model-length; did you mean --max-model-len?"
    )
    assert refusal(capsys, "model", "--prot=8001").endswith("did you mean --port?")
    assert refusal(capsys, "--zzzzzz") == "tokenmill serve: unknown flag --zzzzzz"


def test_abbreviations_are_refused(capsys):
    assert "did you mean --max-num-seqs?" in refusal(capsys, "--max-num-seq", "5")


def test_wrong_values_name_the_flag(capsys):
    assert refusal(capsys, "--port", "x") == "tokenmill serve: argument --port: 'x' is not an integer"
    assert "--dtype" in refusal(capsys, "--dtype", "float31")
    assert "expected one argument" in refusal(capsys, "--port")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_config_file_takes_flag_spellings_field_names_and_aliases(tmp_path):
    path = write(
        tmp_path / "c.yaml", "max-model-len: 32k\nmax_num_seqs: 8\nblock-size: 32\napi-key: [a, b]\nmodel: somewhere\n"
    )
    engine, server = read_configs(["--config", path, "--max-num-seqs", "9"], {"TOKENMILL_PORT": "8009"})
    assert (engine.max_model_len, engine.max_num_seqs, engine.page_size) == (32768, 9, 32)
    assert (server.api_key, server.port, engine.model) == (("a", "b"), 8009, "somewhere")


def test_config_file_can_be_named_in_the_environment(tmp_path):
    path = write(tmp_path / "c.yaml", "port: 8012")
    assert read_configs([], {"TOKENMILL_CONFIG": path})[1].port == 8012


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 3", "unknown key max-model-length; did you mean max-model-len?"),
        ("- a", "must hold flags as keys"),
        ("a: [", "is not valid YAML"),
        ("port: [1]", "port: [1] is not an integer"),
        ("dtype: float31", "dtype: 'float31' is not one of"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_bad_config_file_is_refused_by_file_and_key(tmp_path, text, message):
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(InvalidConfig, match=re.escape(message)) as error:
        read_configs(["--config", path], {})
    assert str(error.value).startswith(path)


def test_a_missing_config_file_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot read the config file"):
        read_configs(["--config", str(tmp_path / "none.yaml")], {})


def test_a_bad_variable_is_refused_by_name():
    with pytest.raises(InvalidConfig, match="TOKENMILL_PORT: 'x' is not an integer"):
        read_configs([], {"TOKENMILL_PORT": "x"})


def test_variables_of_llama_cpp_are_named_once(capsys):
    check_names(Given({}, {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_N_PARALLEL": "2"}), CONFIGS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenmill: LLAMA_ARG_CTX_SIZE and 1 more of llama.cpp are not read: ")
    assert "--ctx-size" in line and "TOKENMILL_MAX_MODEL_LEN" in line


def test_an_unknown_variable_is_reported_and_ignored(capsys):
    check_names(Given({}, {"TOKENMILL_PROT": "1", "TOKENMILL_URL": "u", "OTHER": "1"}), CONFIGS)
    assert capsys.readouterr().err == (
        "tokenmill: TOKENMILL_PROT is ignored: unknown flag; did you mean TOKENMILL_PORT?\n"
    )


def test_the_model_may_be_named_in_place(capsys):
    assert read_configs(["folder"], {"TOKENMILL_MODEL": "other"})[0].model == "folder"
    assert read_configs(["--model", "folder"], {})[0].model == "folder"
    with pytest.raises(SystemExit):
        read_configs(["folder", "--model", "other"], {})
    assert "two models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "how", "budget"),
    [
        ("auto", {}, None),
        ("cpu", {}, 512),
        ("cpu", {"max_num_seqs": 700}, 700),
        ("cpu", {"enable_chunked_prefill": False}, 2048),
        ("cuda:0", {}, 8192),
        ("cuda:0", {"enable_chunked_prefill": False}, 8192),
        ("cpu", {"max_num_batched_tokens": 4096}, 4096),
    ],
)
def test_the_tokens_of_a_step_suit_the_device(device, how, budget):
    assert EngineConfig(device=device, **how).resolve().max_num_batched_tokens == budget


def test_values_that_cannot_work_together_are_refused():
    with pytest.raises(InvalidConfig, match="--max-num-batched-tokens"):
        read_configs(["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], {})


def test_no_flag_takes_what_is_no_number(capsys):
    """Every flag of a config that is a number with a point, and those of other verbs."""
    found = [(f"--{field}".replace("_", "-"), "serve") for field in FLOATS]
    others = [("--interval", "top"), ("--prefill-timeout", "proxy"), ("--speed", "simulate"), ("--speed", "plan"),
              ("--request-rate", "simulate"), ("--temperature", "bench serve")]  # fmt: skip
    assert len(found) >= 6
    for flag, verb in found + others:
        for text in NOT_NUMBERS:
            with pytest.raises(SystemExit) as ended:
                main([*verb.split(), f"{flag}={text}"])
            assert (ended.value.code, flag in capsys.readouterr().err) == (2, True), (verb, flag, text)


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_no_variable_and_no_config_takes_what_is_no_number(text):
    for config in CONFIGS:
        for name in {field.name for field in dataclasses.fields(config)} & FLOATS:
            with pytest.raises(InvalidConfig, match="is not a number"):
                build(config, Given({}, {f"TOKENMILL_{name.upper()}": text}, {}, ""))
            if (value := number(text)) is not None:
                with pytest.raises(InvalidConfig, match=f"--{name.replace('_', '-')} must be a finite number"):
                    config(**{name: value}).resolve()


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def test_times_are_not_negative():
    for name in FLOATS - {"gpu_memory_utilization", "quantization_bits"}:
        with pytest.raises(InvalidConfig, match=f"--{name.replace('_', '-')} must be "):
            ServerConfig(**{name: -0.5}).resolve()


def test_every_flag_of_serve_is_in_one_group_of_the_help():
    grouped = [name for _, names in GROUPS for name in names]
    known = [setting.name for config in CONFIGS for setting in settings(config)]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) <= set(known)
    groups = [group for group in make_parser()._action_groups if group._group_actions]
    shown = [action.dest for group in groups for action in group._group_actions]
    assert sorted(name for name in shown if name in known) == sorted(known)
    assert groups[2].title == "common"


LINKS = {
    "TOKENMILL_PORT": "tcp://10.0.0.1:8000",
    "TOKENMILL_SERVICE_HOST": "10.0.0.1",
    "TOKENMILL_SERVICE_PORT_HTTP": "8000",
    "TOKENMILL_PORT_8000_TCP_ADDR": "10.0.0.1",
}


def test_what_kubernetes_says_of_a_service_with_our_name_is_named_and_ignored(capsys):
    assert read_configs([], LINKS) == read_configs([], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "TOKENMILL_PORT=tcp://10.0.0.1:8000 is ignored" in line
    assert "enableServiceLinks: false" in line
