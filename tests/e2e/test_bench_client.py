"""The load generator against servers that behave, break and lie."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.server import Server

from chairlift.cli.bench import bench
from chairlift.config import ConfigError

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Script = Callable[[int, dict], AsyncIterator[bytes]]


def chunk(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    numbers: dict = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        numbers["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps({"choices": [], "usage": numbers}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def good(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK
    for _ in range(body["max_tokens"]):
        yield chunk("x")
    yield chunk("", "length") + usage(7, body["max_tokens"]) + DONE


class ScriptedServer:
    """Answers each request with what a script yields, byte for byte, and then closes the connection."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict] = []
        self.open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        serving = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1"), self._loop)
        self._server = serving.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            async for piece in self.script(len(self.bodies) - 1, body):
                writer.write(piece)
                await writer.drain()
            self.open -= 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
def result_file(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def run(url: str, file: Path | None, *arguments: str, prompts: int = 4) -> Result:
    saving = ("--result-dir", str(file.parent), "--result-filename", file.name, "--save-detailed") if file else ()
    standing = (
        "--base-url",
        url,
        "--model",
        "m",
        "--num-prompts",
        str(prompts),
        "--num-warmups",
        "0",
        "--disable-tqdm",
    )
    lengths = ("--random-input-len", "7", "--random-output-len", "3")
    return CliRunner().invoke(bench, [*standing, *lengths, *saving, *arguments])


def test_counts_and_keys_of_a_good_run(result_file: Path) -> None:
    with ScriptedServer(good) as server:
        done = run(server.url, result_file, "--goodput", "ttft:60000", "tpot:60000", "--metadata", "tag=a=b")
    assert done.exit_code == 0, done.output
    result = json.loads(result_file.read_text())
    expected = {
        "completed": 4, "failed": 0, "total_input_tokens": 28, "total_output_tokens": 12, "backend": "openai",
        "model_id": "m", "num_prompts": 4, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": None,
        "output_lens": [3] * 4, "input_lens": [7] * 4, "generated_texts": ["xxx"] * 4, "errors": [""] * 4, "tag": "a=b",
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert [len(gaps) for gaps in result["itls"]] == [2] * 4
    assert result["output_throughput"] == pytest.approx(12 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p99"):
            assert f"{statistic}_{name}_ms" in result
    assert "does not say how much it took from a prefix cache" in done.stderr


def test_bodies_ask_for_exactly_the_length(result_file: Path) -> None:
    with ScriptedServer(good) as server:
        assert run(server.url, None, "--vocab-size", "100", "--extra-body", '{"top_k": 3}', prompts=2).exit_code == 0
    for body in server.bodies:
        assert body["model"] == "m"
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["top_k"]) == (3, True, True, 3)
        assert len(body["prompt"]) == 7
        assert all(0 <= token < 100 for token in body["prompt"])
    assert server.bodies[0]["prompt"] != server.bodies[1]["prompt"]


def test_a_chat_is_measured_from_its_first_content(result_file: Path) -> None:
    async def chat(number: int, body: dict) -> AsyncIterator[bytes]:
        assert body["messages"][0]["role"] == "user"
        yield OK + b": a comment\n\n"
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
            yield b"data:" + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\r\n\r\n"
        yield usage(9, 2, cached=4) + DONE

    with ScriptedServer(chat) as server:
        done = run(server.url, result_file, "--backend", "openai-chat")
    result = json.loads(result_file.read_text())
    assert done.exit_code == 0
    assert [len(gaps) for gaps in result["itls"]] == [1] * 4
    assert "44% of the prompt tokens from its prefix cache" in done.stderr


async def _breaks(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + chunk("x") + chunk("x")


async def _cut(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + chunk("x") + b'data: {"choi'


async def _short(number: int, body: dict) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n" + chunk("x")


async def _garbage(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + b"data: {not json}\n\n" + DONE


async def _list(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + b"data: [1, 2]\n\n" + DONE


async def _html(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + b"<html>a proxy's idea of an answer</html>\n\n"


async def _reports(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + chunk("x") + b'data: {"error": {"message": "out of memory"}}\n\n' + DONE


async def _refuses(number: int, body: dict) -> AsyncIterator[bytes]:
    text = b'{"error": {"message": "the prompt is\\n too long"}}'
    yield b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(text) + text


async def _empty(number: int, body: dict) -> AsyncIterator[bytes]:
    yield OK + usage(7, 0) + DONE


async def _silent(number: int, body: dict) -> AsyncIterator[bytes]:
    for _ in ():
        yield b""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (_breaks, "the stream ended after 2 pieces without [DONE]"),
        (_cut, "in the middle of an event"),
        (_short, "the connection broke after 1 pieces"),
        (_garbage, "an event that is no completion chunk: '{not json}'"),
        (_list, "an event that is no completion chunk"),
        (_html, "a line that is no server-sent event"),
        (_reports, "the server reported in its stream: out of memory"),
        (_refuses, "HTTP 400: the prompt is too long"),
        (_empty, "the answer has no tokens"),
        (_silent, "the connection broke"),
    ],
)
def test_a_server_that_fails_half_of_the_time(script: Script, message: str, result_file: Path) -> None:
    async def half(number: int, body: dict) -> AsyncIterator[bytes]:
        async for piece in good(number, body) if number % 2 == 0 else script(number, body):
            yield piece

    with ScriptedServer(half) as server:
        done = run(server.url, result_file, "--max-concurrency", "1")
    result = json.loads(result_file.read_text())
    assert done.exit_code == 1
    assert "2 of 4 requests failed, the first with: " in done.stderr
    assert message in done.stderr
    assert (result["completed"], result["failed"]) == (2, 2)
    assert [bool(error) for error in result["errors"]] == [False, True, False, True]
    assert message in result["errors"][1]
    assert result["total_output_tokens"] == 6
    assert sum(result["error_counts"].values()) == 2


def test_a_server_that_fails_always_is_given_up(result_file: Path) -> None:
    with ScriptedServer(_refuses) as server:
        done = run(server.url, result_file, "--max-concurrency", "1", prompts=50)
    assert done.exit_code == 1
    assert "ended early: HTTP 400: the prompt is too long" in done.stderr
    assert len(server.bodies) < 10
    assert json.loads(result_file.read_text())["ended_early"].startswith("HTTP 400")


def test_an_endpoint_that_is_down(result_file: Path) -> None:
    with ScriptedServer(good) as server:
        url = server.url
    done = run(url, result_file)
    assert done.exit_code == 1
    assert "cannot connect to 127.0.0.1" in done.stderr
    assert json.loads(result_file.read_text())["completed"] == 0
    warm = CliRunner().invoke(bench, ["--base-url", url, "--model", "m", "--num-prompts", "2"])
    assert isinstance(warm.exception, ConfigError)
    assert "the warm-up of" in str(warm.exception)
    unnamed = CliRunner().invoke(bench, ["--base-url", url, "--num-prompts", "2"])
    assert isinstance(unnamed.exception, ConfigError)
    assert "which model it serves" in str(unnamed.exception)


def test_a_closed_loop_has_as_many_open_as_clients_and_no_queue(result_file: Path) -> None:
    async def slow(number: int, body: dict) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.02)
        async for piece in good(number, body):
            yield piece

    with ScriptedServer(slow) as server:
        assert run(server.url, result_file, "--max-concurrency", "3", prompts=12).exit_code == 0
    result = json.loads(result_file.read_text())
    assert server.most_open == 3
    assert result["max_concurrent_requests"] == 3
    assert sorted(result["start_times"])[2] < 0.02 < sorted(result["start_times"])[3]
    assert max(result["client_queues"]) < min(result["e2els"])


def test_an_open_loop_counts_from_when_a_request_was_due(result_file: Path) -> None:
    """One place, and a server that takes 50 ms: the last of ten that are due at once has waited for nine others."""

    async def slow(number: int, body: dict) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.05)
        async for piece in good(number, body):
            yield piece

    with ScriptedServer(slow) as server:
        done = run(server.url, result_file, "--max-concurrency", "1", "--request-rate", "1000", prompts=10)
    result = json.loads(result_file.read_text())
    assert server.most_open == 1
    assert max(result["client_queues"]) > 8 * 0.05
    assert max(result["ttfts"]) > 9 * 0.05
    assert all(ttft > queue for ttft, queue in zip(result["ttfts"], result["client_queues"], strict=True))
    assert "held them back" in done.stderr


def test_a_trace_is_sent_at_its_times(result_file: Path, tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 4, "output_length": 2} for t in (0, 200, 400)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    with ScriptedServer(good) as server:
        assert run(server.url, result_file, "--trace", str(trace), "--time-scale", "0.5").exit_code == 0
    result = json.loads(result_file.read_text())
    assert result["start_times"] == pytest.approx([0, 0.1, 0.2])
    assert result["output_lens"] == [2, 2, 2]
    assert result["dataset"] == "trace"


def test_text_datasets(result_file: Path, tmp_path: Path) -> None:
    sharegpt = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because" * 4}]
    sharegpt.write_text(json.dumps([{"conversations": turns[:1]}, {"conversations": turns}]))
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "one"}\n{"prompt": "two", "output_tokens": 5}\n')
    with ScriptedServer(good) as server:
        named = ("--dataset-name", "sharegpt", "--dataset-path", str(sharegpt))
        assert run(server.url, None, *named).exit_code == 0
        assert (
            run(server.url, None, "--dataset-name", "custom", "--trace", str(custom), "--output-len", "4").exit_code
            == 0
        )
        broken = run(server.url, None, "--dataset-name", "custom", "--trace", str(custom))
    assert [(b["prompt"], b["max_tokens"]) for b in server.bodies] == [("why?", 7), ("one", 4), ("two", 4)]
    assert broken.exit_code == 2
    assert "line 1" in broken.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goodput", "speed:5"), "is no objective"),
        (("--request-rate", "0"), "above 0"),
        (("--burstiness", "-1"), "burstiness"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--dataset-name", "sharegpt"), "--dataset-path FILE"),
        (("--trace", "/nonexistent"), "cannot read"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--ramp-up-start-rps", "1"), "--ramp-up-strategy"),
        (("--random-range-ratio", "1"), "--random-range-ratio"),
        (("--base-url", "ftp://x"), "no http or https address"),
        (("--extra-body", "[]"), "JSON object"),
        (("--metric-percentiles", "50,101"), "percentiles"),
        (("--percentile-metrics", "speed"), "is no list of"),
        (("--header", "x"), "NAME=VALUE"),
        (("--no-such-flag",), "No such option"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = run("http://127.0.0.1:1", None, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_against_our_own_server(tiny_server: Server, result_file: Path) -> None:
    tiny_server.wait_until_idle()
    counted = "chairlift:prompt_tokens_total"
    before = tiny_server.metrics()[counted]
    done = run(
        tiny_server.url, result_file, "--model", "tiny", "--vocab-size", "200", "--max-concurrency", "4", prompts=12
    )
    assert done.exit_code == 0, done.output
    result = json.loads(result_file.read_text())
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (12, 84, 36)
    assert tiny_server.metrics()[counted] - before == 84
    assert result["max_concurrent_requests"] == 4
