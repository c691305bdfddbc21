"""The search for a Python and the judgement of a .venv, with fake interpreters; no installs."""

import pathlib
import subprocess
import sys

import pytest

CI = pathlib.Path(__file__).parents[1] / ".ci"
# As a user's PATH would be, but without any Python in it.
TOOLS = ("sh", "ls", "grep", "sort")


@pytest.fixture
def path(tmp_path):
    """A folder that is the whole PATH: what the script needs, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = next(
            p / name for p in map(pathlib.Path, ("/usr/bin", "/bin")) if (p / name).exists()
        )
        (folder / name).symlink_to(found)
    return folder


def good(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not a symlink: this Python may live in .venv, and finds itself by its path.
    script(file, f'exec "{sys.executable}" "$@"')
    return file


def refusing(file):
    script(file, 'echo "pyenv: command not found" >&2; exit 127')


def old(file):
    pretending(file, "sys.version_info = (3, 11, 7)")


def without_ensurepip(file):
    pretending(file, "sys.modules['ensurepip'] = None")


def pretending(file, statement):
    """This Python, called as `-I -c PROGRAM`, with a statement run before the program."""
    program = f"import sys; {statement}; exec(sys.argv[1])"
    script(file, f'exec "{sys.executable}" -c "{program}" "$3"')


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def find(path, *arguments, **environment):
    return subprocess.run(
        ["/bin/sh", CI / "find-python", *arguments],
        env={"PATH": str(path), "HOME": str(path.parent / "home"), **environment},
        capture_output=True,
        text=True,
    )


def test_newest_name_on_path_wins(path):
    good(path / "python3")
    good(path / "python3.12")
    assert find(path).stdout == "python3.12\n"


@pytest.mark.parametrize("fake", [refusing, old, without_ensurepip])
def test_interpreter_that_cannot_do_it_does_not_count(path, fake):
    fake(path / "python3.13")
    fake(path / "python3.12")
    assert find(path).returncode == 1
    good(path / "python3")
    found = find(path)
    assert (found.returncode, found.stdout) == (0, "python3\n")


def test_pyenv_is_searched_last_and_newest_first(path, tmp_path):
    versions = tmp_path / "home" / ".pyenv" / "versions"
    old(versions / "3.9.18" / "bin" / "python3")
    good(versions / "3.12.9" / "bin" / "python3")
    newer = good(versions / "3.12.10" / "bin" / "python3")
    refusing(versions / "3.13.0" / "bin" / "python3")
    (versions / "3.14.0").mkdir()  # half-installed
    good(versions / "3.15-dev" / "bin" / "python3")
    refusing(path / "python3.12")
    assert find(path).stdout == f"{newer}\n"
    good(path / "python3")
    assert find(path).stdout == "python3\n"


def test_pyenv_root_is_followed(path, tmp_path):
    there = good(tmp_path / "elsewhere" / "versions" / "3.12.1" / "bin" / "python3")
    assert find(path).returncode == 1
    assert find(path, PYENV_ROOT=str(tmp_path / "elsewhere")).stdout == f"{there}\n"


def test_nothing_found_is_one_line_that_says_how_to_name_one(path):
    found = find(path)
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    assert "Python 3.12" in line and "make demo PYTHON=/path/to/python3.12" in line


def test_named_interpreter_is_taken_and_not_second_guessed(path, tmp_path):
    good(path / "python3.13")
    mine = good(tmp_path / "mine")
    assert find(path, str(mine)).stdout == f"{mine}\n"
    assert find(path, "python3.13").stdout == "python3.13\n"
    assert find(path, "").stdout == "python3.13\n"  # PYTHON= empty is PYTHON not given


@pytest.mark.parametrize("fake", [refusing, old, without_ensurepip, None])
def test_named_interpreter_that_cannot_do_it_is_an_error(path, tmp_path, fake):
    good(path / "python3.13")  # never taken instead
    mine = tmp_path / "mine"
    if fake:
        fake(mine)
    found = find(path, str(mine))
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"PYTHON={mine} is not usable")


@pytest.fixture
def venv(tmp_path):
    """The least that venv-ok takes for a .venv with pip in it."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'VIRTUAL_ENV="{folder}"\n')
    (folder / "bin" / "python").symlink_to(pathlib.Path(sys.executable).resolve())
    home = pathlib.Path(sys.executable).resolve().parent
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    package(folder, "pip")
    return folder


def package(venv, name, record=True):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    info = venv / "lib" / version / "site-packages" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if record:
        (info / "RECORD").write_text("")


def venv_ok(folder):
    return subprocess.run(["sh", CI / "venv-ok", folder]).returncode == 0


def test_whole_venv_is_kept(venv):
    package(venv, "whole")
    assert venv_ok(venv)


def test_venv_with_a_half_installed_package_is_not(venv):
    package(venv, "half", record=False)
    assert not venv_ok(venv)


def test_venv_without_pip_is_not(venv):
    (venv / "lib").rename(venv / "lib.gone")
    assert not venv_ok(venv)


def test_venv_of_another_checkout_is_not(venv, tmp_path):
    (tmp_path / "copy").mkdir()
    assert not venv_ok(venv.rename(tmp_path / "copy" / ".venv"))


def test_missing_venv_is_not(tmp_path):
    assert not venv_ok(tmp_path / ".venv")
