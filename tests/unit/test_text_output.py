"""One request's sequences: text, stop strings, fan-in, and that nothing is left behind whatever happens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from chairlift.engine.client import EngineDeadError
from chairlift.scheduling.plan import RequestTiming, SequenceDelta, TokenLogprob
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.text.output import OutputDelta, OutputStream, SequenceError, SequenceOutput, SequenceText, fan_out
from chairlift.text.tokenizer import Tokenizer

EOS = 256


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
ids = TOKENIZER.encode


# ---- one sequence ----


def feed(deltas: Sequence[SequenceDelta], stop: Sequence[str] = (), **params: Any) -> tuple[list[OutputDelta], int]:
    output = SequenceOutput(0, TOKENIZER, SamplingParams(stop=stop, **params))
    results = []
    for delta in deltas:
        results.append(output.update(delta))
        if results[-1].finish_reason is not None:
            break
    return results, output.completion_tokens


def test_text_comes_as_it_is_certain() -> None:
    first, *rest = ids("é")
    deltas = [SequenceDelta("r", [first]), SequenceDelta("r", rest), SequenceDelta("r", ids("!"), "length")]
    results, count = feed(deltas)
    assert [(r.text, r.finish_reason) for r in results] == [("", None), ("é", None), ("!", "length")]
    assert count == 3


def test_the_token_that_ends_a_sequence_is_counted_but_not_shown() -> None:
    timing = RequestTiming(arrival=1.0)
    results, count = feed([SequenceDelta("r", [*ids("ab"), EOS], "stop", timing=timing)])
    assert results == [OutputDelta(0, "ab", [*ids("ab"), EOS], "stop", None, timing)]
    assert count == 3
    (newline,) = ids("\n")
    results, count = feed([SequenceDelta("r", [*ids("ab"), newline], "stop", stop_reason=newline)])
    assert [(r.text, r.stop_reason) for r in results] == [("ab", newline)]


def test_a_last_token_that_is_not_an_end_is_shown() -> None:
    results, _ = feed([SequenceDelta("r", ids("ab"), "length")])
    assert results[0].text == "ab"


def test_a_stop_string_ends_the_sequence_before_the_engine_does() -> None:
    deltas = [SequenceDelta("r", ids("one E")), SequenceDelta("r", ids("ND and more")), SequenceDelta("r", ids("x"))]
    results, count = feed(deltas, ["END"])
    assert [(r.text, r.finish_reason, r.stop_reason) for r in results] == [("one ", None, None), ("", "stop", "END")]
    assert count == len("one END")
    assert list(results[1].token_ids) == ids("ND")


def test_a_stop_string_in_the_last_token_overrules_the_length() -> None:
    results, _ = feed([SequenceDelta("r", ids("a."), "length")], ["."])
    assert [(r.text, r.finish_reason, r.stop_reason) for r in results] == [("a", "stop", ".")]


def test_what_is_held_back_comes_with_the_end() -> None:
    results, _ = feed([SequenceDelta("r", ids("one EN")), SequenceDelta("r", finish_reason="abort")], ["END"])
    assert [(r.text, r.finish_reason) for r in results] == [("one ", None), ("EN", "abort")]
    half = ids("é")[:1]
    results, _ = feed([SequenceDelta("r", half), SequenceDelta("r", [EOS], "stop")])
    assert results[-1].text == "\ufffd"


def test_a_stop_string_that_only_the_end_completes() -> None:
    results, _ = feed([SequenceDelta("r", [*ids("a"), *ids("é")[:1]], "length")], ["\ufffd"])
    assert [(r.text, r.finish_reason, r.stop_reason) for r in results] == [("a", "stop", "\ufffd")]


def test_an_error_of_the_engine_is_raised() -> None:
    with pytest.raises(SequenceError, match="out of luck"):
        feed([SequenceDelta("r", finish_reason="error", error="out of luck")])


# ---- fan out ----


def test_fan_out_keeps_the_first_seed_and_derives_the_others() -> None:
    seeds = [params.seed for params in fan_out(SamplingParams(n=4, seed=7))]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds[:3] == [params.seed for params in fan_out(SamplingParams(n=3, seed=7))]
    others = [params.seed for params in fan_out(SamplingParams(n=4, seed=8))]
    assert not set(seeds) & set(others)
    assert {params.n for params in fan_out(SamplingParams(n=4, seed=7))} == {1}


def test_fan_out_takes_every_seed_and_leaves_out_none() -> None:
    for seed in (-(2**63), -1, 0, 2**64 - 1):
        assert len({params.seed for params in fan_out(SamplingParams(n=3, seed=seed))}) == 3
    assert [params.seed for params in fan_out(SamplingParams(n=2))] == [None, None]


# ---- many sequences ----

Script = Callable[[], AsyncIterator[SequenceDelta]]


class FakeEngine:
    """Plays one script for each sequence, and knows which are open, were aborted, or came to their end."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.params: list[SamplingParams] = []
        self.prompts: list[Sequence[int]] = []
        self.open = 0
        self.aborted = 0
        self.done = 0

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        script = self.scripts[len(self.params)]
        self.params.append(params)
        self.prompts.append(prompt_token_ids)
        self.open += 1
        finished = False
        try:
            async for delta in script():
                finished = delta.finish_reason is not None
                yield delta
        finally:
            self.open -= 1
            self.aborted += not finished
            self.done += finished


def says(text: str, finish_reason: str | None = "length", pause: float = 0.0) -> Script:
    async def script() -> AsyncIterator[SequenceDelta]:
        for i, token_id in enumerate(ids(text)):
            await asyncio.sleep(pause)
            yield SequenceDelta("r", [token_id], finish_reason if i == len(text) - 1 else None)

    return script


def forever() -> Script:
    async def script() -> AsyncIterator[SequenceDelta]:
        while True:
            await asyncio.sleep(0)
            yield SequenceDelta("r", ids("z"))

    return script


def silent() -> Script:
    async def script() -> AsyncIterator[SequenceDelta]:
        await asyncio.Event().wait()
        yield SequenceDelta("r")

    return script


def fails(after: str = "") -> Script:
    async def script() -> AsyncIterator[SequenceDelta]:
        async for delta in says(after, None)():
            yield delta
        raise EngineDeadError("the engine is gone")

    return script


def stream(engine: FakeEngine, prompts: int = 1, **params: Any) -> OutputStream:
    params.setdefault("n", len(engine.scripts) // prompts)
    return OutputStream(engine, TOKENIZER, [[i] for i in range(prompts)], SamplingParams(**params))  # type: ignore[arg-type]


def run(main: Coroutine[Any, Any, None], engine: FakeEngine) -> None:
    """Runs it and checks that it left no task and no open sequence."""

    async def checked() -> None:
        await main
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert engine.open == 0

    asyncio.run(checked())


def collect(engine: FakeEngine, prompts: int = 1, **params: Any) -> tuple[list[SequenceText], int]:
    result: list[SequenceText] = []
    counts: list[int] = []

    async def main() -> None:
        async with stream(engine, prompts, **params) as outputs:
            result.extend(await outputs.collect())
            counts.append(outputs.completion_tokens)

    run(main(), engine)
    return result, counts[0]


def test_collect_returns_all_in_order() -> None:
    engine = FakeEngine(says("slow one", pause=0.002), says("b"), says("mid", pause=0.001))
    sequences, count = collect(engine, seed=3)
    assert [s.text for s in sequences] == ["slow one", "b", "mid"]
    assert [s.index for s in sequences] == [0, 1, 2]
    assert [s.finish_reason for s in sequences] == ["length"] * 3
    assert [s.token_ids for s in sequences] == [ids("slow one"), ids("b"), ids("mid")]
    assert count == len("slow one" + "b" + "mid")
    assert [p.seed for p in engine.params] == [p.seed for p in fan_out(SamplingParams(n=3, seed=3))]
    assert (engine.done, engine.aborted) == (3, 0)


def test_several_prompts_are_indexed_as_openai_counts() -> None:
    engine = FakeEngine(*(says(text) for text in "abcdef"))
    sequences, _ = collect(engine, prompts=3)
    assert "".join(s.text for s in sequences) == "abcdef"
    assert engine.prompts == [[0], [0], [1], [1], [2], [2]]


def test_deltas_come_in_the_order_in_which_they_arise() -> None:
    gate = asyncio.Event()

    async def waits() -> AsyncIterator[SequenceDelta]:
        await gate.wait()
        yield SequenceDelta("r", ids("late"), "length")

    engine = FakeEngine(waits, says("ab"))
    seen: list[tuple[int, str, str | None]] = []

    async def main() -> None:
        async with stream(engine) as outputs:
            async for delta in outputs:
                seen.append((delta.index, delta.text, delta.finish_reason))
                if delta.index == 1 and delta.finish_reason:
                    gate.set()

    run(main(), engine)
    assert seen == [(1, "a", None), (1, "b", "length"), (0, "late", "length")]


def test_a_stop_string_aborts_its_own_sequence_only() -> None:
    engine = FakeEngine(forever(), says("abc", pause=0.001))
    sequences, count = collect(engine, stop="zzz")
    assert [(s.text, s.finish_reason, s.stop_reason) for s in sequences] == [
        ("", "stop", "zzz"),
        ("abc", "length", None),
    ]
    assert count == 6
    assert (engine.aborted, engine.done) == (1, 1)


def test_one_failure_aborts_the_others_and_is_raised() -> None:
    engine = FakeEngine(forever(), fails("ab"), silent())

    async def main() -> None:
        outputs = stream(engine)
        async with outputs:
            with pytest.raises(EngineDeadError, match="the engine is gone"):
                await outputs.collect()
            assert engine.open == 0  # at once, not only on leaving
            assert [delta async for delta in outputs] == []

    run(main(), engine)
    assert engine.aborted == 3


def test_an_engine_that_falls_silent_without_a_reason_is_an_error() -> None:
    engine = FakeEngine(says("ab", None))

    async def main() -> None:
        async with stream(engine) as outputs:
            with pytest.raises(SequenceError, match="without saying why"):
                await outputs.collect()

    run(main(), engine)


@pytest.mark.parametrize("received", [0, 1, 5, 20])
def test_a_consumer_that_leaves_closes_everything(received: int) -> None:
    engine = FakeEngine(forever(), silent(), forever())

    async def main() -> None:
        async with stream(engine, max_tokens=None) as outputs:
            for _ in range(received):
                await anext(outputs)

    run(main(), engine)
    assert engine.aborted == (3 if received else 0)  # nothing was begun before the first wait


def test_a_consumer_that_fails_closes_everything_and_keeps_its_error() -> None:
    engine = FakeEngine(forever(), silent())

    async def handler() -> None:
        async with stream(engine) as outputs:
            await anext(outputs)
            raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await handler()

    run(main(), engine)
    assert engine.aborted == 2


@pytest.mark.parametrize("turns", range(12))
def test_cancellation_at_any_point_closes_everything(turns: int) -> None:
    engine = FakeEngine(forever(), silent(), says("abcdef"))

    async def main() -> None:
        async def handler() -> None:
            async with stream(engine) as outputs:
                await outputs.collect()

        task = asyncio.create_task(handler())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main(), engine)


def test_a_second_cancellation_does_not_leave_the_closing_half_done() -> None:
    closing, closed = asyncio.Event(), []

    async def stubborn() -> AsyncIterator[SequenceDelta]:
        try:
            await asyncio.Event().wait()
            yield SequenceDelta("r")
        finally:
            closing.set()
            for _ in range(5):
                await asyncio.sleep(0)
            closed.append(True)

    engine = FakeEngine(stubborn)

    async def main() -> None:
        async def handler() -> None:
            async with stream(engine) as outputs:
                await outputs.collect()

        task = asyncio.create_task(handler())
        await asyncio.sleep(0.001)
        task.cancel()
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]

    run(main(), engine)


def test_iterating_outside_is_a_mistake_not_a_hang() -> None:
    engine = FakeEngine(says("a"))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="async with"):
            await anext(stream(engine))

    run(main(), engine)


def test_an_engine_that_refuses_at_once() -> None:
    class Refusing(FakeEngine):
        def generate(self, *args: Any, **options: Any) -> AsyncIterator[SequenceDelta]:
            raise EngineDeadError("not loaded")

    engine = Refusing(silent())

    async def main() -> None:
        async with stream(engine) as outputs:
            with pytest.raises(EngineDeadError, match="not loaded"):
                await outputs.collect()

    run(main(), engine)


# ---- what a request keeps in its text, and when it begins to look for an end ----


def test_a_stop_string_can_be_kept_and_is_not_held_back_then() -> None:
    deltas = [SequenceDelta("r", ids("one E")), SequenceDelta("r", ids("ND and more"))]
    results, _ = feed(deltas, ["END"], include_stop_str_in_output=True)
    assert [(r.text, r.finish_reason, r.stop_reason) for r in results] == [("one E", None, None), ("ND", "stop", "END")]


def test_a_stop_token_can_be_kept() -> None:
    (newline,) = ids("\n")
    delta = SequenceDelta("r", [*ids("ab"), newline], "stop", stop_reason=newline)
    assert feed([delta], include_stop_str_in_output=True)[0][0].text == "ab\n"
    end = SequenceDelta("r", [*ids("ab"), EOS], "stop")
    assert feed([end], include_stop_str_in_output=True)[0][0].text == "ab"
    assert feed([end], include_stop_str_in_output=True, skip_special_tokens=False)[0][0].text == "ab</s>"


def test_special_tokens_can_be_shown() -> None:
    delta = SequenceDelta("r", [*ids("a"), EOS, *ids("b")], "length")
    assert feed([delta])[0][0].text == "ab"
    assert feed([delta], skip_special_tokens=False)[0][0].text == "a</s>b"


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, ""), (2, "xxab"), (5, "xxab"), (6, "xxabxxcd"), (9, "xxabxxcd"), (10, "xxabxxcdxxe")],
)
def test_stop_strings_are_not_looked_for_before_there_are_enough_tokens(min_tokens: int, text: str) -> None:
    delta = SequenceDelta("r", ids("xxabxxcdxxe"), "length")
    results, _ = feed([delta], ["xx"], min_tokens=min_tokens, max_tokens=99)
    assert results[0].text == text


def test_a_stop_string_may_begin_before_there_are_enough_tokens() -> None:
    results, _ = feed([SequenceDelta("r", ids("axxxb"), "length")], ["xx"], min_tokens=3)
    assert results[0].text == "ax"


def test_logprobs_go_with_their_tokens() -> None:
    tokens = ids("one END more")
    logprobs = [TokenLogprob(token, -1.0, 1) for token in tokens]
    prompt = [TokenLogprob(5, -2.0, 1)]
    deltas = [SequenceDelta("r", prompt_logprobs=prompt), SequenceDelta("r", tokens, logprobs=logprobs)]
    results, count = feed(deltas, ["END"])
    assert results[0].prompt_logprobs == prompt
    assert [logprob.token_id for logprob in results[1].logprobs] == list(results[1].token_ids) == tokens[:count]


def test_an_echo_of_tokens_goes_on_in_the_middle_of_a_character() -> None:
    first, *rest = ids("é")
    output = SequenceOutput(0, TOKENIZER, SamplingParams(), prompt_token_ids=[*ids("a"), first], echo=True)
    assert output.prompt_text == "a"
    assert output.update(SequenceDelta("r", rest, "length")).text == "é"
    silent = SequenceOutput(0, TOKENIZER, SamplingParams(), prompt_token_ids=[*ids("a"), first])
    assert (silent.prompt_text, silent.update(SequenceDelta("r", rest, "length")).text) == ("", "\ufffd")
