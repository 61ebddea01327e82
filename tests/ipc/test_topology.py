"""Check the parts of a topology, and how its engines differ."""

import dataclasses

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.topology import EngineSpec, Topology


def test_a_single_engine_has_an_index_for_programs_and_no_number_for_people():
    alone = Topology(tokenizer_workers=2)
    assert alone.parts == {"engine-0": "engine", "worker-0": "text worker 0", "worker-1": "text worker 1"}
    assert [alone.label(part) for part in alone.parts] == ["engine", "worker-0", "worker-1"]
    assert (alone.num_processes, alone.has_replicas) == (3, False)


def test_engines_and_ranks_are_told_apart():
    several = Topology((EngineSpec(0), EngineSpec(2, num_ranks=2)), tokenizer_workers=0)
    assert several.parts == {
        "engine-0": "engine 0",
        "engine-2": "engine 2",
        "engine-2-rank-1": "engine 2 rank 1",
        "worker-0": "text worker 0",
    }
    assert several.label("engine-2-rank-1") == "engine-2-rank-1"
    assert (several.num_processes, several.has_replicas) == (3, True), "the text worker is a thread"


def test_every_process_reads_what_was_written(tmp_path):
    written = LaunchFile(EngineConfig(model="m"), ServerConfig(), Topology((EngineSpec(0), EngineSpec(1, 2)), 3))
    written.write(tmp_path)
    assert LaunchFile.read(tmp_path) == written


def test_no_two_engines_share_a_file_an_address_or_seeds():
    events = {"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/replay", "topic": "kv"}
    config = EngineConfig(model="m", seed=7, step_log="steps", kv_events_config=msgspec.json.encode(events).decode())
    launch = LaunchFile(config, ServerConfig())
    assert launch.engine_config(0) == config
    three = Topology(tuple(EngineSpec(index) for index in range(3)))
    second = LaunchFile(config, ServerConfig(), three).engine_config(2)
    assert (second.model, second.seed, second.step_log) == ("m", 9, "steps.2")
    moved = second.kv_events()
    assert (moved.endpoint, moved.replay_endpoint, moved.topic) == ("tcp://*:5559", "ipc:///tmp/replay_dp2", "kv")
    free = dataclasses.replace(config, kv_events_config='{"endpoint": "tcp://127.0.0.1:*"}')
    assert LaunchFile(free, ServerConfig(), three).engine_config(1).kv_events().endpoint == "tcp://127.0.0.1:*"
    plain = LaunchFile(EngineConfig(model="m"), ServerConfig(), three).engine_config(1)
    assert (plain.step_log, plain.kv_events_config) == (None, None)


def test_each_engine_has_its_share_of_the_machine_and_a_gpu():
    topology = Topology((EngineSpec(0), EngineSpec(1)))
    for device, expected in (("cuda", "cuda:1"), ("auto", "auto:1"), ("cpu", "cpu")):
        second = LaunchFile(EngineConfig(model="m", device=device), ServerConfig(), topology).engine_config(1)
        assert (second.device, second.replica) == (expected, (1, 2))
    alone = LaunchFile(EngineConfig(model="m", device="cuda:3"), ServerConfig()).engine_config(0)
    assert (alone.device, alone.replica) == ("cuda:3", (0, 1))
