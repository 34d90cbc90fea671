"""Text to tokens and back, by the ``tokenizers`` package; chat forms; text that streams out token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DTypeError, UnsupportedError
from .packages import require

CONTROL = 3  # GGUF's token type of special tokens
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT_FORMS = {  # by a token that only that form has
    "<|im_start|>": "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<start_of_turn>": "<start_of_turn>user\n{prompt}<end_of_turn>\n<start_of_turn>model\n",
}
END_OF_TURN = ("<|im_end|>", "<end_of_turn>")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with the special tokens that generation needs.

    Attributes
    ----------
    core : tokenizers.Tokenizer
        Does the work.
    stop_tokens : frozenset of int
        Tokens that end a text or a turn.
    bos_token : int or None
        Put before every prompt, for models that were trained so.
    """

    core: Any = field(repr=False)
    stop_tokens: frozenset[int]
    bos_token: int | None = None

    @classmethod
    def from_file(cls, path: Path, config: Mapping[str, Any]) -> Tokenizer:
        """Read ``tokenizer.json``; stop and first tokens come from the model's configuration."""
        tokenizers = require("tokenizers", f"reading {path.name}")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise UnsupportedError(f"{path}: cannot read this tokenizer ({error})") from None
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        eos = config.get("eos_token_id", text.get("eos_token_id"))
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in stops):
            raise DTypeError(f"eos_token_id: expected a token or a list of them, got {eos!r:.60}")
        first = core.encode("").ids  # what the file's own post-processor puts in front
        return cls(core, _stop_tokens(core, stops), first[0] if first else None)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], path: Path) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        SentencePiece vocabularies are read from a ``tokenizer.json`` beside the file.

        Raises
        ------
        UnsupportedError
            A kind that is not offered.
        """
        found = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
        eos, bos = found.get("eos_token_id"), found.get("bos_token_id")
        beside = path.with_name("tokenizer.json")
        if beside.exists():
            return cls.from_file(beside, {"eos_token_id": eos})
        core = _byte_pairs(found, path)
        wants_bos = bool(found.get("add_bos_token", False))
        return cls(core, _stop_tokens(core, [] if eos is None else [eos]), bos if wants_bos else None)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, the first token of every prompt included."""
        text = text.encode(errors="replace").decode()  # a half of a surrogate pair alone is no text
        tokens: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return tokens if self.bos_token is None else [self.bos_token, *tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.core.decode(list(tokens)))

    def chat(self, prompt: str, system: str = SYSTEM) -> str:
        """Wrap a prompt as the user's turn, in the form the vocabulary has tokens for; as it is if in none."""
        for token, form in CHAT_FORMS.items():
            if self.core.token_to_id(token) is not None:
                return form.format(prompt=prompt, system=system)
        return prompt

    def stream(self) -> TextStream:
        """Return an empty stream of text."""
        return TextStream(self)


@dataclass
class TextStream:
    """Text of tokens that arrive a few at a time: a character whose bytes are not all there yet waits."""

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    written: int = 0

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Add tokens and return the text that is new."""
        self.tokens.extend(tokens)
        text = self.tokenizer.decode(self.tokens)
        if not last:
            text = text.rstrip(UNFINISHED)
        new = text[self.written :]
        self.written = max(self.written, len(text))
        return new


def _stop_tokens(core: Any, named: Iterable[int]) -> frozenset[int]:
    known = (core.token_to_id(token) for token in END_OF_TURN)
    return frozenset([*named, *(token for token in known if token is not None)])


def _byte_pairs(found: Mapping[str, Any], path: Path) -> Any:
    if found.get("model") != "gpt2":
        raise UnsupportedError(
            f"{path.name}: expected a byte-pair tokenizer (gpt2), got {found.get('model')!r}; "
            "put the model's tokenizer.json beside the file"
        )
    tokenizers = require("tokenizers", f"the tokenizer of {path.name}")
    vocabulary = {token: index for index, token in enumerate(found["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in found["merges"]]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    split = tokenizers.pre_tokenizers
    if found.get("pre") == "smollm":
        core.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        )
    elif found.get("pre") == "qwen2":
        core.normalizer = tokenizers.normalizers.NFC()
        words = split.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
        core.pre_tokenizer = split.Sequence([words, split.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise UnsupportedError(
            f"{path.name}: expected the pre-tokenizer smollm or qwen2, got {found.get('pre')!r}; "
            "put the model's tokenizer.json beside the file"
        )
    core.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(found["tokens"], found["token_type"], strict=True) if kind == CONTROL]
    core.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return core
