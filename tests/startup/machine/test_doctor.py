"""`tokenmill doctor`: what is well, what is not, and that every fault comes with its mend."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tokenmill.cli.main import main
from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.machine import doctor


class Machine(CpuPlatform):
    free = 2 << 30

    def available_bytes(self) -> int:
        return self.free


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_bandwidth", lambda *_: 12.5e9)
    monkeypatch.setattr(doctor, "available_levels", lambda: ["avx2"])


def findings(root: Path, platform: CpuPlatform | None = None) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(platform or Machine(), root)}


def test_a_machine_that_is_well_is_described(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: A Fast One\n")
    found = findings(tmp_path)
    assert found["processor"].text.startswith("A Fast One, ")
    assert "2.0 GiB free, read at 12.5 GB/s" in found["memory"].text
    assert found["GPU"].text == "none"
    assert importlib.metadata.version("torch") in found["torch"].text
    assert {"-> device", "-> kernels", "-> attention", "-> threads"} <= found.keys()
    assert [finding for finding in found.values() if finding.mend] == []


def test_little_memory_is_a_fault(tmp_path: Path) -> None:
    machine = Machine()
    machine.free = 100 << 20
    assert "end other programs" in findings(tmp_path, machine)["memory"].mend


def test_a_gpu_that_torch_cannot_use_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install torch for CUDA" in findings(tmp_path)["GPU"].mend
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in findings(tmp_path)["GPU"].mend
    monkeypatch.setitem(sys.modules, "torch", None)
    assert findings(tmp_path)["GPU"].mend == "pip install 'tokenmill[gpu]'"


def test_a_cpu_is_well_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = findings(tmp_path)
    assert found["torch"].text.startswith("not installed; GPUs, images")
    assert [finding for finding in found.values() if finding.mend] == []


@pytest.mark.parametrize(
    ("levels", "machine", "is_fault"),
    [(None, "x86_64", True), ([], "x86_64", False), (None, "aarch64", False), (["avx2", "amx"], "x86_64", False)],
)
def test_native_kernels_that_were_not_built_are_a_fault_where_they_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: list[str] | None, machine: str, is_fault: bool
) -> None:
    monkeypatch.setattr(doctor, "available_levels", lambda: levels)
    monkeypatch.setattr(doctor.python_platform, "machine", lambda: machine)
    found = findings(tmp_path)["native"]
    assert bool(found.mend) is is_fault
    assert ("avx2, amx" in found.text) is bool(levels)


def test_packages_outside_of_their_ranges_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "uvicorn":
            raise importlib.metadata.PackageNotFoundError
        return "0.0.1" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = findings(tmp_path)["packages"]
    assert "torch 0.0.1" in found.text
    assert "uvicorn is missing" in found.text
    assert found.mend.startswith("pip install 'torch<")
    assert "'uvicorn>=" in found.mend


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "TMPDIR" in findings(tmp_path)["temporary"].mend


def test_no_compiler_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = findings(tmp_path)["compiler"]
    assert found.text.startswith("none")
    assert not found.mend


def test_what_keeps_an_engine_from_starting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InvalidConfig("no such kernels")

    monkeypatch.setattr(doctor, "choose_kernels", refuse)
    assert findings(tmp_path)["engine"].mend == "no such kernels"


@pytest.mark.parametrize(("mend", "code"), [("", 0), ("turn it round", 1)])
def test_the_exit_code_tells_whether_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mend: str, code: int
) -> None:
    found = [doctor.Finding("native", "kernels [for] this"), doctor.Finding("GPU", "upside down", mend)]
    monkeypatch.setattr(doctor, "examine", lambda platform: iter(found))
    assert main(["doctor"]) == code
    output = capsys.readouterr().out
    assert "kernels [for] this" in output
    assert ("turn it round" in output) is bool(mend)
    assert output.splitlines()[-1] == ("all is well" if code == 0 else "something is wrong: see the lines `mend`")


def test_a_package_that_cannot_be_imported_is_a_fault_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenmill.startup.machine.doctor", None)
    assert main(["doctor"]) == 1
    assert "mend: install TokenMill again" in capsys.readouterr().out
