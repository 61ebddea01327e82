"""A model's description before it is loaded, against the engine that is then built with what was counted for it."""

import dataclasses
import json

import pytest
from gguf import LlamaFileType

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.encoder_checkpoints import make_encoder
from tests.model.weights.gguf_writer import write_gguf
from tests.tiers import some
from tokenmill.config.configs import EngineConfig
from tokenmill.core.model_description import StoredFormat
from tokenmill.model.weights.gguf.types import FILE_TYPES
from tokenmill.platform.select import select_platform
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.sizing.describe_models import PROCESS_BYTES, ModelQuestion, describe

BUDGET = 1 << 30


def described(config: EngineConfig, num_engines: int = 1, budget: int = BUDGET):
    return describe(ModelQuestion(config, num_engines, budget), select_platform("cpu"))


@pytest.mark.parametrize("family", some(FAMILIES, 5))
@pytest.mark.parametrize("changes", [{}, {"max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}])
def test_an_engine_takes_what_was_counted_for_it(family, changes, tmp_path):
    folder = make_checkpoint(tmp_path / family, family)
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, weight_cache=False, **changes)
    found = described(config)
    assert found.problem == ""
    memory = found.memory
    states = {"state_memory": memory.states} if memory.states else {}
    counted = dataclasses.replace(config, kv_share_bytes=memory.kv, **states)
    built = build_engine(counted)
    ready = built.ready
    built.engine.close()
    assert (ready.weight_bytes, found.architecture) == (memory.weights, ready.architecture)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    assert found.stored == ready.stored == StoredFormat("safetensors", model_type, "bfloat16")
    assert 0 < ready.kv_bytes <= memory.kv
    assert ready.state_bytes <= memory.states + memory.processes - PROCESS_BYTES
    assert ready.max_model_len == found.context == changes.get("max_model_len", found.context)
    assert memory.total == memory.processes + memory.weights + memory.kv + memory.states + memory.tower


def test_models_that_give_vectors_or_labels_say_so(tmp_path):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    head = make_encoder(tmp_path / "head", "bert", model_class="BertForSequenceClassification")
    text = make_checkpoint(tmp_path / "text", "qwen3")
    for folder, capability in ((encoder, "embedding"), (head, "classification"), (text, "completion")):
        assert described(EngineConfig(model=str(folder), device="cpu")).capabilities == (capability,)


def test_kv_has_room_for_one_request_or_a_quarter_of_the_budget(tmp_path):
    config = EngineConfig(model=str(make_checkpoint(tmp_path / "m", "qwen3")), device="cpu")
    whole = described(config).memory.kv
    small = described(config, budget=2 * whole).memory.kv
    assert small == whole // 2
    asked = dataclasses.replace(config, max_model_len=512)
    assert described(asked, budget=2 * whole).memory.kv == whole, "a context that was asked for is had"
    assert described(config, num_engines=2).memory.kv == 2 * whole


def test_what_the_files_show_is_said(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "qwen3")
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}{% endif %}"
    )
    found = described(EngineConfig(model=str(folder), device="cpu"))
    assert found.capabilities == ("completion", "tools", "thinking")
    assert "tools" in found.template


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_model_len": 1 << 20}, "exceeds the model's context"),
        ({"speculative_config": '{"method": "draft_model", "model": "x"}'}, "does not count the memory of a second"),
        ({"quantization": "fp8"}, "needs a GPU"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path, changes, problem):
    config = EngineConfig(model=str(make_checkpoint(tmp_path / "m", "qwen3")), device="cpu", **changes)
    assert problem in described(config).problem


def test_a_folder_that_is_gone_says_so(tmp_path):
    assert "there is no folder" in described(EngineConfig(model=str(tmp_path / "none"), device="cpu")).problem


@pytest.mark.parametrize(("kind", "file_type"), [("Q8_0", 7), ("Q4_0", None), (None, 15)])
def test_a_gguf_file_says_how_it_is_quantized(kind, file_type, tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen3", hidden_size=64, intermediate_size=96)

    def add(writer):
        if file_type is not None:
            writer.add_file_type(file_type)

    path = write_gguf(folder, "qwen3", kind, add=add)
    # What a file does not say, most of its bytes show.
    names = {None: kind, **{one.value: one.name.removeprefix("MOSTLY_") for one in LlamaFileType}}
    config = EngineConfig(model=str(path), device="cpu", download_dir=str(tmp_path / "cache"))
    assert described(config).stored == StoredFormat("gguf", "qwen3", names[file_type])
    packed = dataclasses.replace(config, quantization="int8")
    if kind is None:
        assert described(packed).stored.quantization == "int8"


def test_file_types_have_the_names_that_llama_cpp_gives_them():
    names = {one.value: one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
    assert FILE_TYPES.items() <= names.items()
