"""The names of a server's models, and the config with which each is started."""

import json
from pathlib import Path

import msgspec
import pytest

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.model_presets import Preset, Presets
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.model_description import FoundModel, ModelDescription, ModelMemory
from tokenmill.serving.models.asked import choose
from tokenmill.serving.models.catalogue import read_catalogue
from tokenmill.serving.models.keeper import NEVER
from tokenmill.serving.server.http.errors import ModelNotFound

MEMORY = ModelMemory(weights=100, kv=50, states=8, processes=10)
ENGINE = EngineConfig(device="cpu")
SERVER = ServerConfig(port=1, api_key=("secret",), ssl_keyfile="k", ssl_certfile="c", allowed_origins=("x",))


def catalogue(presets=(), names=("a", "owner/b"), engine=ENGINE, server=SERVER):
    """Make a catalogue of these models, none of which is looked at."""
    found = [FoundModel(name, f"/models/{name}") for name in names]
    return read_catalogue(
        found,
        Presets(named=dict(presets)),
        (engine, server),
        1000,
        lambda questions, budget: [ModelDescription(memory=MEMORY, problem="/home/x/y is broken")] * len(questions),
    )


def test_a_name_an_alias_an_adapter_and_a_tag_stand_for_a_model():
    lora = {"enable_lora": True, "lora_modules": ("tuned=/adapters/t",)}
    models = catalogue({"a": Preset(aliases=("gpt-4", "q:8b"), engine=lora)})
    for name in ("a", "a:latest", "gpt-4", "gpt-4:latest", "q:8b", "tuned", "tuned:latest"):
        assert models.find(name).name == "a", name
    assert models.find("owner/b:latest").name == "owner/b"
    for name in ("q", "q:7b", "b", "owner", ""):
        with pytest.raises(ModelNotFound, match="this server has a, owner/b"):
            models.find(name)
    with pytest.raises(ModelNotFound, match="did you mean owner/b"):
        models.find("owner/c")
    launch = models["a"].launch_of(Path("/tmp/x"), 2)
    assert launch.server.served_model_name == ("a", "gpt-4", "q:8b", "a:latest", "gpt-4:latest")


def test_two_models_of_one_name_are_refused():
    with pytest.raises(InvalidConfig, match="names two models"):
        catalogue({"a": Preset(aliases=("owner/b",))})


def test_who_names_no_model_gets_the_default_the_only_or_the_last_one():
    models = catalogue({"owner/b": Preset(default=True)})
    assert [entry.name for entry in models] == ["owner/b", "a"], "it stands first"
    assert choose(models, None, "a").name == "owner/b"
    assert choose(catalogue(names=("a",)), None, None).name == "a"
    assert choose(catalogue(), None, "owner/b").name == "owner/b"
    with pytest.raises(InvalidRequest, match="name a model: a, owner/b"):
        choose(catalogue(), None, None)


def test_the_server_of_a_model_has_its_presets_and_no_doors_of_its_own():
    said = Preset(sampling={"temperature": 0.5}, engine={"max_num_seqs": 3}, server={"tool_call_parser": "hermes"})
    launch = catalogue({"a": said})["a"].launch_of(Path("/tmp/x"), 2)
    assert launch.engine.model == "/models/a"
    assert (launch.engine.max_num_seqs, launch.engine.kv_share_bytes, launch.engine.state_memory) == (3, 50, 8)
    assert launch.server.tool_call_parser == "hermes"
    assert [json.loads(one) for one in launch.server.override_generation_config] == [{"temperature": 0.5}]
    assert (launch.server.uds, launch.server.api_key) == ("/tmp/x/http", ("secret",)), "tenants are told apart by keys"
    assert (launch.server.ssl_keyfile, launch.server.allowed_origins) == (None, ())


def test_each_model_keeps_its_kv_in_a_folder_of_its_own_and_shares_the_disk():
    models = catalogue(engine=EngineConfig(device="cpu", kv_disk="/kv", kv_disk_size=1000))
    engines = [models[name].launch_of(Path("/tmp/x"), 2).engine for name in ("a", "owner/b")]
    assert len({engine.kv_disk for engine in engines}) == 2
    assert all(engine.kv_disk.startswith("/kv/") and engine.kv_disk_size == 500 for engine in engines)


def test_how_long_a_model_stays_is_said_by_its_preset_or_for_all():
    models = catalogue({"a": Preset(ttl=60.0, pinned=True, group="g")})
    rules = models["a"].rules(5.0)
    assert (rules.num_bytes, rules.ttl, rules.pinned, rules.group) == (168, 60.0, True, "g")
    assert (models["owner/b"].rules(5.0).ttl, models["owner/b"].rules(0.0).ttl) == (5.0, NEVER)


def test_a_problem_is_told_without_the_folders_of_this_machine():
    assert catalogue()["a"].description.problem == "y is broken"


def test_a_file_that_has_changed_is_another_one():
    entry = catalogue()["a"]
    other = msgspec.structs.replace(entry, found=FoundModel("a", "/models/a", 5))
    assert entry.digest != other.digest and len(entry.digest) == 64
