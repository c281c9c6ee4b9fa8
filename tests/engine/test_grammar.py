"""Answers held to a grammar, from a model that writes at random: the worst of all writers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import OverloadedError, RequestError
from perilune.core.types import EngineInfo, Grammar, SamplingParams, TokenRequest, TokenTable
from perilune.engine import grammar_compiler, grammar_state
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.errors import GrammarError
from perilune.engine.fake_model import FakeModel
from perilune.engine.grammar_compiler import GrammarCompiler
from perilune.engine.masking import mask_forbidden
from perilune.engine.sampler import sample
from perilune.engine.sampling_state import SamplingState
from perilune.text.tiktoken_ranks import RankTokenizer, byte_ranks, k3_style
from perilune.text.token_table import table_of

MERGES = ("ab", "abc", "ba", '{"', '":', ", ", "00", "é", "éa")


def _tokenizer() -> RankTokenizer:
    ranks = byte_ranks()
    for merge in MERGES:
        ranks[merge.encode()] = len(ranks)
    return k3_style(ranks)


TOKENIZER = _tokenizer()
(EOS_ID,) = TOKENIZER.eos_ids
VOCAB_SIZE = TOKENIZER.vocab_size + 3  # an embedding may have more rows than there are tokens
INFO = EngineInfo(
    model_id="fake", vocab_size=VOCAB_SIZE, max_context=4096, eos_ids=TOKENIZER.eos_ids
)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(table_of(TOKENIZER), vocab_size=VOCAB_SIZE, eos_ids=TOKENIZER.eos_ids)


def request_of(grammar: str | None, prompt: int = 0, **fields) -> TokenRequest:
    fields = {"max_tokens": 60, "sampling": GREEDY, **fields}
    held = None if grammar is None else Grammar(text=grammar)
    return TokenRequest(request_id="r", prompt_ids=(prompt,), grammar=held, **fields)


def run(requests: list[TokenRequest], grammars: GrammarCompiler, model=None) -> list:
    """All together; of each its sequence and its error."""
    core = EngineCore(model or FakeModel(VOCAB_SIZE), max_running=len(requests))
    sequences = [admit(request, INFO, grammars) for request in requests]
    for sequence in sequences:
        core.add(sequence)
    errors = dict.fromkeys(sequences)
    while core.scheduler.has_work:
        errors |= {item.sequence: item.event.error for item in core.step()}
    return [(sequence, errors[sequence]) for sequence in sequences]


def written(sequence) -> bytes:
    ids = sequence.generated_ids
    return TOKENIZER.decode_bytes(ids[:-1] if sequence.finish_reason == "stop" else ids)


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["a", "b", "[a-c]", "[^a]", "é", r"\.", "[0-9]", "(?s:.)"])

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{'|'.join(two)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(
                lambda two: f"(?:{two[0]}){two[1]}"
            ),
        )

    return st.recursive(atoms, larger, max_leaves=6)


@settings(max_examples=60)
@given(pattern=patterns(), prompt=st.integers(0, 255), hot=st.booleans())
def test_an_answer_matches_its_pattern_at_every_token(pattern, prompt, hot, grammars):
    sampling = SamplingParams(temperature=2.0 if hot else 0.0, seed=prompt)
    request = request_of(f"start: /{pattern}/", prompt, sampling=sampling)
    [(sequence, error)] = run([request], grammars)
    assert error is None
    if sequence.finish_reason == "stop":
        assert re.fullmatch(pattern, written(sequence).decode())
    else:
        assert sequence.finish_reason == "length"
    for end in range(len(written(sequence))):
        text = written(sequence)[:end].decode(errors="ignore")
        assert regex.fullmatch(pattern, text, partial=True), text


def test_stop_tokens_come_only_where_the_grammar_may_end(grammars):
    stop_ids = frozenset({300, ord("b")})
    state = grammars.start(Grammar(text="start: /ab?/"), stop_ids | {EOS_ID})
    for token_id, may_end in ((ord("a"), False), (ord("b"), True)):
        mask = state.allowed()
        assert [mask[i >> 3] >> (i & 7) & 1 for i in (*stop_ids, EOS_ID)] == 3 * [may_end]
        if not may_end:
            state.advance(token_id)
    state.advance(ord("b"))  # a stop token is not part of the text
    assert state.allowed() == mask


def test_free_sequences_do_not_notice_their_neighbours(grammars):
    free = [request_of(None, prompt, max_tokens=20, ignore_eos=True) for prompt in range(4)]
    drawn = [replace(r, sampling=SamplingParams(seed=7, logprobs=3)) for r in free]
    held = [request_of('start: "ab" /[0-9]{1,30}/', prompt) for prompt in range(4)]
    together = run([x for row in zip(free, held, drawn, strict=True) for x in row], grammars)
    alone = [run([request], grammars)[0] for request in (*free, *drawn)]
    mixed = [*together[::3], *together[2::3]]
    assert [s.generated_ids for s, _ in mixed] == [s.generated_ids for s, _ in alone]
    for sequence, _ in together[1::3]:
        assert re.fullmatch("ab[0-9]{1,30}", written(sequence).decode())


def test_without_a_grammar_the_logits_are_the_very_same():
    logits_BV = torch.randn(2, VOCAB_SIZE)
    states = [SamplingState(GREEDY, [0]) for _ in range(2)]
    assert mask_forbidden(logits_BV, states).logits_BV is logits_BV


def held_state(grammars: GrammarCompiler, text: str, params: SamplingParams) -> SamplingState:
    return SamplingState(params, [0], grammars.start(Grammar(text=text), frozenset({EOS_ID})))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.01, 1.0, 50.0]),
        top_p=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 500]),
        min_p=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([0.5, 1.0, 2.0]),
        frequency_penalty=st.sampled_from([0.0, -2.0]),
        logit_bias=st.dictionaries(st.integers(0, 200), st.sampled_from([-100, 100]), max_size=9),
        logprobs=st.sampled_from([None, 0, 2, 20]),
        seed=st.integers(0, 99),
    ),
)
def test_what_is_forbidden_is_never_drawn_nor_told(seed, params, grammars):
    allowed = [ord(c) for c in "abcdefg"] + [256 + MERGES.index(m) for m in ("ab", "abc", "ba")]
    logits_BV = 5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    [token] = sample(logits_BV, [held_state(grammars, "start: /[a-g]+/", params)])
    assert token.token_id in allowed
    if params.logprobs is not None:
        expected = logits_BV[0, allowed].log_softmax(0)
        assert token.logprob.logprob == pytest.approx(
            float(expected[allowed.index(token.token_id)]), abs=1e-5
        )
        top = [token_id for token_id, _ in token.logprob.top]
        best = sorted(allowed, key=lambda i: -float(logits_BV[0, i]))
        assert top == best[: params.logprobs]


@pytest.mark.parametrize("place", [ord("a"), ord("z")], ids=["allowed", "forbidden"])
def test_a_nan_is_seen_through_a_mask(place, grammars):
    logits_BV = torch.zeros(1, VOCAB_SIZE)
    logits_BV[0, place] = torch.nan
    [token] = sample(logits_BV, [held_state(grammars, "start: /a+/", GREEDY)])
    assert (token.token_id, token.fault) == (None, "the model gave logits that are not finite")


def test_a_grammar_that_gets_stuck_ends_with_an_error_and_alone():
    """There is no token for `b`, which the trial run does not reach."""
    tokens = tuple(t if b"b" not in t else b"" for t in table_of(TOKENIZER).tokens)
    table = TokenTable(tokens=tokens, control_ids=TOKENIZER.control_ids)
    grammars = GrammarCompiler(table, vocab_size=VOCAB_SIZE, eos_ids=[EOS_ID])
    text = f"start: /a{{{grammar_compiler.TRIAL_TOKENS}}}b/"
    (stuck, error), (other, fine) = run(
        [request_of(text), request_of("start: /c{70}/", max_tokens=80)], grammars
    )
    assert error == "the answer cannot go on in its grammar: no token can follow"
    assert stuck.finish_reason == "error"
    assert (other.finish_reason, fine) == ("stop", None)


def test_a_grammar_that_takes_too_long_ends_with_an_error(monkeypatch, grammars):
    sequence = admit(request_of("start: /a+c/"), INFO, grammars)
    monkeypatch.setattr(grammar_state, "TOKEN_S", -1.0)
    core = EngineCore(FakeModel(VOCAB_SIZE))
    core.add(sequence)
    [item] = core.step()
    assert item.event.error == "the answer cannot go on in its grammar: it takes too long"
    assert not core.scheduler.has_work


def test_the_token_limit_cuts_an_answer(grammars):
    [(sequence, _)] = run([request_of("start: /[0-9]{20}/", max_tokens=5)], grammars)
    assert sequence.finish_reason == "length"
    assert re.fullmatch("[0-9]+", written(sequence).decode())


def test_a_list_of_grammars(grammars):
    text = json.dumps(
        {
            "grammars": [
                {"lark_grammar": "start: /a/ @x"},
                {"name": "x", "lark_grammar": 'start: "b" start | "c"'},
            ]
        }
    )
    [(sequence, _)] = run([request_of(text)], grammars)
    assert re.fullmatch("ab*c?", written(sequence).decode())


def test_a_known_grammar_is_not_compiled_again_unless_it_failed(monkeypatch, grammars):
    compiled: list[str] = []
    compile_one = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler,
        "_compile",
        lambda self, text: compiled.append(text) or compile_one(self, text),
    )
    grammar = Grammar(text="start: /known+/")
    first = grammars.start(grammar, frozenset({EOS_ID}))
    first.advance(ord("k"))
    second = grammars.start(grammar, frozenset({EOS_ID}))
    assert first.allowed() != second.allowed()  # each has its own place
    assert len(compiled) == 1
    second.advance(ord("x"))
    assert second.fault is not None
    grammars.start(grammar, frozenset({EOS_ID}))
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("text", "message", "param"),
    [
        ("start: /(a/", "unclosed group", None),
        ("// response_format.pattern\nx: /(a/\nstart: x", "unclosed", "response_format.pattern"),
        ("start: /(?=a)b/", "look-around", None),
        ("start: foo", "foo", None),
        ("start: <|nonsense|>", "nonsense", None),
        ("", "no start rule", None),
        ("{", "neither Lark nor a list", None),
        ('{"grammars": 3}', "neither Lark nor a list", None),
        ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems", None),
        ("start: start", "no token can follow", None),
        ("start: /a{5}/ " + "x" * grammar_compiler.MAX_BYTES, "bytes; at most", None),
    ],
)
def test_what_is_no_grammar_is_refused(text, message, param, grammars):
    with pytest.raises(GrammarError, match=message) as refused:
        admit(request_of(text), INFO, grammars)
    assert refused.value.param == param
    assert refused.value.code == "invalid_grammar"
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        'start: A0\nA3000: "x"\n' + "\n".join(f'A{i}: A{i + 1} "y"' for i in range(3000)),
        "start: a0\na3000: /x/\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)),
        "start: " + "(" * 10_000 + '"a"' + ")" * 10_000,
        'start: A0\nA40: "x"\n' + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)),
        "start: /" + "(" * 200 + "a" + "+)" * 200 + "/",
    ],
    ids=["terminals", "rules", "brackets", "doubled", "pattern"],
)
def test_a_deep_grammar_does_not_end_the_process(text, grammars):
    try:
        [(_, error)] = run([request_of(text, max_tokens=20)], grammars)
    except GrammarError:
        return
    assert error is None


def test_only_so_many_grammars_wait(monkeypatch, grammars):
    monkeypatch.setattr(grammar_compiler, "MAX_PENDING", 0)
    with pytest.raises(OverloadedError, match="come back in 1 s"):
        admit(request_of("start: /a/"), INFO, grammars)


def test_a_grammar_needs_an_engine_that_has_them_and_an_end(grammars):
    with pytest.raises(RequestError, match="started without grammars"):
        admit(request_of("start: /a/"), INFO)
    with pytest.raises(RequestError, match="ignore_eos"):
        admit(request_of("start: /a/", ignore_eos=True), INFO, grammars)


def test_a_table_has_to_fit_the_model():
    from perilune.core.errors import ConfigError

    with pytest.raises(ConfigError, match="tokens, the model 10"):
        GrammarCompiler(table_of(TOKENIZER), vocab_size=10, eos_ids=[1])
    with pytest.raises(ConfigError, match="names none"):
        GrammarCompiler(table_of(TOKENIZER), vocab_size=VOCAB_SIZE, eos_ids=[])


def test_tokens_of_a_grammar_are_whole_code_points_in_the_end(grammars):
    [(sequence, error)] = run([request_of("start: /(?s:.){4}/")], grammars)
    assert error is None
    assert len(written(sequence).decode()) == 4
