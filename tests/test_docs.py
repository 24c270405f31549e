"""Truth of README.md and docs/: code runs, options and defaults are those of the code, and links lead on."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod_oktopk import OkTopk, OkTopkError, Partial, StepAhead, StepReport
from horovod_oktopk.__main__ import add_advise
from horovod_oktopk.schemes.options import Scheme
from tests.docs.blocks import BLOCKS, FRAGMENTS, PAGES, PROGRAMS, ROOT, Block
from tests.docs.names import mistakes
from tests.launch import horovodrun, torchrun
from tests.worker import Outcome

DOCS = ROOT / "docs"
MODULES = ["horovod_oktopk", "horovod_oktopk.torch", "horovod_oktopk.distributed", "horovod_oktopk.tensorflow",
           "horovod_oktopk.tensorflow.keras", "horovod_oktopk.tensorflow.keras.callbacks",
           "horovod_oktopk.tensorflow.keras.elastic"]


# Code.

@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_uses_names_and_arguments_that_exist(block: Block) -> None:
    assert not list(mistakes(block.tree))


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_runs(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(block.code)
    job = horovodrun("mpi", 2, str(program))
    assert job.returncode == 0, job.output


@pytest.mark.slow
@pytest.mark.xdist_group("fragments")  # one process, so that each framework has one job
@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
def test_a_fragment_runs(block: Block, fragments: Callable[[str], dict[str, Outcome]]) -> None:
    outcome = fragments(block.framework).get(str(block), "it did not run, as one before it ended the job")
    assert outcome is None, outcome


@pytest.fixture(scope="module")
def fragments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Outcome]]:
    """Return a function that runs a framework's fragments, in one job, and returns their outcomes."""
    @cache
    def run(framework: str) -> dict[str, Outcome]:
        folder = tmp_path_factory.mktemp(framework)
        launch = torchrun if framework == "distributed" else partial(horovodrun, "mpi")
        job = launch(2, "-m", "tests.docs.worker", framework, str(folder))
        report = folder / "report.json"
        assert report.exists(), job.output
        found: dict[str, Outcome] = json.loads(report.read_text())
        return found

    return run


# Public names.

def public_names() -> list[tuple[str, str]]:
    """Return (module, name), read from the source, so that nothing is imported to collect tests."""
    return [(module, name) for module in MODULES for name in names_of(module)]


def names_of(module: str) -> list[str]:
    source = ROOT / module.replace(".", "/")
    path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    (names,) = re.findall(r"__all__ = (\[.*?\])", path.read_text(), flags=re.DOTALL)
    return [name for name in ast.literal_eval(names) if name not in ("callbacks", "elastic", "run")]


@pytest.mark.parametrize(("module", "name"), public_names())
def test_a_public_name_explains_each_of_its_arguments(module: str, name: str) -> None:
    documented = getattr(importlib.import_module(module), name)
    if documented is StepReport or issubclass_of(documented, OkTopkError):
        return  # made by the package, and not by users
    takes = set(inspect.signature(documented).parameters)
    if issubclass_of(documented, Scheme) and documented is not OkTopk:
        takes -= {each.name for each in dataclasses.fields(Scheme)}  # explained in OkTopk
    assert explained(documented) == takes


@pytest.mark.parametrize(("module", "name"), public_names())
def test_the_example_of_a_public_name_uses_names_and_arguments_that_exist(module: str, name: str) -> None:
    text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    examples = "".join(example.source for example in doctest.DocTestParser().get_examples(text))
    imports = ["import horovod_oktopk.tensorflow.keras as hvd_keras",
               f"from {module} import {', '.join(names_of(module))}"]
    assert not list(mistakes(ast.parse("\n".join([*imports, examples]))))


def issubclass_of(documented: object, base: type) -> bool:
    return isinstance(documented, type) and issubclass(documented, base)


def explained(documented: Any) -> set[str]:
    """Return the names under "Args:" of its docstring."""
    (text,) = re.findall(r"^Args:\n((?: .*\n?)+)", inspect.getdoc(documented) or "", flags=re.MULTILINE) or [""]
    return set(re.findall(r"^    \*{0,2}(\w+):", text, flags=re.MULTILINE))


def test_the_reference_has_all_public_names() -> None:
    shown = set(re.findall(r"^::: [\w.]*\.(\w+)$", "".join(path.read_text() for path in DOCS.glob("reference/*.md")),
                           flags=re.MULTILINE))
    assert {name for _, name in public_names()} == shown


# Tables.

@pytest.mark.parametrize(("page", "options"), [("options", OkTopk()), ("step_ahead", StepAhead()),
                                               ("stragglers", Partial())])
def test_the_table_of_options_has_all_of_them_with_their_defaults(page: str, options: Any) -> None:
    text = (DOCS / "guides" / f"{page}.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, flags=re.MULTILINE)
    names = {each.name for each in dataclasses.fields(options) if each.init}
    assert {name for name, _ in rows} == names
    for name, default in rows:
        if name == "inner":
            assert default == "OkTopk()"
        else:
            assert ast.literal_eval(default) == getattr(options, name), name


def test_the_table_of_the_command_line_has_all_arguments() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_advise(parser)
    rows = re.findall(r"^\| `(--[\w-]+)`", (DOCS / "reference" / "command_line.md").read_text(), flags=re.MULTILINE)
    assert rows == [name for name in parser.format_usage().replace("[", " ").replace("]", " ").split()
                    if name.startswith("--")]


# Pages.

def test_every_page_is_in_the_navigation() -> None:
    found = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(pages_of(configuration()["nav"])) == found


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(each)]


def configuration() -> Any:
    """Return mkdocs.yml, without what stands for objects of MkDocs."""
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, tag, node: None)
    Loader.add_multi_constructor("!", lambda loader, tag, node: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_links_to_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if "://" not in target and not name.startswith("assets/"):  # made with the site
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


@cache
def anchors(path: Path) -> set[str]:
    """Return anchors: of headings, as MkDocs and GitHub name them, of what the reference shows, and its own."""
    text = path.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    made = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    return made | set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)) | set(re.findall(r'id="([^"]+)"', text))
