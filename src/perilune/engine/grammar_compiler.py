"""Grammars of requests, compiled in a thread of their own, and kept for the next request.

A grammar comes from whoever sends a request. What it may cost is bounded: its length here, what the
library builds from it by `_LIMITS`, and one token by `grammar_state.TOKEN_S`, which a trial run
holds it to before it is taken.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from perilune.core.errors import ConfigError, OverloadedError
from perilune.core.types import Grammar, TokenTable
from perilune.engine.errors import GrammarError
from perilune.engine.grammar_state import TOKEN_S, GrammarState, fault_of

MAX_BYTES = 2**18
MAX_KEPT = 64
MAX_PENDING = 32
TRIAL_TOKENS = 48
_RETRY_AFTER_S = 1.0
_STACK_BYTES = 2**28
"""The library goes down a grammar by recursion; at 8 MiB, 1,000 rules in a row end the process."""
_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_PREAMBLE = '%llguidance {"no_forcing": true}\n'
"""Text that a grammar leaves no choice in is tokenised by the model, as all other text is."""

_PLACE = re.compile(r"(?:at )?(?P<line>\d+)\(\d+\): ")
_EXCERPT = re.compile(r"\n +\d+ \| ")
_MAX_REASON_CHARS = 300


class GrammarCompiler:
    """Thread-safe."""

    def __init__(self, table: TokenTable, *, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`vocab_size` is the model's, whose embedding may have more rows than there are tokens.

        Raises:
            ConfigError: there are more tokens than rows, or no token ends an answer.
        """
        if len(table.tokens) > vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(table.tokens)} tokens, the model {vocab_size}"
            )
        self._tokenizer = _tokenizer(table, vocab_size, sorted(eos_ids))
        self._control_ids = table.control_ids
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._num_pending = 0
        self._thread = _deep_thread()

    def start(self, grammar: Grammar, stop_ids: frozenset[int]) -> GrammarState:
        """Blocks while the grammar is compiled, unless it is known from an earlier request.

        Raises:
            GrammarError: it is no grammar, or one that takes too much.
            OverloadedError: too many grammars are waiting already.
        """
        size = len(grammar.text.encode())
        if size > MAX_BYTES:
            raise GrammarError(f"the grammar has {size} bytes; at most {MAX_BYTES} are allowed")
        with self._lock:
            if self._num_pending == MAX_PENDING:
                raise OverloadedError(
                    f"{MAX_PENDING} grammars are waiting to be compiled; come back in "
                    f"{_RETRY_AFTER_S:g} s",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._num_pending += 1
        try:
            matcher = self._thread.submit(self._matcher, grammar.text).result()
        finally:
            with self._lock:
                self._num_pending -= 1
        known_ids = frozenset(i for i in stop_ids if 0 <= i < self._tokenizer.vocab_size)
        return GrammarState(matcher, known_ids, lambda: self._forget(grammar.text))

    def _matcher(self, text: str) -> LLMatcher:
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                return known.deep_copy()
        matcher = self._compile(text)
        with self._lock:
            self._kept[text] = matcher
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher.deep_copy()

    def _forget(self, text: str) -> None:
        """Copies share a lexer; one that has run into a limit serves no later request."""
        with self._lock:
            self._kept.pop(text, None)

    def _compile(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _source(text), limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise _error(matcher.get_error(), text)
        self._try_out(matcher.deep_copy())
        return matcher

    def _try_out(self, matcher: LLMatcher) -> None:
        """Writes a random text, through the control tokens first: they lead to what is special."""
        rng = random.Random(0)
        for _ in range(TRIAL_TOKENS):
            begin_s = time.thread_time()
            mask = matcher.compute_bitmask()
            fault = fault_of(matcher)
            if fault is not None:
                raise GrammarError(f"the grammar cannot be used: {fault}")
            if matcher.is_stopped():
                return
            allowed = [i for i in self._control_ids if mask[i >> 3] >> (i & 7) & 1]
            matcher.consume_token(rng.choice(allowed) if allowed else _any_of(mask, rng))
            if time.thread_time() - begin_s > TOKEN_S:
                raise GrammarError("the grammar cannot be used: a token of it takes too long")


def _deep_thread() -> ThreadPoolExecutor:
    previous = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="perilune-grammars")
        executor.submit(bool).result()  # makes the thread, with the stack asked for
        return executor
    finally:
        threading.stack_size(previous)


class _Vocabulary(NamedTuple):
    """What the library asks of a tokenizer."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]

    def __call__(self, text: bytes) -> list[int]:
        """Not needed: under `_PREAMBLE` the library has nothing tokenised."""
        return []


def _tokenizer(table: TokenTable, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    if not eos_ids:
        raise ConfigError("a grammar needs a token that ends an answer, and the model names none")
    tokens = [*table.tokens, *[b""] * (vocab_size - len(table.tokens))]
    vocabulary = _Vocabulary(eos_ids[0], None, tokens, sorted(table.control_ids))
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos_ids)


def _source(text: str) -> str:
    if not text.lstrip().startswith("{"):
        return _PREAMBLE + text
    try:
        spec = json.loads(text)
        spec["grammars"][0]["lark_grammar"] = _PREAMBLE + spec["grammars"][0]["lark_grammar"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise GrammarError("the grammar is neither Lark nor a list of grammars") from None
    return json.dumps(spec)


def _error(message: str, text: str) -> GrammarError:
    """The library's words, without its excerpt of a grammar that the client never wrote."""
    place = _PLACE.match(message)
    line = int(place["line"]) - 1 - _PREAMBLE.count("\n") if place else 0
    lines = text.splitlines()
    where = lines[line - 1].removeprefix("// ") if 0 < line < len(lines) else ""
    if not where or where == lines[line - 1]:
        where = ""
    reason = _EXCERPT.split(message[place.end() if place else 0 :])[0]
    reason = " ".join(reason.partition(" Enable '")[0].replace("<non-verbose/>", "").split())
    return GrammarError(
        f"{where or 'the grammar'}: {reason[:_MAX_REASON_CHARS]}", param=where or None
    )


def _any_of(mask: bytes, rng: random.Random) -> int:
    """The place of a bit that is set; there is one at least."""
    tail = mask[rng.randrange(len(mask)) :].lstrip(b"\0") or mask.lstrip(b"\0")
    places = [place for place in range(8) if tail[0] >> place & 1]
    return 8 * (len(mask) - len(tail)) + rng.choice(places)
