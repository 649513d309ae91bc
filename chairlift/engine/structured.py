"""Answers that must have a form: JSON of a schema, a regular expression, one of several texts, or a grammar.

The forms are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance), which says before each
token which ones may come. A server compiles a form once to refuse what cannot be, and its engine once more to follow
it; neither does so where others would have to wait.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from chairlift.cores import unbind
from chairlift.scheduling.sampling_params import StructuredSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from chairlift.text.tokenizer import Tokenizer

MAX_FORM_CHARACTERS = 128 * 1024
MAX_COMPILED = 64
"""Compiled forms that are kept, those used last; an open request keeps its own."""
MAX_LEXER_STATES = 50_000
"""Each takes one or two kilobytes, and a form that is open to anybody must not take them all."""
MAX_MESSAGE_CHARACTERS = 500
JSON_WHITE_SPACE = r"( |\n {0,32})?"
"""White space between the tokens of JSON: room to indent, and an end to it, which models do not always find."""


class FormError(ValueError):
    """A form that cannot be compiled, or not be followed any further. The message is for the client."""


class FormCompiler:
    """Compiles forms for the tokens of one model. Safe to use from several threads.

    Args:
        load_tokenizer: returns the model's tokenizer; called once, when the first form comes.
        vocab_size: the model's scores are for tokens in [0, vocab_size).
        eos_token_ids: any of these ends a sequence; the only tokens allowed once a form is complete.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.mask_bytes = -(-vocab_size // 32) * 4
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # of its own: this one is held for long

    def known(self, spec: StructuredSpec) -> bool:
        """Whether the form has been compiled, so that doing it again takes no time."""
        with self._lock:
            return spec in self._compiled

    def compile(self, spec: StructuredSpec) -> LLMatcher:
        """Returns what follows the form from its beginning. May take a second or two.

        Raises:
            FormError: it cannot be compiled; the message says why.
        """
        with self._lock:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
                return self._compiled[spec].deep_copy()
        matcher = self._compile(spec)
        with self._lock:
            self._compiled[spec] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, spec: StructuredSpec) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(spec.value) > MAX_FORM_CHARACTERS:
            raise FormError(f"it has {len(spec.value)} characters, and the limit is {MAX_FORM_CHARACTERS}")
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokens(), _grammar(spec), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what can be said only when the first token is asked for
        if matcher.is_error():
            raise FormError(_short(matcher.get_error()))
        return matcher

    def _tokens(self) -> LLTokenizer:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._eos_token_ids:
            raise FormError("this model has no end-of-sequence token, so an answer with a form would have no end")
        vocabulary = _Vocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)


class _Vocabulary:
    """The model's tokens as llguidance wants to be told them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = tokenizer.special_token_ids.union(eos_token_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that the form dictates."""
        plain = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _grammar(spec: StructuredSpec) -> str:
    """The form in llguidance's own terms."""
    from llguidance import LLMatcher, grammar_from

    try:
        match spec.kind:
            case "json_schema" | "json_object":
                return LLMatcher.grammar_from_json_schema(
                    spec.value if spec.kind == "json_schema" else '{"type":"object"}',
                    # Neither may a schema set these: what it asks for is kept to, or refused.
                    overrides={"whitespace_pattern": JSON_WHITE_SPACE, "lenient": False, "coerce_one_of": False},
                )
            case "choice":
                # Each text as JSON writes it, which is how the grammar writes texts too.
                texts = json.loads(spec.value)
                return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts))
            case "regex":
                return LLMatcher.grammar_from_regex(spec.value)
            case _:
                return grammar_from("grammar", spec.value)
    except (ValueError, RecursionError) as error:
        raise FormError(_short(str(error))) from error


def _short(message: str) -> str:
    """A message of a bounded number of characters, in one line."""
    line = " ".join(message.partition("<state>")[0].split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + "…"


class StructuredGuide:
    """Follows the form of each open request that has one: a :class:`~chairlift.engine.core.Guide`.

    A request's place in its form is moved by the tokens that were accepted and by nothing else, so it makes no
    difference how often its keys and values are computed, or where they lie.
    """

    def __init__(self, compiler: FormCompiler) -> None:
        self._compiler = compiler
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chairlift-forms", initializer=unbind)
        self._matchers: dict[str, Future[LLMatcher]] = {}

    def begin(self, request_id: str, spec: StructuredSpec) -> None:
        """Takes a new request; its form is compiled beside the loop, or at once if that has been done before."""
        if self._compiler.known(spec):
            matcher: Future[LLMatcher] = Future()
            matcher.set_result(self._compiler.compile(spec))
        else:
            matcher = self._compiling.submit(self._compiler.compile, spec)
        self._matchers[request_id] = matcher

    def ready(self, request_id: str) -> bool:
        """Whether the request's form is compiled, or could not be."""
        return self._matchers[request_id].done()

    def mask(self, request_id: str) -> bytes:
        """The tokens that may come next.

        Raises:
            FormError: the form could not be compiled, or is too intricate to follow any further.
        """
        matcher = self._matchers[request_id].result()
        allowed = matcher.compute_bitmask()
        if matcher.is_error():  # what it allows then is to end, as if all were well
            raise FormError(f"the form of the answer cannot be followed: {_short(matcher.get_error())}")
        return allowed[: self._compiler.mask_bytes]

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Is told the tokens that came, each one of those allowed."""
        matcher = self._matchers[request_id].result()
        if matcher.is_stopped() and not matcher.is_error():
            return  # the form is complete; rows of a static batch go on after their end, and may end again and again
        if not matcher.consume_tokens(list(token_ids)):
            raise FormError(f"the form of the answer cannot be followed: {_short(matcher.get_error())}")

    def forget(self, request_id: str) -> None:
        """The request has ended, in whatever way, or never began."""
        matcher = self._matchers.pop(request_id, None)
        if matcher is not None:
            matcher.cancel()
