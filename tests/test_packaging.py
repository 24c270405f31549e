"""Packaging: what pyproject.toml promises, and what the distributions that it builds hold and do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from glob import glob
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import horovod_oktopk
from tests.launch import horovodrun

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]
pytestmark = pytest.mark.xdist_group("packaging")  # one process, so that the wheel is built once


def modules() -> list[str]:
    """Return the modules as they are installed, by their paths."""
    names = glob("horovod_oktopk/**/*.py", root_dir=ROOT, recursive=True)  # which follows links, as rglob does not
    return sorted(names)


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **environment},
                          capture_output=True, text=True, check=False)


def succeed(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What pyproject.toml says.

def test_the_oldest_python_is_the_one_that_the_tools_check() -> None:
    oldest = TOOL["mypy"]["python_version"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert TOOL["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_horovod_says_for_which_frameworks_it_was_compiled() -> None:
    """It compares their versions when it is imported, and warns whoever has other ones."""
    said = json.loads(Path(distribution("horovod").locate_file("horovod/metadata.json")).read_text())
    assert said["pytorch"] == version("torch")
    assert said["tensorflow"] == version("tensorflow")


def test_wheels_are_built_for_the_pythons_that_the_classifiers_name() -> None:
    named = re.findall(r"Python :: (3\.\d+)\b", "\n".join(PROJECT["classifiers"]))
    assert TOOL["cibuildwheel"]["build"].split() == [f"cp{each.replace('.', '')}-manylinux*" for each in named]


def test_no_install_builds_horovod() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert not [requirement for group in groups for requirement in group if requirement.startswith("horovod")]


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    version = horovod_oktopk.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


USED = """
import pathlib, sys, horovod_oktopk
pathlib.Path(sys.argv[1], f"rank-{hvd.rank()}").write_text(horovod_oktopk.__file__)
"""
"""Lines that make an example tell which package it had."""


# What is built: the source distribution from a copy of the tree, and the wheel from the source distribution.

@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree, with its links, and without what was built in it."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    built = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "runs", "site")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=built)
    return tree


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    succeed("-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    succeed("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".", cwd=sdist)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the wheel is installed, alone."""
    folder = tmp_path_factory.mktemp("installed")
    succeed("-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def only_numpy(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return PYTHONPATH for a Python that is started with -S: the wheel, NumPy, and nothing else."""
    folder = tmp_path_factory.mktemp("only_numpy")
    for path in Path(np.__file__).parents[1].glob("numpy[.-]*"):  # its libraries, and what tells its version
        (folder / path.name).symlink_to(path)
    (folder / "numpy").symlink_to(Path(np.__file__).parent)
    return os.pathsep.join([str(installed), str(folder)])


@pytest.fixture(scope="module")
def used_checkout(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkout from which the package was installed, not in editable mode, and the folder of that."""
    folder = tmp_path_factory.mktemp("from_checkout")
    succeed("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target", folder, ".",
            cwd=checkout)
    return checkout, folder


WHERE = """
import horovod_oktopk.torch, horovod_oktopk.tensorflow.keras
from horovod_oktopk.kernels import KERNELS
print(horovod_oktopk.torch.__file__, KERNELS.name)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first compiles the kernels and builds a wheel: minutes on a busy machine
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_package_is_whole_in_its_checkout_and_outside(used_checkout: tuple[Path, Path], tmp_path: Path,
                                                          place: str) -> None:
    """Inside, Python takes the checkout's own folder; outside, what was installed."""
    checkout, folder = used_checkout
    cwd, used = (checkout, checkout) if place == "inside" else (tmp_path, folder)
    (cwd / "train.py").write_text(WHERE)
    expected = f"{used / 'horovod_oktopk' / 'torch' / '__init__.py'} C++"
    for command in (["train.py"], ["-c", WHERE]):
        assert succeed(*command, cwd=cwd, PYTHONPATH=str(folder)).splitlines()[-1] == expected
    said = succeed("-m", "horovod_oktopk", "check", cwd=cwd, PYTHONPATH=str(folder))
    assert "[X] Kernels: C++" in said
    assert said.splitlines()[-1] == "OkTopk can be used here."
    version = succeed(folder / "bin" / "horovod-oktopk", "--version", cwd=cwd, PYTHONPATH=str(folder))
    assert version == f"horovod_oktopk {horovod_oktopk.__version__}\n"


@pytest.mark.slow
def test_mypy_finds_the_package_in_its_checkout(used_checkout: tuple[Path, Path]) -> None:
    """It sees no other packages: not PyTorch, whose types take it a minute, nor this one, where it is installed."""
    program = "from horovod_oktopk.torch import OkTopk\nreveal_type(OkTopk().region_interval)\n"
    done = run("-m", "mypy", "--config-file=", "--follow-imports=silent", "--no-site-packages",
               "--ignore-missing-imports", "-c", program, cwd=used_checkout[0])
    assert 'Revealed type is "builtins.int"' in done.stdout, done.stdout + done.stderr


def test_the_sources_cannot_be_imported_twice() -> None:
    done = run("-c", "import integrations.torch", cwd=ROOT)
    assert "import horovod_oktopk.torch" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_source_distribution_has_sources_tests_and_licences(sdist: Path) -> None:
    for name in ("LICENSE", "NOTICE", "CITATION.cff", "horovod_oktopk/kernels/native/bindings.cpp",
                 "horovod_oktopk/kernels/native/blocks.hpp", "horovod_oktopk/torch/plugin.py", "tests/conftest.py",
                 "benchmarks/__init__.py", "examples/minimal_pytorch.py", "scripts/environment.sh",
                 "requirements/environment.txt"):
        assert (sdist / name).is_file(), name
    assert not (sdist / "docs" / "images").exists()


@pytest.mark.slow
def test_the_wheel_has_all_modules_the_kernels_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert sorted(name for name in names if name.endswith(".py")) == modules()
    others = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert {re.sub(r"\.cpython.*\.so$", ".so", name) for name in others} == {
        "horovod_oktopk/kernels/_native.so", "horovod_oktopk/py.typed"}
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


@pytest.mark.slow
def test_with_numpy_alone_the_checks_run_and_say_what_is_missing(only_numpy: str, tmp_path: Path) -> None:
    done = run("-S", "-m", "horovod_oktopk", "check", cwd=tmp_path, PYTHONPATH=only_numpy)
    assert done.returncode == 1, done.stderr
    for line in (f"[X] horovod_oktopk: {horovod_oktopk.__version__}", f"[X] NumPy: {np.__version__}",
                 "[X] Kernels: C++", "[ ] Horovod: not installed", "[ ] PyTorch: PyTorch is not installed",
                 "[ ] TensorFlow: TensorFlow is not installed", "[ ] MPI: Horovod is not installed",
                 "[ ] Gloo: Horovod is not installed"):
        assert line in done.stdout
    predicted = succeed("-S", "-m", "horovod_oktopk", "advise", "--parameters", "1000000", "--ranks", "8",
                        "--bandwidth", "1gbit", cwd=tmp_path, PYTHONPATH=only_numpy)
    assert "OkTopk" in predicted


@pytest.mark.slow
@pytest.mark.parametrize(("module", "expected"), [
    ("torch", "horovod_oktopk.torch needs PyTorch, and Horovod 0.28.1 built for it (HOROVOD_WITH_PYTORCH=1)"),
    ("tensorflow", "horovod_oktopk.tensorflow needs TensorFlow"),
    ("tensorflow.keras", "horovod_oktopk.tensorflow needs TensorFlow")])
def test_an_integration_without_its_framework_names_it(only_numpy: str, tmp_path: Path, module: str,
                                                       expected: str) -> None:
    done = run("-S", "-c", f"import horovod_oktopk.{module}", cwd=tmp_path, PYTHONPATH=only_numpy)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: {expected}")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pytorch", "keras"])
def test_the_installed_wheel_trains(installed: Path, tmp_path: Path, framework: str) -> None:
    program = tmp_path / "program.py"
    program.write_text((ROOT / f"examples/minimal_{framework}.py").read_text() + USED)
    job = horovodrun("mpi", 2, str(program), str(tmp_path), extra={"PYTHONPATH": str(installed)})
    assert job.returncode == 0, job.output
    used = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert used == [str(installed / "horovod_oktopk/__init__.py")] * 2
    accuracies = re.findall(r"test accuracy ([\d.]+)%", job.output)
    assert float(accuracies[-1]) > 90
