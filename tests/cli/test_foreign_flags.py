"""Command lines written for vLLM and SGLang: what is taken, what is refused, and what the table says of it."""

import random
import shlex

import pytest

from tokenmill.cli.serve import make_parser, read_configs
from tokenmill.config.fields import sampling_overrides
from tokenmill.config.foreign_flags import foreign_flags
from tokenmill.core.errors import InvalidConfig

TABLE = foreign_flags()
OURS = make_parser()._option_string_actions


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        read_configs(arguments, {})
    assert ending.value.code == 2
    return capsys.readouterr().err.strip()


def test_the_table_has_the_flags_of_both_and_agrees_with_our_parser():
    for engine, fewest in (("vLLM", 330), ("SGLang", 530), ("llama.cpp", 250)):
        assert sum(engine in flag.engines for flag in TABLE.values()) >= fewest
    for name, flag in TABLE.items():
        assert (name in OURS) == (flag.here == "same"), name
        assert flag.here in ("same", "nothing", "refused") or flag.here.split()[0] in OURS, name
        assert bool(flag.because) == (flag.here in ("nothing", "refused")), name


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-parallel-size 1 -pp 1 -dp 1 --tp 1 --dp=1 --nnodes 1 --node-rank 0 --dcp-size 1",
        "--limit-mm-data-per-request '{}' --spec-tokens 0 --cpu-offload-gb 0",
        "--no-enable-lora --hf-overrides '{}' --tokenizer-mode auto",
        "--schedule-policy lpm --runner generate --disaggregation-mode null --generation-config auto",
    ],
)
def test_values_that_change_nothing_are_taken_in_silence(line, capsys):
    assert read_configs(shlex.split(line), {}) == read_configs([], {})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["-cp", "-dcp", "--prefill-context-parallel-size", "--dcp-size", "--attn-cp-size"])
def test_all_names_of_context_over_ranks_are_one(name):
    assert read_configs(["m", name, "4"], {})[0].context_parallel_size == 4


def test_flags_of_others_set_ours():
    engine, server = read_configs(
        shlex.split(
            "some/model --disable-log-requests --disable-radix-cache --disable-overlap-schedule --schedule-policy fcfs "
            "--random-seed 7 --fastapi-root-path /x --max-queued-requests=9 --tokenizer-path t --enable-mixed-chunk "
            "--constrained-json-disable-any-whitespace"
        ),
        {},
    )
    assert (engine.model, engine.scheduling_policy, engine.seed, engine.tokenizer) == ("some/model", "fcfs", 7, "t")
    assert (engine.enable_prefix_caching, engine.async_scheduling, engine.batch_policy) == (False, False, "mixed")
    assert engine.structured_outputs().disable_any_whitespace
    assert (server.enable_log_requests, server.root_path, server.max_num_queued_reqs) == (False, "/x", 9)
    assert read_configs(["--no-disable-log-requests"], {})[1].enable_log_requests
    assert read_configs(["--no-disable-radix-cache"], {})[0].enable_prefix_caching


def test_a_command_line_of_llama_cpp_is_understood(capsys):
    engine, server = read_configs(
        shlex.split(
            "-hf owner/model-GGUF:Q4_K_M -c 8192 -ngl 99 --parallel 4 --jinja -t 8 -b 2048 -ub 512 -fa on --mlock "
            "--no-mmap -ctk q8_0 -ctv q8_0 --temp 0.6 --top-k 20 --repeat-penalty 1.1 --predict 256 -a mine "
            "--host 0.0.0.0 --port 8080 --metrics --no-webui --sse-ping-interval 30 --cache-reuse 0"
        ),
        {},
    )
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("owner/model-GGUF:Q4_K_M", 8192, 4)
    assert (engine.num_threads, engine.max_num_batched_tokens, engine.kv_cache_dtype) == (8, 2048, "int8")
    assert (server.served_model_name, server.host, server.port, server.sse_ping) == (("mine",), "0.0.0.0", 8080, 30.0)
    assert sampling_overrides(server.override_generation_config) == {
        "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 256
    }  # fmt: skip
    noted = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert noted == ["-ngl", "--jinja", "-ub", "--mlock", "--metrics"]


@pytest.mark.parametrize("line", ["-c 0 -np -1 -t -1 -ctk f16 -ctv f16", "-s -1 --predict -1", "-cmoe=false -ncmoe 0"])
def test_values_of_llama_cpp_that_change_nothing_are_taken_in_silence(line, capsys):
    assert read_configs(shlex.split(line), {}) == read_configs([], {})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", ["-fa", "-fa off", "-m {}", "--model {} -fa"])
def test_flash_attention_is_a_switch_or_has_a_value(line, tmp_path, capsys):
    line = line.format(tmp_path)
    assert read_configs(shlex.split(f"{line} {'' if str(tmp_path) in line else tmp_path}"), {})[0].model == str(
        tmp_path
    )


def test_what_llama_cpp_alone_has_is_refused_with_a_way_out(capsys):
    assert "-hf owner/name:Q4_K_M" in refusal(capsys, "-hf", "a/b", "-hff", "b.gguf")
    assert "--speculative-config" in refusal(capsys, "-md", "draft.gguf")
    assert "q5_0 is not supported; it can be q8_0" in refusal(capsys, "-ctk", "q5_0")
    assert "--temp warm: this is not a number" in refusal(capsys, "--temp", "warm")


def test_sampling_defaults_come_from_flags_variables_and_files(tmp_path):
    given = '{"temperature": 0.5, "top_k": 7}'
    path = tmp_path / "c.yaml"
    path.write_text("override-generation-config: {temperature: 0.5, top_k: 7}\n")
    for arguments, environment in (
        (["--override-generation-config", '{"temperature": 1}', "--override-generation-config", given], {}),
        ([], {"TOKENMILL_OVERRIDE_GENERATION_CONFIG": given}),
        (["--config", str(path)], {}),
    ):
        server = read_configs(arguments, environment)[1]
        assert sampling_overrides(server.override_generation_config) == {"temperature": 0.5, "top_k": 7}
    for wrong, part in (
        ("[1]", "JSON object"),
        ("{", "JSON object"),
        ('{"temprature": 1}', "did you mean temperature"),
    ):
        with pytest.raises(InvalidConfig, match=part):
            read_configs(["--override-generation-config", wrong], {})


def test_what_is_not_there_is_refused_with_the_reason(capsys):
    assert refusal(capsys, "--enable-moe-shared-loras") == (
        "tokenmill serve: --enable-moe-shared-loras is not supported, because adapters are of dense layers of texts, "
        "named by --lora-modules"
    )
    assert refusal(capsys, "m", "--attn-dp-size", "2").endswith("(1 changes nothing)")
    assert "a field of --speculative-config" in refusal(capsys, "--spec-model", "some/draft")
    assert "--aux-output-config" in refusal(capsys, '--aux-output-config={"a": 1}')
    assert refusal(capsys, "--data-parallel-address").endswith("needs a value")
    assert "'random' is not one of" in refusal(capsys, "--schedule-policy", "random")


def test_every_flag_of_the_table_is_taken_refused_or_ours(capsys):
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for flag in draw.sample([flag for flag in TABLE.values() if flag.here in ("nothing", "refused")], 60):
        words = [flag.name] + ([] if flag.takes in ("", "?") else [f"value-{draw.randrange(10**6)}"])
        if flag.here == "refused":
            assert flag.because in refusal(capsys, *words), f"seed {seed}"
        else:
            assert read_configs(["m", *words], {})[0].model == "m"
            assert capsys.readouterr().err == f"tokenmill serve: {flag.name} does nothing here: {flag.because}\n"
        # Some programs have the opposite, too, under this name.
        if flag.takes == "" and flag.name.startswith("--") and f"--no-{flag.name[2:]}" not in TABLE:
            assert read_configs([f"--no-{flag.name[2:]}", f"{flag.name}=false"], {}) == read_configs([], {})
            assert capsys.readouterr().err == ""


def test_a_value_never_becomes_the_model_nor_the_model_a_value(tmp_path, capsys):
    for line in (f"--swap-space 4 {tmp_path}", f"--cudagraph-capture-sizes 1 2 4 {tmp_path}", f"{tmp_path} --tp 1"):
        assert read_configs(shlex.split(line), {})[0].model == str(tmp_path)
    capsys.readouterr()


def test_a_config_file_of_vllm_is_read(tmp_path, capsys):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: some/model\ntensor-parallel-size: 1\ndisable-log-requests: true\nenable-lora: false\nswap-space: 4\n"
        "limit-mm-per-prompt: {image: 0}\nserved-model-name: [a, b]\nschedule_policy: fcfs\n"
    )
    engine, server = read_configs(["--config", str(path)], {})
    assert (engine.model, engine.scheduling_policy, server.served_model_name) == ("some/model", "fcfs", ("a", "b"))
    assert engine.media_limits().image == 0
    assert capsys.readouterr().err.count("\n") == 1
    path.write_text("decode-context-parallel-size: 2\n")
    assert read_configs(["--config", str(path)], {})[0].context_parallel_size == 2
    path.write_text("data-parallel-rank: 2\n")
    with pytest.raises(InvalidConfig, match="data-parallel-rank 2 is not supported, because"):
        read_configs(["--config", str(path)], {})


@pytest.mark.parametrize(("name", "meant"), [("half", "float16"), ("float", "float32"), ("auto", "bfloat16")])
def test_types_have_vllms_other_names(name, meant):
    assert read_configs(["--dtype", name], {})[0].dtype == meant


def test_a_verb_without_an_engine_knows_only_its_own_flags(capsys):
    from tokenmill.cli.complete import run

    with pytest.raises(SystemExit):
        run(["text", "--tensor-parallel-size", "1"])
    assert "unknown flag --tensor-parallel-size" in capsys.readouterr().err
