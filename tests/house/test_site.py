"""The documentation site: its navigation has every page, and what leads outside docs/ is named instead of linked."""

import ast
import re
from typing import Any

import yaml
from tools.docs_hooks import on_page_markdown

from tests.house.source_tree import ROOT, tree

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(node: Any) -> list[str]:
    """The files of a navigation."""
    if isinstance(node, str):
        return [node]
    return [page for item in (node.values() if isinstance(node, dict) else node) for page in pages(item)]


def test_the_navigation_has_every_page_once():
    assert sorted(pages(SITE["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))


def test_hooks_and_pins_are_there():
    assert all((ROOT / hook).exists() for hook in SITE["hooks"])
    lines = [line for line in (ROOT / "requirements" / "docs.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert {"mkdocs-material", "mkdocstrings-python"} <= {line.split("==")[0] for line in lines}


def test_what_lies_outside_is_named():
    assert on_page_markdown("see [README](../README.md#two-commands).") == "see `README.md`."
    assert on_page_markdown("[one of ten lines](../examples/x.py)") == (
        "one of ten lines (`examples/x.py` in the repository)"
    )
    assert on_page_markdown("[scheduler](scheduler.md) ![a](../b.svg)") == "[scheduler](scheduler.md) ![a](../b.svg)"


def test_every_name_of_the_api_page_exists():
    """Without importing: mkdocstrings does not either."""
    names = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 5
    for name in names:
        module, _, last = name.rpartition(".")
        path = (module if last[0].isupper() else name).replace(".", "/")
        classes = {node.name for node in tree(ROOT / "src" / f"{path}.py").body if isinstance(node, ast.ClassDef)}
        assert last in classes or not last[0].isupper(), name


def test_every_family_is_on_the_page_of_models():
    from tokenmill.model.models.families import FAMILIES
    from tokenmill.model.models.weight_names import LLAMA_NAMES

    text = (DOCS / "models.md").read_text()
    for name, family in FAMILIES.items():
        files = "" if family.gguf is None else family.gguf.name
        files = files or ("llama" if family.weight_names is LLAMA_NAMES and not family.has_text_config else "")
        assert f"`{name}` | {files} |".replace("  ", " ") in text
