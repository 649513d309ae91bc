"""A scripted engine behind the real tokenizer code, the real application and, where wanted, a real server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import tokenizers
from fastapi import FastAPI
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from chairlift.api.app import create_app
from chairlift.api.server import bind, serve
from chairlift.config import ServerConfig
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import RequestTiming, RowCounts, SequenceDelta, StepRecord, TokenLogprob
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.tokenizer import Tokenizer

END = 256  # the end-of-sequence token; below it a token is a byte
TEMPLATE = (
    "{% if refuse %}{{ raise_exception(refuse) }}{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{{ suffix }}"
)


@dataclass
class FakeEngine:
    """Says ``reply`` to every prompt, a byte at a step, and remembers what it was asked and how that ended."""

    reply: bytes = b"Hello world"
    pause: Callable[[], float] = lambda: 0.0
    die_after: int | None = None
    refusal: str | None = None
    health: EngineStats = field(default_factory=EngineStats)
    asked: list[tuple[list[int], SamplingParams, int]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    running: int = 0
    capacity = Capacity(num_blocks=64, block_size=16, max_model_len=128, vocab_size=300, model="tiny")
    subscribers: list[Callable[[StepRecord], None]] = field(default_factory=list)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        self.asked.append((list(prompt_token_ids), params, priority))
        self.running += 1
        end = "abort"
        try:
            if self.refusal is not None:
                yield SequenceDelta("0", finish_reason="error", error=self.refusal)
            if params.prompt_logprobs is not None:
                told = [_logprob(token, i, params.prompt_logprobs) for i, token in enumerate(prompt_token_ids)][1:]
                for part in (told[:1], told[1:]):
                    yield SequenceDelta("0", prompt_logprobs=part)
            if params.max_tokens == 0:
                end = "length"
                yield SequenceDelta("0", finish_reason="length", timing=RequestTiming(arrival=1.0, admitted=1.5))
                return
            for step in itertools.count():
                await asyncio.sleep(self.pause())
                if step == self.die_after:
                    raise EngineDeadError("out of luck")
                delta = self._step(step, params, len(prompt_token_ids))
                end = delta.finish_reason or end
                yield delta
                if delta.finish_reason:
                    return
        finally:
            self.running -= 1
            self.ends.append(end)

    def _step(self, step: int, params: SamplingParams, prompt_tokens: int) -> SequenceDelta:
        for on_step in self.subscribers:
            on_step(StepRecord(step, 0.0, 0.01, RowCounts(decode=1)))
        timing = RequestTiming(arrival=1.0, admitted=1.5)
        token = END if step == len(self.reply) else self.reply[step]
        logprobs = () if params.logprobs is None else (_logprob(token, step, params.logprobs),)
        if step == len(self.reply):
            return SequenceDelta("0", (END,), "stop", timing=timing, logprobs=logprobs)
        limit = min(params.max_tokens or self.capacity.max_model_len, self.capacity.max_model_len - prompt_tokens)
        reason = "length" if step + 1 == limit else None
        return SequenceDelta("0", (token,), reason, timing=timing, logprobs=logprobs)

    def stats(self) -> EngineStats:
        return self.health

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        self.subscribers.append(on_step)

    async def close(self) -> None:
        pass


def _logprob(token: int, place: int, num_top: int) -> TokenLogprob:
    """The more to the right, the less likely; the token itself comes first, and those after it follow."""
    return TokenLogprob(token, -float(place), 1, tuple(((token + i) % 256, -float(place + i)) for i in range(num_top)))


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 ends a sequence and 257 begins one."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    return Tokenizer(backend, eos_token_ids=[END], chat_template=ChatTemplate({"default": TEMPLATE}))


@pytest.fixture
def make_tokenizer() -> Callable[[], Tokenizer]:
    return byte_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return create_app(
        engine, byte_tokenizer(), served_model_names=["tiny", "org/tiny"], config=ServerConfig(max_body_size=100_000)
    )


@pytest.fixture
def make_app(engine: FakeEngine) -> Callable[..., FastAPI]:
    """Makes the application with these settings of the server, and what else :func:`create_app` takes."""

    def make(config: ServerConfig, **options: Any) -> FastAPI:
        return create_app(engine, byte_tokenizer(), served_model_names=["tiny"], config=config, **options)

    return make


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


@asynccontextmanager
async def _live(app: ASGIApp, **options: Any) -> AsyncIterator[str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = {"shutdown_timeout": 5} | options
    serving = asyncio.create_task(serve(app, bind("127.0.0.1", 0), on_ready=ready.set_result, **options))
    try:
        yield await ready
    finally:
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


@pytest.fixture
def live() -> Callable[..., AbstractAsyncContextManager[str]]:
    """Serves an application on loopback while the context lasts; gives its URL."""
    return _live
