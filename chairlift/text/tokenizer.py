"""Text to tokens and back, for the tokenizer that a model came with.

Built on the ``tokenizers`` library. Decoding is this module's own: a token is bytes, and text is what the bytes of all
tokens spell in UTF-8. So a stream of tokens can be decoded as it comes, in linear time, and equals the decoding of
the whole (see :mod:`chairlift.text.detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from chairlift.model.gguf_file import read_gguf_metadata
from chairlift.model.source import ModelSource
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.errors import PromptError, TokenizerError
from chairlift.text.gguf_tokenizer import SPACE_MARK, add_bos_eos, build_gguf_tokenizer, gguf_special_ids


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Loads the tokenizer, special tokens and chat template of a model.

    Raises:
        TokenizerError: they are missing, damaged or of an unknown kind; the message says what to do.
    """
    return _from_gguf(source.path) if source.format == "gguf" else _from_directory(source.path)


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    Attributes:
        bos_token_id: the beginning-of-sequence token, if the model has one.
        eos_token_ids: any of these ends a sequence; the model's main one first.
        special_token_ids: tokens that are not text, left out where special tokens are skipped.
        strips_first_space: whether the first space of a text is the tokenizer's own and no part of the text
            (SentencePiece).
        chat_template: the model's; without any template where it has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Wraps a tokenizer of the library.

        Raises:
            TokenizerError: its decoder is none of those that language models of the Llama family use.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._decoding = _Decoding.of(backend)
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.chat_template = chat_template or ChatTemplate({})
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_token_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.strips_first_space = self._decoding.strips_first_space

    @cached_property
    def vocab_size(self) -> int:
        """Ids of the tokenizer's tokens are in [0, vocab_size). The model's own vocabulary may be padded beyond."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into token ids. Special tokens that are spelled out in the text become themselves.

        Args:
            text: the text.
            add_special_tokens: put BOS (and, rarely, EOS) around it where the model wants that. Completions want it;
                text from a chat template has its own.

        Raises:
            PromptError: the text holds half of a surrogate pair, so it is no Unicode text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text. Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 text that a token stands for, maybe a part of a character; empty for an unknown id."""
        cached = self._bytes.get(token_id)
        if cached is None:
            added = self._added.get(token_id)
            token = added if added is not None else self._backend.id_to_token(token_id) if token_id >= 0 else None
            cached = b"" if token is None else self._decoding.token_bytes(token, added=added is not None)
            self._bytes[token_id] = cached
        return cached

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as the model was taught to read it; encode it with ``add_special_tokens=False``.

        Args:
            messages: OpenAI messages (role, content, maybe tool calls).
            add_generation_prompt: end with the head of an assistant's message.
            tools: OpenAI tool definitions.
            kwargs: further variables for the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the model has no template, or the template does not accept these messages.
        """
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How the text of a vocabulary's entries becomes bytes.

    Attributes:
        byte_level: each character stands for one byte (GPT-2); else entries are text with ▁ for a space.
        byte_fallback: entries like ``<0x0A>`` are single bytes.
        strips_first_space: see :class:`Tokenizer`.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    strips_first_space: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _Decoding:
        # The state of a component is its part of tokenizer.json; serialising the whole vocabulary would take long.
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
            return cls(byte_level=True)
        marks_spaces = "Metaspace" in kinds or any(
            step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
            for step in steps
        )
        if marks_spaces and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            strips = any(
                (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
                or (step["type"] == "Strip" and step["content"] == " " and step["start"])
                for step in steps
            )
            return cls(byte_fallback="ByteFallback" in kinds, strips_first_space=strips)
        raise TokenizerError(
            f"the tokenizer's decoder ({' + '.join(kinds) or 'none'}) is not supported; supported: byte-level BPE "
            "(ByteLevel), SentencePiece (Replace or Metaspace, with or without ByteFallback, Fuse and Strip)"
        )

    def token_bytes(self, token: str, *, added: bool) -> bytes:
        if self.byte_level:
            raw = None if added else [_BYTE_OF.get(character) for character in token]
            return token.encode() if raw is None or None in raw else bytes(byte for byte in raw if byte is not None)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(SPACE_MARK, " ").encode()


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_metadata(path)
    backend = build_gguf_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, ends = gguf_special_ids(metadata)
    special_tokens = {
        f"{name}_token": tokens[token_id]
        for name, token_id in (
            ("bos", bos),
            ("eos", ends[0] if ends else None),
            ("unk", metadata.get("tokenizer.ggml.unknown_token_id")),
            ("pad", metadata.get("tokenizer.ggml.padding_token_id")),
        )
        if token_id is not None and 0 <= token_id < len(tokens)
    }
    prefix = "tokenizer.chat_template"
    templates = {
        "default" if key == prefix else key.removeprefix(f"{prefix}."): template
        for key, template in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=ends,
        chat_template=ChatTemplate(templates, special_tokens),
    )


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{path} has no tokenizer.json. Make one from the slow tokenizer's files with transformers (and "
            f"sentencepiece): AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
    bos, eos = (
        backend.token_to_id(special_tokens[name]) if name in special_tokens else None
        for name in ("bos_token", "eos_token")
    )
    if config.get("add_bos_token") is not None:  # it overrules tokenizer.json, as it does in transformers
        add_bos_eos(backend, bos if config["add_bos_token"] else None, eos if config.get("add_eos_token") else None)
    model = _read_json(path / "config.json") | _read_json(path / "generation_config.json")
    ends = model.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return Tokenizer(
        backend,
        bos_token_id=bos if bos is not None else model.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in (eos, *ends) if i is not None)),
        chat_template=ChatTemplate(_directory_templates(path, config), special_tokens),
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; files give each as its text or as an object that holds the text."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    entries = ((name, config.get(name)) for name in names)
    texts = ((name, entry.get("content") if isinstance(entry, dict) else entry) for name, entry in entries)
    return {name: text for name, text in texts if isinstance(text, str)}


def _directory_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own come before the older place in tokenizer_config.json."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    inline = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(inline, str):
        return {"default": inline}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in inline or ()}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"the chat_template in {path / 'tokenizer_config.json'} is neither a string nor a list of objects with a "
            "name and a template"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not text in UTF-8: {error}") from error
