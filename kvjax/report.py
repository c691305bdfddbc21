"""How results are shown and kept: tables, JSON with provenance, plots."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import tempfile
from typing import Any

import jax
import rich.console
import rich.markup
import rich.table

from .errors import KvjaxError

PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "tokenizers", "gguf", "safetensors")


def provenance() -> dict[str, Any]:
    """Versions, device, date and commit: what a number needs to be believed later."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """The checkout's commit, marked if files differ from it; None outside a checkout."""
    root = pathlib.Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def require_writable(*files: pathlib.Path | None) -> None:
    """Refuse output files that could not be written, before the work that fills them.

    Raises:
      KvjaxError: the folder is missing or not writable, or the file is a folder.
    """
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise KvjaxError(f"{file} is a folder: expected the name of a file to write")
        if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
            raise KvjaxError(f"cannot write {file}: expected its folder to exist and be writable")


def require_plotting(file: pathlib.Path | None) -> None:
    """Refuse a plot that cannot be drawn, before the work that it shows."""
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise KvjaxError("plots need matplotlib: install it with pip install 'kvjax[plot]'")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise KvjaxError(f"{file} has the ending {file.suffix!r}: expected .png, .svg or .pdf")


def write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
    """Write it whole or not at all.

    Raises:
      KvjaxError: the disk is full, say; nothing is left behind.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    file = file.resolve()  # a link stays a link
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")  # a device or a pipe cannot be replaced
        return
    scrap = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=f".{file.name}.", delete=False, encoding="utf-8"
        ) as out:
            scrap = out.name
            out.write(text)
        os.chmod(scrap, 0o644)
        os.replace(scrap, file)
    except OSError as error:
        if scrap is not None:
            pathlib.Path(scrap).unlink(missing_ok=True)
        raise KvjaxError(f"cannot write {file}: {error.strerror}") from None


def gigabytes(count: int) -> str:
    """A count of bytes for people: 26.84 GB, 32.9 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def without_total(table: dict[str, int]) -> dict[str, int]:
    """The rows of a table of bytes that add up to its total."""
    return {kind: size for kind, size in table.items() if kind != "total"}


@dataclasses.dataclass(frozen=True)
class Column:
    """One cache in a comparison: what was measured of it."""

    name: str
    rows: dict[str, str]


def print_table(console: rich.console.Console, title: str, columns: list[Column]) -> None:
    """Rows in the order of the last column; "-" where another lacks one."""
    table = rich.table.Table(title=rich.markup.escape(title), title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.name, justify="right")
    # The last column has the most rows, in the best order.
    for row in dict.fromkeys(row for column in reversed(columns) for row in column.rows):
        table.add_row(row, *(column.rows.get(row, "-") for column in columns))
    console.print(table)
