"""The command line as a user meets it: results, files, and one line for each mistake."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from kvjax.cli import main
from kvjax.demo import first_tokens

FIXTURE = Path(__file__).parent / "fixtures" / "llama_gqa"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint whose 256 tokens are the bytes."""
    directory = tmp_path_factory.mktemp("checkpoint")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, directory / name)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("It was a dark and stormy night; the rain fell in torrents. " * 20)
    return file


def failure(capsys, *arguments) -> str:
    """The one line of a refused call."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("kvjax: error: ")
    return error


DEMO_SIZES = ("--document-tokens", 400, "--scored-tokens", 40, "--max-new-tokens", 4)


def test_demo_compares_two_caches(checkpoint, text, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png")}
    main(
        ["demo", "--model", str(checkpoint), "--document", str(text), "--question", "What?"]
        + ["--json", str(files["json"]), "--plot", str(files["png"])]
        + [str(argument) for argument in DEMO_SIZES]
    )
    printed = capsys.readouterr().out
    for row in ("prefill, tokens/s", "cache, total", "bits per element", "top-1 agreement"):
        assert row in printed
    result = json.loads(files["json"].read_text())
    full, tiered = result["caches"]["full"], result["caches"]["balanced"]
    assert result["prompt_tokens"] > 360
    assert full["ratio_to_bf16"] == 1.0 and full["bits_per_element"] == 16.0
    for cache in (full, tiered):
        assert cache["cache_bytes"] == sum(cache["cache_bytes_by_tier"].values())
    assert result["quality"]["scored_tokens"] == 39
    assert result["quality"]["kl_mean"] > 0  # some tokens were coded
    assert result["versions"]["jax"] and result["date"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_eval_writes_the_documented_keys(checkpoint, text, tmp_path, capsys):
    file = tmp_path / "out.json"
    main(
        ["eval", str(checkpoint), "--text", str(text), "--tokens", "400", "--preset", "safe"]
        + ["--json", str(file)]
    )
    result = json.loads(file.read_text())
    for key in ("perplexity", "perplexity_full", "perplexity_ratio", "kl_mean", "kl_p99"):
        assert result[key] >= 0
    assert 0 <= result["top1_agreement"] <= 1
    assert result["cache_bytes"] > 0 and result["bits_per_element"] > 4
    assert result["score_from"] == 4 + 128 + 64 - 1
    assert result["scored_tokens"] == 400 - result["score_from"] - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]  # no scraps
    assert "mean KL" in capsys.readouterr().out


def test_full_preset_is_its_own_reference(checkpoint, text, tmp_path):
    file = tmp_path / "out.json"
    main(
        ["eval", str(checkpoint), "--text", str(text), "--tokens", "300", "--preset", "full"]
        + ["--json", str(file)]
    )
    result = json.loads(file.read_text())
    assert result["kl_mean"] == 0 and result["top1_agreement"] == 1


def test_unknown_preset_lists_the_known(checkpoint, text, capsys):
    error = failure(capsys, "demo", "--model", checkpoint, "--preset", "tiny")
    assert "'tiny'" in error and "balanced" in error and "literal" in error


def test_mistakes_are_one_line(checkpoint, text, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    model = ("--model", checkpoint)
    read = ("eval", checkpoint, "--text", text)
    cases = [
        (("demo", *model, "--document", tmp_path / "none.txt"), "none.txt"),
        (("demo", *model, "--document", empty), "empty"),
        (("demo", *model, "--document", binary), "UTF-8"),
        (("demo", *model, "--document", tmp_path), "cannot read"),
        (("demo", "--model", tmp_path / "nowhere"), "nowhere"),
        (("demo", *model, "--document", text, "--scored-tokens", 1), "scored_tokens 1"),
        (("demo", *model, "--document", text, "--document-tokens", 100), "document_tokens"),
        (("demo", *model, "--document", text, *DEMO_SIZES[:-1], 0), "max_new_tokens is 0"),
        (("demo", *model, "--json", tmp_path / "no" / "x.json"), "cannot write"),
        (("demo", *model, "--json", tmp_path), "is a folder"),
        (("demo", *model, "--plot", tmp_path / "x.gif"), ".gif"),
        (("demo", *model, "--cache-dtype", "int8"), "int8"),
        ((*read, "--tokens", 100_000), "1180 tokens"),
        ((*read, "--tokens", 300, "--score-from", 300), "scoring starts at 300"),
        ((*read, "--tokens", 300, "--capacity", 200), "capacity of 200"),
        ((*read, "--tokens", 0), "--tokens is 0"),
    ]
    for arguments, expected in cases:
        assert expected in failure(capsys, *arguments), arguments


def test_checkpoint_without_tokenizer(text, capsys):
    assert "tokenizer.json" in failure(capsys, "eval", FIXTURE, "--text", text)


def test_debug_shows_the_error(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        main(["demo", "--model", str(checkpoint), "--document", str(tmp_path / "x"), "--debug"])


def test_long_tokens_are_not_taken_for_a_short_text():
    class Long:  # 50 characters a token
        def encode(self, text):
            return list(range(-(-len(text) // 50)))

    assert first_tokens(Long(), "x" * 5000, 90) == list(range(90))
    assert first_tokens(Long(), "x" * 5000, 200) == list(range(100))
