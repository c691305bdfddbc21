"""Result files: whole or not at all, and nothing replaced that is no file."""

import json
import os
import threading

import pytest
import rich.console

from kvjax.errors import KvjaxError
from kvjax.report import Column, gigabytes, print_table, write_json


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(target.read_text()) == {"a": 1}


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join()
    assert json.loads(read[0]) == {"a": 1} and pipe.is_fifo()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    file.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(KvjaxError, match="out.json: No space left on device"):
        write_json(file, {"a": 1})
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_numbers_that_json_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "out.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


def test_table_takes_any_name(capsys):
    columns = [Column("one", {"total": "1"}), Column("two", {"part": "2", "total": "3"})]
    print_table(rich.console.Console(width=60), "[/bold]m[x]", columns)
    printed = capsys.readouterr().out
    assert "[/bold]m[x]" in printed
    assert printed.index("part") < printed.index("total")


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (26_843_545_600, "26.84 GB")]
)
def test_gigabytes(count, text):
    assert gigabytes(count) == text
