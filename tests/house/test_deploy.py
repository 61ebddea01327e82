"""Check the files that ship TokenMill: they parse, and name files, targets and flags that exist."""

import configparser
import json
import re
import shlex
import tomllib

import pytest
import yaml

from tests.house.source_tree import ROOT
from tokenmill.cli.serve import read_configs
from tokenmill.cli.serve_models import check_flags
from tokenmill.config.model_presets import read_presets
from tokenmill.config.server_settings import DEFAULT_PORT
from tokenmill.serving.server.http.middleware import OPEN_ROUTES

DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CHART = DEPLOY / "helm" / "tokenmill"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "tokenmill.yaml").read_text()))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> set[str]:
    """The targets of the Dockerfile."""
    return set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))


def words(instruction: str) -> list[list[str]]:
    """The arguments of each such instruction of the Dockerfile, as JSON or as words."""
    lines = re.findall(rf"^{instruction} (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
    return [json.loads(line) if line.startswith("[") else line.split() for line in lines]


@pytest.mark.parametrize(
    "path", [*DEPLOY.rglob("*.y*ml"), *(ROOT / ".github").rglob("*.yml")], ids=lambda path: path.name
)
def test_every_yaml_file_is_made_of_mappings(path):
    if path.parent != CHART / "templates":
        documents = list(yaml.safe_load_all(path.read_text()))
        assert documents and all(isinstance(document, dict) for document in documents)


def test_the_dockerfile_copies_what_exists_and_docker_may_see():
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in words("COPY") if not line[0].startswith("--from") for name in line[:-1]}
    assert copied == seen
    assert all((ROOT / name).exists() for name in copied)
    assert {stage for line in words("COPY") if line[0].startswith("--from") for stage in [line[0][7:]]} <= stages()


def test_the_image_starts_a_server_that_is_reached_from_outside():
    assert words("ENTRYPOINT") == [["tokenmill"]]
    ((verb, *flags),) = words("CMD")
    assert verb == "serve"
    assert read_configs(flags, {})[1].host == "0.0.0.0"
    assert words("EXPOSE") == [[str(DEFAULT_PORT)]]
    assert f"127.0.0.1:{DEFAULT_PORT}/health" in DOCKERFILE


def test_the_wheel_is_built_with_the_pins():
    """The wheel stage installs by name exactly what the build needs, all of it pinned."""
    installed = re.search(r"--constraint requirements/runtime.txt (.+)", DOCKERFILE)
    assert installed is not None
    needed = {re.split(r"[><=]", requirement)[0] for requirement in PROJECT["build-system"]["requires"]}
    assert needed <= set(installed[1].split())


def test_compose_builds_stages_that_exist_and_mounts_files_that_exist():
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
    for file in (COMPOSE, cuda):
        assert file["services"]["tokenmill"]["build"]["target"] in stages()
    mounts = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]]
    assert all((DEPLOY / mount).exists() for mount in mounts if mount.startswith("."))
    assert {mount for mount in mounts if not mount.startswith(".")} == COMPOSE["volumes"].keys()


def test_compose_gives_the_server_what_it_takes_and_opens_ports_on_loopback_only():
    service = COMPOSE["services"]["tokenmill"]
    environment = {name: re.sub(r"\$\{MODEL:-\}", "", value) for name, value in service["environment"].items()}
    engine, server = read_configs(service["command"][1:], environment)
    assert (engine.model, server.host, server.port) == ("", "0.0.0.0", DEFAULT_PORT)
    ports = [port for each in COMPOSE["services"].values() for port in each["ports"]]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_and_grafana_are_wired_to_the_server_and_the_dashboard():
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert scraped["targets"] == [f"tokenmill:{DEFAULT_PORT}"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tokenmill.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/grafana-dashboard.json" in mounted
    variables = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())["templating"]["list"]
    assert source["type"] in [variable["query"] for variable in variables if variable["type"] == "datasource"]


def test_the_unit_starts_a_server(tmp_path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "tokenmill.service")
    program, verb, flag, path = shlex.split(unit["Service"]["ExecStart"])
    assert (program.rpartition("/")[2], verb, flag) == ("tokenmill", "serve", "--config")
    example = re.search(rf"echo '(.+)' > {path}", (DEPLOY / "README.md").read_text())
    assert example is not None
    (tmp_path / "config.yaml").write_text(example[1])
    assert read_configs([flag, str(tmp_path / "config.yaml")], {})[1].port == DEFAULT_PORT


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_targets_and_files_that_exist(path):
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for name, job in jobs.items():
        assert job["timeout-minutes"] > 0, name
        for step in job["steps"]:
            for used in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                assert used in targets
            for used in re.findall(r"(?:examples|tools|requirements)/\S+", step.get("run", "")):
                assert (ROOT / used).exists(), used
            assert "uses" not in step or re.search(r"@v\d+$", step["uses"])


def test_the_workflow_tests_every_python_that_the_project_admits():
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["make-test"]["strategy"][
        "matrix"
    ]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"


def test_wheels_are_tried_with_files_that_exist():
    settings = PROJECT["tool"]["cibuildwheel"]
    named = re.findall(r"\{project\}/(\S+)", settings["test-command"])
    assert named
    assert all((ROOT / name).exists() for name in named)


def check_two_models(presets: str, flags: list[str], tmp_path):
    """The flags serve two models of these presets, which are fetched by the names that they have there."""
    path = tmp_path / "models.toml"
    path.write_text(presets)
    given = [flag.replace("/etc/tokenmill/models.toml", str(path)) for flag in flags]
    engine, server = read_configs(given, {})
    check_flags(engine, server)
    assert (server.host, server.port) == ("0.0.0.0", DEFAULT_PORT)
    assert server.models == str(path) and server.models_memory and engine.kv_disk.startswith("/models/")
    named = read_presets(path).named
    assert len(named) == 2 and sum(preset.default for preset in named.values()) == 1
    return {preset.model for preset in named.values()}


def test_the_compose_file_of_two_models_fetches_and_serves_them(tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.models.yaml").read_text())["services"]
    verb, *flags = services["tokenmill"]["command"]
    assert verb == "serve"
    mounts = dict(mount.split(":")[:2] for mount in services["tokenmill"]["volumes"])
    assert mounts["./models.toml"] == "/etc/tokenmill/models.toml"
    models = check_two_models((DEPLOY / "models.toml").read_text(), flags, tmp_path)
    assert set(re.findall(r"tokenmill pull (\S+)", services["fetch"]["command"][0])) == models
    assert services["tokenmill"]["build"]["target"] in stages()
    assert all(port.startswith("127.0.0.1:") for port in services["tokenmill"]["ports"])


def test_the_manifests_serve_two_models_and_name_each_other(tmp_path):
    kinds = {one["kind"]: one for one in MANIFESTS}
    assert {one["metadata"]["name"] for one in MANIFESTS} == {"tokenmill"}
    pod = kinds["Deployment"]["spec"]["template"]
    (container,), (fetch,) = pod["spec"]["containers"], pod["spec"]["initContainers"]
    models = check_two_models(kinds["ConfigMap"]["data"]["models.toml"], container["args"][1:], tmp_path)
    assert set(re.findall(r"tokenmill pull (\S+)", fetch["command"][-1])) == models
    assert kinds["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert container["ports"][0]["containerPort"] == DEFAULT_PORT
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for one in (container, fetch) for mount in one["volumeMounts"]} == volumes
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes <= OPEN_ROUTES, "they bring no key"
    assert pod["spec"]["terminationGracePeriodSeconds"] > read_configs([], {})[1].shutdown_timeout


def test_the_chart_names_values_that_it_has_and_serves_the_same_as_the_manifests(tmp_path):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    named = {tuple(path.split(".")) for path in re.findall(r"\.Values\.([\w.]+)", text)}
    for path in named:
        found = values
        for part in path:
            found = found[part]
    assert {path[0] for path in named} == values.keys(), "each value is used"
    defined = set(re.findall(r'define "([\w.]+)"', text))
    assert set(re.findall(r'include "([\w.]+)"', text)) == defined
    assert len(re.findall(r"\{\{-? (?:with|define|range|if) ", text)) == len(re.findall(r"\{\{-? end ", text))
    flags = re.findall(
        r"^ +- (--\S+(?:=\{\{ \S+ \}\})?)$", (CHART / "templates" / "deployment.yaml").read_text(), re.MULTILINE
    )
    sizes = {"{{ .Values.modelsMemory }}": values["modelsMemory"], "{{ . }}": values["kvDiskSize"]}
    for name, size in sizes.items():
        flags = [flag.replace(name, size) for flag in flags]
    assert check_two_models(values["models"], flags, tmp_path) == set(values["fetch"])
    container = next(one for one in MANIFESTS if one["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][
        0
    ]
    assert flags == container["args"][1:]
