"""The wheel holds the two packages and nothing else; the source archive can build and test it."""

import pathlib
import tarfile
import zipfile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = pathlib.Path(__file__).parents[1]


def sources(top: str) -> set[str]:
    files = (ROOT / top).rglob("*")
    return {
        str(file.relative_to((ROOT / top).parent))
        for file in files
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_exactly_both_packages(wheel):
    files = {name for name in wheel if ".dist-info/" not in name}
    assert files == sources("kvjax") | sources("kernels/kvjax_kernels")
    assert "kvjax/py.typed" in files


def test_wheel_metadata(wheel):
    info = {
        name.split(".dist-info/")[1]: text.decode()
        for name, text in wheel.items()
        if ".dist-info/" in name
    }
    assert "kvjax = kvjax.cli:main" in info["entry_points.txt"]
    assert "License-Expression: Apache-2.0\n" in info["METADATA"]
    assert "Apache License" in info["licenses/LICENSE"]


def test_source_archive_holds_what_it_needs(tmp_path):
    (built,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        ".ci/find-python",
        "kernels/kvjax_kernels/__init__.py",
        "kvjax/config.py",
        "tests/conftest.py",
    }
    assert wanted <= names
    assert not any(name.startswith((".venv", ".git/")) for name in names)
