"""Who may import whom, read from the source; and what `import kvjax` must not touch."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Each line imports only from lines above it. Modules on one line do not import each other; the
# files of one folder do.
ORDER = """
    kvjax_kernels
    errors
    config
    cache_config
    streams
    rope
    layers
    quant
    attention
    cache
    cached_attention
    variants
    block
    plan
    model
    sampling
    decode
    tokenizer chat
    importers
    evaluate
    report plots
    demo
    cli
    __main__ __init__
"""
# Narrower than their line: usable without the model.
ONLY = {"tokenizer": {"errors"}, "chat": {"errors"}}

LINES = [line.split() for line in ORDER.strip().splitlines()]
DEPTH = {module: depth for depth, line in enumerate(LINES) for module in line}


def module_path(file: pathlib.Path, top: pathlib.Path) -> list[str]:
    """['kvjax', 'cache', 'ring'] for kvjax/cache/ring.py; __init__ is kept as a name."""
    return list(file.relative_to(top).with_suffix("").parts)


def imported(file: pathlib.Path, top: pathlib.Path):
    """(line, dotted path) of all imports in a file, also those inside functions."""
    package = module_path(file, top)[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def layer_of(path: list[str], unlisted: set[str]) -> str | None:
    """The name in ORDER of a dotted path; None for other people's, and for a file without a line
    there, which is reported once as such."""
    if path[0] == "kvjax_kernels":
        return "kvjax_kernels"
    if path[0] != "kvjax":
        return None
    if len(path) > 1 and path[1] in unlisted:
        return None
    # `from kvjax import attend` takes a public name, so it imports __init__.
    return path[1] if len(path) > 1 and path[1] in DEPTH else "__init__"


def violations(root: pathlib.Path) -> list[str]:
    found = []
    unlisted = {path.stem for path in (root / "kvjax").glob("[!_.]*")} - DEPTH.keys()
    for top, package in ((root, "kvjax"), (root / "kernels", "kvjax_kernels")):
        for file in sorted((top / package).rglob("*.py")):
            path = module_path(file, top)
            own = path[0] if package == "kvjax_kernels" else path[1]
            place = file.relative_to(root)
            if own not in DEPTH:
                found.append(f"{place}: {own} has no line in ORDER of tests/test_layers.py")
                continue
            for line, target in imported(file, top):
                other = layer_of(target, unlisted)
                if other in (None, own):
                    continue
                if DEPTH[other] >= DEPTH[own]:
                    found.append(f"{place}:{line}: {own} imports {other}, which is not above it")
                elif own in ONLY and other not in ONLY[own]:
                    found.append(f"{place}:{line}: {own} imports {other}, not in its ONLY")
    return found


def test_imports_follow_the_order():
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_kernels_is_no_package():
    # `kernels` is the import name of someone else's distribution.
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    "file, source, message",
    [
        ("kvjax/config.py", "from .model import Model", "config imports model"),
        ("kvjax/config.py", "def f():\n    from . import model", "2: config imports model"),
        ("kvjax/config.py", "import kvjax.cache.ring", "config imports cache"),
        ("kvjax/cache/ring.py", "from ..block import Block", "cache imports block"),
        ("kvjax/cli.py", "from . import __version__", "cli imports __init__"),
        ("kvjax/cli.py", "import kvjax", "cli imports __init__"),
        ("kvjax/chat.py", "from . import tokenizer", "chat imports tokenizer"),
        ("kvjax/chat.py", "from .config import ModelConfig", "config, not in its ONLY"),
        ("kvjax/chat.py", "import kvjax_kernels", "kvjax_kernels, not in its ONLY"),
        ("kvjax/helpers.py", "", "helpers has no line in ORDER"),
        ("kernels/kvjax_kernels/append/triton.py", "import kvjax", "imports __init__"),
        ("kernels/kvjax_kernels/codes.py", "from kvjax.errors import KvjaxError", "errors"),
    ],
)
def test_planted_violation_is_found(tmp_path, file, source, message):
    plant(tmp_path, file, source)
    (found,) = violations(tmp_path)
    assert found.startswith(file) and message in found


@pytest.mark.parametrize(
    "file, source",
    [
        ("kvjax/cache/ring.py", "from . import tiered\nfrom .select import top"),
        ("kvjax/cache/__init__.py", "from .ring import Ring as Ring"),
        ("kvjax/variants/grouped.py", "from ..config import AttentionConfig"),
        ("kvjax/attention.py", "from kvjax_kernels.decode_attention import decode_attention"),
        ("kvjax/chat.py", "import jinja2\nfrom .errors import KvjaxError"),
        ("kvjax/__init__.py", "from .model import Model as Model"),
        ("kvjax/__main__.py", "from .cli import main"),
        ("kernels/kvjax_kernels/append/triton.py", "from .. import codes\nfrom . import tiles"),
    ],
)
def test_allowed_import_is_not_reported(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert violations(tmp_path) == []


def plant(root, file, source):
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source)


def test_importing_touches_no_device_and_no_optional_package(tmp_path):
    optional = ["torch", "triton", "jax_triton", "matplotlib"]
    for name in optional:  # stand-ins: an import is seen whether or not the package is installed
        (tmp_path / f"{name}.py").write_text("")
    program = f"import sys, kvjax; print([m for m in {optional} if m in sys.modules])"
    # Under a platform that does not exist, anything that starts a back end raises.
    environment = os.environ | {
        "JAX_PLATFORMS": "nowhere",
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels"))),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
