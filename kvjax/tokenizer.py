"""Text to token ids and back, over the `tokenizers` library. Chat templates: `kvjax.chat`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .errors import KvjaxError, choose

# Control tokens that end an answer whatever the metadata says: many files name only the end of
# text as their end token, and a chat model then talks on past the end of its turn.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)

# Cutting a text before merging, in Llama 3 and Qwen 2: they differ in the digits of one piece.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    "gpt-2": [],  # the regular expression of ByteLevel itself
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", r"\p{N}{1,3}")), "isolated")],
    "qwen2": [pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", r"\p{N}")), "isolated")],
}
_OTHER_NAMES = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types of GGUF


class Tokenizer:
    """Ids of a text, the text of ids, and what generation must know about them.

    Special tokens written in a text, such as `<|im_end|>`, become their ids: a rendered chat
    needs that, and a text from someone else can therefore end a turn.

    Attributes:
      bos_id: the id that begins a text, or None.
      eos_ids: every id that ends an answer; the one the files name as the end token is first.
      chat_template: a Jinja template for `kvjax.chat.render`, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        # A tokenizer.json may carry the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        named = [special[token] for token in _END_TOKENS if token in special]
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *named]))
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the embedding of a model may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self._backend.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._backend.id_to_token(self.eos_ids[0]) if self.eos_ids else None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; `add_special` puts the model's begin token in front, if it uses one.

        A rendered chat has its special tokens already.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except TypeError:
            raise KvjaxError(
                f"cannot encode {text!r:.40}: expected a str of valid Unicode"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def decode_stream(self, ids: Iterable[int], *, skip_special: bool = True) -> Iterator[str]:
        """Yield the text of ids as they come; joined, the pieces are `decode(ids)`.

        A character made of several tokens is held back until it is whole. Each step decodes only
        the tokens of the last two pieces, so a long answer costs no more per token. (Where bytes
        are not UTF-8, SentencePiece's decoder gives up valid neighbours too, which are out here.)
        """
        tail: list[int] = []  # tokens of the last piece, then those whose text is not out yet
        known = 0  # how many of them belong to the last piece
        for token in ids:
            tail.append(int(token))
            before, text = (self.decode(t, skip_special=skip_special) for t in (tail[:known], tail))
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield text[len(before) :]
                tail = tail[known:]
                known = len(tail)
        before, text = (self.decode(t, skip_special=skip_special) for t in (tail[:known], tail))
        if len(text) > len(before):
            yield text[len(before) :]

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """From tokenizer.json and the JSON files beside it (and chat_template.jinja)."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise KvjaxError(f"{directory}: no tokenizer.json: expected a Hugging Face tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise KvjaxError(
                f"{file}: expected a tokenizer of Hugging Face: {_one_line(error)}"
            ) from None
        config = read_json(directory / "tokenizer_config.json", missing={})
        names = ("generation_config.json", "config.json")
        others = [read_json(directory / name, missing={}) for name in names]
        bos, eos = (_special_ids(backend, name, config, others) for name in ("bos", "eos"))
        return cls(
            backend,
            bos_id=bos[0] if bos else None,
            eos_ids=eos,
            chat_template=_directory_template(directory, config),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """From the metadata of a GGUF file: full name → plain value."""
        model = choose("tokenizer model", _field(fields, "model"), ("gpt2", "llama"))
        try:
            build = _byte_level if model == "gpt2" else _sentence_piece
            backend, adds_bos = build(fields)
            bos_id = fields.get("tokenizer.ggml.bos_token_id")
            if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token", adds_bos):
                bos = _field(fields, "tokens")[bos_id]
                backend.post_processor = processors.TemplateProcessing(
                    single=[bos, "$A"], special_tokens=[(bos, bos_id)]
                )
        except KvjaxError:
            raise
        except Exception as error:  # the library raises no narrower type
            raise KvjaxError(
                f"the vocabulary of the GGUF file cannot be used: {_one_line(error)}"
            ) from None
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=[i for i in ends if i is not None],
            chat_template=fields.get("tokenizer.chat_template"),
        )


def read_json(path: Path, *, missing: dict | None = None) -> dict[str, Any]:
    """The object in a JSON file; `missing` stands for a file that is not there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is None:
            raise KvjaxError(f"{path}: no such file") from None
        return missing
    except (OSError, ValueError) as error:
        raise KvjaxError(f"{path}: expected a JSON file: {error}") from None
    if not isinstance(value, dict):
        raise KvjaxError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _special_ids(
    backend: tokenizers.Tokenizer, name: str, config: dict[str, Any], others: list[dict[str, Any]]
) -> list[int]:
    """Ids of the begin or end token: that of its text, then those given as numbers."""
    token = config.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    ids = [backend.token_to_id(text) if isinstance(text, str) else None]
    for other in others:
        value = other.get(f"{name}_token_id")
        ids += value if isinstance(value, list) else [value]
    return [i for i in ids if isinstance(i, int) and i >= 0]  # some files say -1 for none


def _directory_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in Hugging Face."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KvjaxError(f"{file}: expected a text in UTF-8: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = (entry for entry in template if isinstance(entry, dict))
        return {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template


def _field(fields: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in fields:
        raise KvjaxError(f"the GGUF file has no {key}: convert the model anew with llama.cpp")
    return fields[key]


def _byte_level(fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE as in GPT-2; and whether a text begins with a token by default."""
    pre: str = _field(fields, "pre")
    pre = choose("pre-tokenizer", _OTHER_NAMES.get(pre, pre), (*_CUTS, *_OTHER_NAMES))
    vocab = {token: i for i, token in enumerate(_field(fields, "tokens"))}
    merges = [tuple(merge.split(" ")) for merge in _field(fields, "merges")]
    # Llama 3 takes a whole piece that is in the vocabulary, even if no merges lead to it.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pre not in ("llama-bpe", "qwen2")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*_CUTS[pre], level])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, fields)
    return backend, pre == "llama-bpe"


def _sentence_piece(fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE, which joins the two neighbours whose union has the best score.

    The merges are every way to cut a piece into two pieces, best score first.
    """
    tokens, scores, types = (_field(fields, name) for name in ("tokens", "scores", "token_type"))
    vocab = {token: i for i, token in enumerate(tokens)}
    pieces = {
        t: score for t, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL
    }
    cuts = [
        (piece[:middle], piece[middle:])
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for middle in range(1, len(piece))
    ]
    merges = [(left, right) for left, right in cuts if left in pieces and right in pieces]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * prefix, spaces])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * prefix])
    _add_tokens(backend, fields)
    return backend, True


def _add_tokens(backend: tokenizers.Tokenizer, fields: Mapping[str, Any]) -> None:
    """Tokens that are never cut or merged: control tokens and those of the user."""
    types = fields.get("tokenizer.ggml.token_type", ())
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(_field(fields, "tokens"), types, strict=bool(types))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
