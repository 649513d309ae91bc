"""Forms: what may come next, what cannot be compiled, and that nobody waits for either."""

from __future__ import annotations

import json
import random
import threading

import pytest
import tokenizers
from support.checking_executor import CheckingExecutor, continuation
from tokenizers import decoders, models, pre_tokenizers

from chairlift.engine import structured
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AbortRequest, AddRequest, Command, EngineCore
from chairlift.engine.structured import FormCompiler, FormError, StructuredGuide
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.sampling_params import SamplingParams, StructuredSpec
from chairlift.text.tokenizer import Tokenizer

END = 257
VOCAB_SIZE = 300  # padded, as models' vocabularies are


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=[END])


TOKENIZER = byte_tokenizer()


def compiler() -> FormCompiler:
    return FormCompiler(lambda: TOKENIZER, VOCAB_SIZE, [END])


def allowed(mask: bytes) -> set[int]:
    assert len(mask) == -(-VOCAB_SIZE // 32) * 4
    return {token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1}


def token(character: str) -> int:
    [token_id] = TOKENIZER.encode(character, add_special_tokens=False)
    return token_id


def wait_for(guide: StructuredGuide, request_id: str) -> None:
    guide._matchers[request_id].exception(30)


def walk(spec: StructuredSpec, seed: int, most: int = 300) -> str | None:
    """A text of this form, at random; ``None`` if it has no end by then."""
    guide, chance, tokens = StructuredGuide(compiler()), random.Random(seed), []
    guide.begin("a", spec)
    for _ in range(most):
        options = allowed(guide.mask("a"))
        assert options, "nothing is allowed"
        tokens.append(chance.choice(sorted(options)))
        guide.accept("a", tokens[-1:])
        if tokens[-1] == END:
            return TOKENIZER.decode(tokens)
    return None


def test_only_what_leads_to_the_form_is_allowed_and_then_only_the_end():
    guide = StructuredGuide(compiler())
    guide.begin("a", StructuredSpec("regex", "x[01]"))
    assert allowed(guide.mask("a")) == {token("x")}
    guide.accept("a", [token("x")])
    assert allowed(guide.mask("a")) == {token("0"), token("1")}
    guide.accept("a", [token("1")])
    assert allowed(guide.mask("a")) == {END}
    for _ in range(3):  # a row of a static batch goes on
        guide.accept("a", [END])
        assert allowed(guide.mask("a")) == {END}


def test_each_request_has_a_place_of_its_own():
    guide, spec = StructuredGuide(compiler()), StructuredSpec("regex", "ab")
    guide.begin("a", spec)
    guide.accept("a", [token("a")])
    guide.begin("b", spec)
    assert guide.ready("b"), "what has been compiled is there at once"
    assert allowed(guide.mask("a")) == {token("b")}
    assert allowed(guide.mask("b")) == {token("a")}
    guide.forget("a")
    guide.forget("a")
    guide.begin("a", spec)
    assert allowed(guide.mask("a")) == {token("a")}


@pytest.mark.parametrize("texts", [["a", "ab", 'é"\n\\/'], ["日本", ""], ["only"]])
def test_choices(texts: list[str]):
    found = {walk(StructuredSpec("choice", json.dumps(texts)), seed) for seed in range(40)}
    assert found == set(texts)


def test_json_objects():
    texts = [walk(StructuredSpec("json_object"), seed, 2000) for seed in range(10)]
    assert any(texts)
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


def test_white_space_in_json_has_an_end():
    guide = StructuredGuide(compiler())
    guide.begin("a", StructuredSpec("json_schema", '{"type": "array", "items": {"const": 1}, "minItems": 1}'))
    guide.accept("a", [token("[")])
    blank = {token(" "), token("\n"), token("\t"), token("\r")}
    for _ in range(40):
        options = allowed(guide.mask("a")) & blank
        if not options:
            return
        guide.accept("a", [min(options)])
    raise AssertionError("a model could write blanks for ever")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (StructuredSpec("regex", "("), "unclosed"),
        (StructuredSpec("regex", "(?=a)b"), "look-around"),
        (StructuredSpec("json_schema", '{"type": "objct"}'), "objct"),
        (StructuredSpec("json_schema", '{"not": {}}'), "not"),
        (StructuredSpec("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), "not"),
        (StructuredSpec("json_schema", "no JSON"), "JSON|expected"),
        (StructuredSpec("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}'), "greater"),
        (StructuredSpec("grammar", "nonsense"), "GBNF"),
        (StructuredSpec("grammar", "start: @nowhere"), "nowhere"),
        (StructuredSpec("regex", "a" * 200_000), "limit"),
    ],
)
def test_what_cannot_be_compiled_says_why_in_a_line(spec: StructuredSpec, reason: str):
    with pytest.raises(FormError, match=reason) as error:
        compiler().compile(spec)
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)
    guide = StructuredGuide(compiler())
    guide.begin("a", spec)
    with pytest.raises(FormError, match=reason):
        guide.mask("a")


def test_a_token_that_the_form_does_not_allow_is_an_error_and_not_an_end():
    guide = StructuredGuide(compiler())
    guide.begin("a", StructuredSpec("regex", "ab"))
    with pytest.raises(FormError):
        guide.accept("a", [token("b")])
    with pytest.raises(FormError):
        guide.mask("a")


def test_a_model_without_an_end_has_no_forms():
    with pytest.raises(FormError, match="end-of-sequence"):
        FormCompiler(lambda: TOKENIZER, VOCAB_SIZE, []).compile(StructuredSpec("regex", "a"))


def test_forms_used_last_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(structured, "MAX_COMPILED", 2)
    forms = compiler()
    a, b, c = (StructuredSpec("regex", name) for name in "abc")
    for spec in (a, b, a, c):
        forms.compile(spec)
    assert [forms.known(spec) for spec in (a, b, c)] == [True, False, True]


class SlowCompiler(FormCompiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: TOKENIZER, VOCAB_SIZE, [END])
        self.go_on = threading.Event()

    def compile(self, spec):
        self.go_on.wait(30)
        return super().compile(spec)


def test_nobody_waits_for_a_form_that_is_being_compiled():
    forms = SlowCompiler()
    guide = StructuredGuide(forms)
    inbox: list[Command] = []

    def drain() -> list[Command]:
        taken = inbox[:]
        inbox.clear()
        return taken

    plain = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
    formed = SamplingParams(max_tokens=5, seed=0, structured=StructuredSpec("regex", "[ab]*"))
    wrong = SamplingParams(max_tokens=5, seed=0, structured=StructuredSpec("regex", "("))
    scheduler = ContinuousScheduler(SchedulerConfig(max_num_seqs=4), KVManager(20, 4), 64)
    core = EngineCore(scheduler, CheckingExecutor(20, 4), VirtualClock(), drain, guide=guide)
    inbox += [AddRequest("formed", [1], formed, 0.0), AddRequest("wrong", [2], wrong, 0.0)]
    inbox += [AddRequest("gone", [3], formed, 0.0), AddRequest("plain", [4], plain, 0.0)]
    tokens = [token for _ in range(5) for delta in core.step().deltas for token in delta.token_ids]
    assert tokens == continuation([4], 0, 5, ())
    assert core.has_work, "three are to come"
    output = core.step()
    assert output.wait_until is not None, "there is nothing to do but to look again"
    assert output.waiting == 3
    inbox.append(AbortRequest("gone"))
    assert [(delta.request_id, delta.finish_reason) for delta in core.step().deltas] == [("gone", "abort")]
    forms.go_on.set()
    for name in ("formed", "wrong"):
        wait_for(guide, name)
    output = core.step()
    errors = {delta.request_id: delta.error for delta in output.deltas if delta.error}
    assert "unclosed" in errors["wrong"]
    # The executor of this test knows of no masks, so what it samples for the other one is not of its form either.
    assert "cannot be followed" in errors["formed"]
    inbox.append(AbortRequest("formed"))
    core.step()
    assert not core.has_work
    assert guide._matchers == {}
    assert scheduler.kv.num_used_blocks == 0
