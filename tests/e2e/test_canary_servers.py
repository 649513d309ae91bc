"""From a static to a continuous server, both real, under load: nothing is lost on the way."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from support.server import Server, running_server

STEPS = (0.1, 0.25, 0.5, 1.0)
REQUESTS_A_STEP = int(os.environ.get("CHAIRLIFT_CANARY_REQUESTS", "80"))
CLIENTS = 8
TOKENS = 12


@contextmanager
def running_canary(stable: str, candidate: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [
        sys.executable, "-m", "chairlift", "canary", "--stable", stable, "--candidate", candidate, "--port", "0",
        "--no-live", *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CHAIRLIFT_CANARY_KEY": "k"}
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if address := re.search(r"address\s+(http://\S+)/v1", line):
                yield address[1], process
                break
        else:
            raise AssertionError("the router ended")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def static_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("static") / "steps.jsonl"
    arguments = ("--batching", "static", "--static-batch-size", "4", "--dtype", "float32", "--num-threads", "1")
    with running_server(log, str(tiny_model), "--served-model-name", "tiny", *arguments) as server:
        yield server


def command(*arguments: str) -> str:
    """A command that steers, as an operator types it."""
    environment = os.environ | {"CHAIRLIFT_CANARY_KEY": "k", "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, "-m", "chairlift", "canary", *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


async def answers(url: str, count: int, prefix: str) -> list[tuple[str, str]]:
    """Side and text of so many streams, from a few clients, each a session of its own."""
    got: list[tuple[str, str]] = []
    numbers = iter(range(count))

    async def client(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            body = {"model": "tiny", "prompt": f"{number % 7} skiers", "max_tokens": TOKENS, "temperature": 0}
            body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
            headers = {"X-Session-Id": f"{prefix}-{number}"}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                text = await response.text()
                assert response.status == 200, text
                assert text.endswith("data: [DONE]\n\n")
                assert f'"completion_tokens":{TOKENS}' in text
                words = re.findall(r'"text":"((?:[^"\\]|\\.)*)"', text)
                got.append((response.headers["x-chairlift-canary"], "".join(words)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return got


def test_from_static_to_continuous_nothing_is_lost(static_server: Server, tiny_server: Server):
    gates = "p95_e2e<60s,error_rate<5%,vs_stable.p50_e2e<20"
    arguments = ("--steps", "10,25,50,100", "--hold", "1h", "--gate", gates, "--session-fallback", "request")
    texts: dict[str, set[str]] = {}
    with running_canary(static_server.url, tiny_server.url, *arguments) as (url, process):
        for step, share in enumerate(STEPS):
            got = asyncio.run(answers(url, REQUESTS_A_STEP, f"step{step}"))
            assert len(got) == REQUESTS_A_STEP
            sides = Counter(side for side, _ in got)
            assert abs(sides["candidate"] - share * REQUESTS_A_STEP) <= max(1, 0.02 * REQUESTS_A_STEP)
            for side, text in got:
                texts.setdefault(side, set()).add(text)
            print(f"{share:.0%}: {dict(sides)}")
            if share < 1:
                assert f"{STEPS[step + 1] * 100:g} % on the candidate" in command("promote", "--url", url)
        assert len(texts["stable"]) == len(texts["candidate"]) == 7
        assert texts["stable"] == texts["candidate"]  # the same model, greedy and in fp32
        shown = command("status", "--url", url)
        assert "step 4 of 4" in shown
        assert "p95_e2e<60s" in shown
        assert "rolled back" in command("rollback", "--url", url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_gates_alone_walk_it_up_under_load(static_server: Server, tiny_server: Server):
    gates = "p80_e2e<60s,error_rate<20%"
    arguments = ("--steps", "25,100", "--hold", "1s", "--window", "2m", "--gate", gates, "--false-pass", "0.3")
    with running_canary(static_server.url, tiny_server.url, *arguments, "--session-fallback", "request") as (url, _):
        got: list[tuple[str, str]] = []
        for block in range(40):
            got += asyncio.run(answers(url, 40, f"block{block}"))
            if "complete" in command("status", "--url", url, "--json"):
                break
        else:
            raise AssertionError(command("status", "--url", url))
        assert {side for side, _ in got} == {"stable", "candidate"}
