import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source_tree import ROOT

DEV_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "import-linter", "openai")
DEV_TOOLS += (
    "axe-playwright-python",
    "jsonschema",
    "langchain-openai",
    "matplotlib",
)


def pins(name: str) -> dict[str, str]:
    """Package -> version of a requirements file, the files that it includes among them."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line[3:])
        elif line and not line.startswith("#"):
            marker = r"(; sys_platform (==|!=) \"(linux|win32)\")?"
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)" + marker, line)
            assert match, f"{name}: {line!r} is not a plain pin"
            found[canonicalize_name(match[1])] = match[2]
    return found


def needed(package: str, seen: set[str]) -> set[str]:
    """A package and all that it needs here, by the metadata of what is installed."""
    name = canonicalize_name(package)
    if name not in seen:
        seen.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, seen)
    return seen


def project_dependencies(extra: str = "") -> list[Requirement]:
    """Return the requirements of a Linux machine with native kernels; with an extra, those that it brings on top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    machine = {"platform_machine": "x86_64"}
    wanted = [Requirement(text) for text in texts]
    return [one for one in wanted if one.marker is None or one.marker.evaluate(machine)]


@pytest.mark.parametrize(
    ("extra", "name"), [("", "runtime.txt"), ("torch", "torch.txt"), ("vision", "dev.txt"), ("audio", "dev.txt")]
)
def test_every_pin_lies_in_the_range_of_the_project(extra, name):
    pinned = pins(name)
    for requirement in project_dependencies(extra):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_torch_is_pinned_without_a_build_and_no_pin_pulls_cuda():
    dev = pins("dev.txt")
    assert dev["torch"] == "2.13.0"
    # triton itself needs no CUDA: the tests run its kernels interpreted.
    assert [name for name in dev if name.startswith(("nvidia", "triton", "cuda"))] == ["triton"]
    assert "triton" not in pins("torch.txt")


def test_a_cpu_with_native_kernels_needs_no_torch():
    assert {"torch", "sympy", "triton", "pillow", "soundfile"} & pins("runtime.txt").keys() == set()
    assert "torch" not in {requirement.name for requirement in project_dependencies()}


def test_every_extra_with_torch_wants_the_same():
    texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for each in texts["optional-dependencies"].values() for text in each]
    wanted += map(Requirement, texts["dependencies"])
    assert len({str(one.specifier) for one in wanted if one.name == "torch"}) == 1


@pytest.mark.parametrize("name", ["runtime.txt", "torch.txt", "dev.txt"])
def test_everything_that_is_needed_is_pinned(name):
    seen: set[str] = set()
    for requirement in project_dependencies():
        needed(requirement.name, seen)
    for tool in {"torch.txt": ("torch",), "dev.txt": ("torch", *DEV_TOOLS)}.get(name, ()):
        needed(tool, seen)
    # With a CUDA build of torch, its own CUDA packages come along unpinned, as torch's metadata wants them.
    missing = {package for package in seen - pins(name).keys() if not package.startswith(("nvidia", "triton", "cuda"))}
    assert missing == set()


def test_runtime_needs_no_test_tool():
    assert {"pytest", "transformers", "openai", "scipy"} & pins("runtime.txt").keys() == set()


def test_what_is_carried_to_a_gpu_is_what_runs_here():
    gpu, dev = pins("gpu.txt"), pins("dev.txt")
    assert {name: gpu[name] for name in ("msgspec", "safetensors", "tokenizers")}.items() <= dev.items()
    assert pins("gpu-carry.txt").items() <= pins("runtime.txt").items()


def test_what_is_carried_to_a_gpu_is_complete_but_for_what_is_there():
    carried = pins("gpu-carry.txt")
    needs = set().union(*(needed(name, set()) for name in carried))
    there = {"annotated-doc", "anyio", "certifi", "click", "h11", "idna"}  # and its own packages of torch
    assert needs - carried.keys() <= there
