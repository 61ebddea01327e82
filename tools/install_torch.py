"""Installs the pinned torch, as a CPU build where that is what the machine needs.

The default build for Linux brings gigabytes of CUDA. PyTorch's own index has CPU builds of a tenth of the size; torch,
and nothing else, is taken from there

    - with `--torch cpu`, or `--torch ADDRESS` for an index of your own, and
    - by itself on Linux without an NVIDIA GPU, if pip is told of no index, mirror or folder: where somebody has said
      where packages come from, that is kept to. If the index does not answer, pip's default is taken.

`--torch default` leaves it to pip. Standard library only: it runs before anything is installed.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Where packages come from: a file's `global.index-url='...'` or a variable's `:env:.find-links='...'`.
SOURCES = re.compile(r"^[^=]*\.(index-url|extra-index-url|find-links|no-index)=", re.MULTILINE)
SIGNS_OF_A_GPU = ("/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")


def main() -> int:
    """Install; returns pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", metavar="cpu|default|ADDRESS", help="default: chosen, see above")
    parser.add_argument("requirements", type=Path, help="the file that pins torch")
    arguments = parser.parse_args()
    pin = torch_pin(arguments.requirements.read_text(encoding="utf-8"))
    index, is_own_choice = choose_index(arguments.torch, sys.platform, has_gpu(), pip_settings())
    if index:
        print(f"  {pin} from {index}: a build for CPUs; TORCH=default takes pip's", flush=True)
        code = install(["--no-deps", "--index-url", index, *(["--retries", "1"] if is_own_choice else []), pin])
        if code == 0 or not is_own_choice:
            return code
        print("  that index does not answer: taking pip's default build", flush=True)
    return install([pin])


def choose_index(wanted: str, system: str, gpu: bool, settings: str) -> tuple[str, bool]:
    """The index that torch comes from, empty for pip's own; and whether we chose it, not the user.

    Args:
        wanted: what the user said: cpu, default, an address, or nothing.
        settings: what `pip config list` prints.
    """
    if wanted == "cpu":
        return CPU_INDEX, False
    if wanted:
        return ("" if wanted == "default" else wanted), False
    if system != "linux" or gpu or SOURCES.search(settings):
        return "", True
    return CPU_INDEX, True


def torch_pin(requirements: str) -> str:
    """`torch==2.13.0`, out of the text of a requirements file."""
    match = re.search(r"^torch==\S+", requirements, re.MULTILINE)
    if match is None:
        raise SystemExit("the requirements pin no torch")
    return match[0]


def has_gpu() -> bool:
    """Return True if there is any sign of an NVIDIA GPU, also under WSL."""
    return shutil.which("nvidia-smi") is not None or any(Path(sign).exists() for sign in SIGNS_OF_A_GPU)


def pip_settings() -> str:
    """Return the settings of pip from files and variables."""
    return subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout


def install(arguments: Sequence[str]) -> int:
    """`pip install`, with its bars on a terminal and silent elsewhere."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    return subprocess.run([*PIP, "install", *quiet, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
