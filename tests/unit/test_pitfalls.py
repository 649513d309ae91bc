"""Those of docs/pitfalls.md that have no better place, and that the others are where that page says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.driving import Driver, request

from chairlift.api.app import create_app
from chairlift.config import EngineConfig
from chairlift.engine.client import EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.remote import RemoteEngine
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.text.output import fan_out

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 21))
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text(encoding="utf-8")), f"{path}::{name}"


def continuous(max_num_seqs: int = 4) -> Driver:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    return Driver(lambda kv: ContinuousScheduler(config, kv, 4096))


def test_n_above_max_num_seqs_runs():
    """Pitfall 11: each of the n is a request of its own, and those that find no place wait."""
    driver = continuous(max_num_seqs=2)
    params = SamplingParams(n=5, max_tokens=3, seed=1)
    driver.add(*(request(f"r{i}", [1, 2, 3], 3, seed=p.seed) for i, p in enumerate(fan_out(params))))
    driver.run()
    assert len(driver.finished_in) == 5
    assert max(len(plan.chunks) for plan in driver.plans) == 2


PLANS = """
import sys; sys.path.insert(0, sys.argv[1])
from support.driving import Driver, request
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
driver = Driver(lambda kv: ContinuousScheduler(config, kv, 400), num_blocks=14)
driver.add(*(request(f"r{i}", [i, i + 1, i + 2] * (1 + i % 3), 5 + i % 4) for i in range(12)))
driver.run()
for plan in driver.plans:
    print(plan.step, [(c.request_id, list(c.token_ids), c.start) for c in plan.chunks], plan.preempted)
"""


def test_plans_do_not_depend_on_the_order_of_sets():
    """Pitfall 16: whatever the hash seed of the process, the same requests make the same plans."""
    outputs = set()
    for seed in ("0", "1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PLANS, str(ROOT / "tests")]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert result.stdout.count("\n") > 10
        outputs.add(result.stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize(("stalled", "wedged"), [(5.0, False), (61.0, True)])
def test_a_loop_that_hangs_is_called_wedged(stalled: float, wedged: bool):
    """Pitfall 18; and an engine that has been idle for an hour is not wedged when the first request comes."""
    engine = RemoteEngine(EngineConfig(step_timeout=60.0))
    engine._capacity = Capacity(num_blocks=4, block_size=16, max_model_len=64, vocab_size=10)
    now = time.monotonic()
    engine._last_step = engine._last_word = now - 3600
    assert not engine.stats().wedged
    engine._streams["0"] = None  # type: ignore[assignment] - only counted
    engine._busy_since = now - stalled
    stats = engine.stats()
    assert (stats.has_work, stats.wedged) == (True, wedged)
    assert stats.last_step_age >= 3600


class FullEngine:
    """An engine with nine sequences on its hands."""

    capacity = Capacity(num_blocks=64, block_size=16, max_model_len=128, vocab_size=300, model="m")

    def stats(self) -> EngineStats:
        return EngineStats(unfinished=9, has_work=True)

    def subscribe(self, _: object) -> None:
        pass


def post(body: dict[str, Any], **options: Any) -> httpx.Response:
    tokenizer = SimpleNamespace(eos_token_ids=(), chat_template=SimpleNamespace(source=""))
    app = create_app(FullEngine(), tokenizer, served_model_names=["m"], **options)  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json={"model": "m", "prompt": [1, 2], **body})

    return asyncio.run(ask())


def test_a_full_queue_answers_429_and_when_to_come_back():
    """Pitfall 19."""
    response = post({"n": 2}, max_open_sequences=10)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "9 sequences are unfinished, this request has 2, and at most 10 may be" in error["message"]


def test_a_reused_client_id_aborts_no_stranger():
    """Pitfall 9: a client's id is a label in the answer's headers; the engine counts its own."""
    engine = RemoteEngine(EngineConfig())
    streams = [engine.generate([1], SamplingParams(seed=0)) for _ in range(2)]

    async def begin_and_leave() -> list[Any]:
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        commands = []
        while not engine._outbox.empty():
            commands.append(engine._outbox.get())
        return commands

    commands = asyncio.run(begin_and_leave())
    assert [(type(c).__name__, c.request_id) for c in commands] == [
        ("AddRequest", "0"),
        ("AddRequest", "1"),
        ("AbortRequest", "0"),
        ("AbortRequest", "1"),
    ]
