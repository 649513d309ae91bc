"""benchmarks/peers.py: its arithmetic, and the line to a driver, with drivers that compute nothing."""

from __future__ import annotations

import importlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REQUESTS = [{"id": 0, "prompt": [5, 6, 7], "out": 4}, {"id": "B", "prompt": [8], "out": 2}]


def load(name: str) -> ModuleType:
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[:2]


peers = load("peers")
report = load("peers_report")
process = load("peers_process")
server_process = load("server_process")

HONEST = "[Answer(r.out, len(r.prompt), 1) for r in requests]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Starts a driver whose engine is given by two lines: what it does when made, and what a run returns."""
    started = []

    def make(answers: str = HONEST, setup: str = "pass", start_timeout: float = 60.0, turn_timeout: float = 60.0):
        script = tmp_path / "fake.py"
        script.write_text(
            textwrap.dedent(f"""
            import os, subprocess, sys, threading, time
            sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
            from driver import Answer, serve
            class Fake:
                def __init__(self, settings):
                    self.description = f"fake of {{settings.model}}"
                    {setup}
                def run(self, requests):
                    print("noise of a library")
                    return {answers}
                def close(self):
                    pass
            serve(Fake)
            """)
        )
        settings = {"model": "m", "precision": "bf16", "max_num_seqs": 4, "cores": 1, "options": {}}
        command = [sys.executable, str(script), json.dumps(settings)]
        started.append(process.DriverProcess(command, os.environ, start_timeout, turn_timeout))
        return started[-1]

    yield make
    for driver in started:
        driver.close()


def test_a_turn_is_timed_by_the_driver_and_checked(start):
    driver = start()
    assert driver.description == "fake of m"
    assert driver.start_seconds > 0
    turn = driver.run(REQUESTS)
    assert turn.first_tokens == [1, 1]
    assert 0 <= turn.seconds < 60
    assert driver.run(REQUESTS[:1]).first_tokens == [1]  # lives on


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("[Answer(r.out - 1, len(r.prompt), 1) for r in requests]", "request 0: 3 tokens instead of exactly 4"),
        ("[Answer(r.out, len(r.prompt) + 1, 1) for r in requests]", "read 4 prompt tokens instead of 3"),
        ("[]", "0 answers to 2 requests"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit('out of memory')", "ended with status 1: out of memory"),
        ("os.abort()", "ended with Aborted"),
    ],
)
def test_wrong_work_and_failures_are_told(start, answers, message):
    driver = start(answers)
    with pytest.raises(process.PeerError, match=message):
        driver.run(REQUESTS)


def test_an_engine_that_does_not_tell_prompt_lengths_is_believed(start):
    assert start("[Answer(r.out) for r in requests]").run(REQUESTS).first_tokens == [None, None]


def test_an_engine_that_cannot_start_says_why(start):
    with pytest.raises(process.PeerError, match="ValueError: no such model"):
        start(setup="raise ValueError('no such model')")
    with pytest.raises(process.PeerError, match="cannot start"):
        process.DriverProcess(["/no/such/python"], os.environ, 1.0, 1.0)


def test_only_a_start_that_crashed_is_tried_again(start, monkeypatch):
    tries = []

    def crash(*_):
        tries.append("crash")
        return start(setup="os.abort()") if len(tries) < 3 else start()

    monkeypatch.setattr(peers, "start", crash)
    assert peers.start_again("vllm", "bf16", 64, None).run(REQUESTS).first_tokens == [1, 1]
    assert len(tries) == 3

    def refuse(*_):
        tries.append("refuse")
        return start(setup="raise ValueError('no such option')")

    monkeypatch.setattr(peers, "start", refuse)
    with pytest.raises(process.PeerError, match="no such option"):
        peers.start_again("vllm", "bf16", 64, None)
    assert tries == ["crash"] * 3 + ["refuse"]


def test_a_turn_without_end_is_ended(start):
    driver = start("time.sleep(600)", turn_timeout=0.2)
    with pytest.raises(process.PeerError, match="no answer within 0 s"):
        driver.run(REQUESTS)


def test_nothing_of_a_paused_engine_computes_until_its_next_turn(start):
    spin = "subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    driver = start(setup=spin)
    wait_for(lambda: driver.cpu_seconds() > 0.05)
    driver.pause()
    wait_for(lambda: all(p.status() == psutil.STATUS_STOPPED for p in tree(driver)))
    before = driver.cpu_seconds()
    time.sleep(0.1)
    assert driver.cpu_seconds() == before
    assert driver.run(REQUESTS).first_tokens == [1, 1]
    wait_for(lambda: driver.cpu_seconds() > before)


def test_close_ends_what_a_paused_engine_started(start):
    driver = start(setup="subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])")
    children = tree(driver)
    assert len(children) == 2
    driver.pause()
    driver.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []


def tree(driver) -> list[psutil.Process]:
    parent = psutil.Process(driver._process.pid)
    return [parent, *parent.children(recursive=True)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ratios_are_taken_round_by_round():
    assert report.speed_ratios([100.0, 90.0, None], [50.0, 60.0, 70.0], True) == [2.0, 1.5]
    assert report.speed_ratios([2.0, None, 3.0], [3.0, 4.0, 3.0], False) == [1.5, 1.0]  # seconds: less is better


def test_the_decode_rate_leaves_the_first_token_out():
    assert report.decode_rate(128, 2.54, 0.0) == pytest.approx(50.0)
    assert report.decode_rate(129, 3.0, 1.0) == pytest.approx(64.0)
    assert report.decode_rate(128, 1.0, 1.0) is None


FIGURES = {
    "chairlift bf16": [100.0, 120.0, 110.0],
    "chairlift int8": [220.0, 180.0, 220.0],
    "chairlift-server bf16": [99.0, 99.0, 99.0],
    "slow bf16": [10.0, 10.0, 10.0],
    "good bf16": [80.0, 80.0, 100.0],
    "good int8": [200.0, None, 200.0],
}


def test_the_best_peer_is_the_best_of_others_in_the_same_precision():
    assert report.best_peer(FIGURES, "bf16", True) == "good bf16"
    assert report.best_peer(FIGURES, "bf16", False) == "slow bf16"
    assert report.best_peer(FIGURES, "int8", True) == "good int8"
    assert report.best_peer({"chairlift bf16": [1.0], "good bf16": [None]}, "bf16", True) is None


def test_the_table_has_medians_ranges_ratios_and_verdicts():
    shares = {"chairlift bf16": [0.5, 0.6, 0.55]}
    text = report.table(report.SCENARIOS["set"], FIGURES, shares, "of the peak")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == [
        *("| chairlift int8", "| good int8", "| chairlift bf16"),
        *("| chairlift-server bf16", "| good bf16", "| slow bf16"),
    ]
    assert "| good bf16 | 80.0 [80.0–100.0] | 1.25 [1.10–1.50] | – |" in rows
    assert "| chairlift bf16 | 110.0 [100.0–120.0] | – | 55 [50–60] % |" in rows
    assert "| good int8 | 200.0 [200.0–200.0] | 1.10 [1.10–1.10] | – |" in rows
    assert "chairlift bf16: 1.25 [1.10–1.50] times the best peer, good bf16" in text
    assert "chairlift int8: 2.00 [1.50–2.20] times chairlift bf16" in text


def test_a_table_without_chairlift_has_no_ratios():
    text = report.table(report.SCENARIOS["example"], {"good bf16": [3.0, 5.0]}, {}, "")
    assert "| good bf16 | 4.00 [3.00–5.00] | – |" in text
    assert "times the best peer" not in text


def test_first_tokens_are_compared_where_both_tell_them():
    assert report.same_first_tokens([1, 2, 3, None], [1, 9, None, 4]) == (1, 2)


def test_a_turn_in_the_unit_of_its_scenario():
    turn = {"seconds": 4.0, "seconds_to_first": 2.0}
    assert peers.figure("set", turn, 1000, 128) == 250.0
    assert peers.figure("b1", turn, 1000, 129) == 64.0
    assert peers.figure("example", turn, 1000, 128) == 4.0


def test_the_request_set_is_whole_and_can_be_cut():
    workload = peers.load_workload(None)
    assert [len(workload[name]) for name in ("set", "b1", "example")] == [64, 1, 6]
    assert [request["out"] for request in workload["example"]] == [200, 50, 30, 10, 40, 40]
    assert len(peers.load_workload(3)["set"]) == 3


def test_another_set_is_refused(tmp_path, monkeypatch):
    data = json.loads(peers.REQUESTS.read_text())
    data["reqs"][0]["prompt"].append(1)
    other = tmp_path / "requests.json"
    other.write_text(json.dumps(data))
    monkeypatch.setattr(peers, "REQUESTS", other)
    with pytest.raises(SystemExit, match="not the request set"):
        peers.load_workload(None)


def test_options_are_json_or_text():
    texts = ["vllm.enforce_eager=true", "llamacpp.slots=32", "chairlift.kv_cache_dtype=int8"]
    assert peers.parse_options(texts) == {
        "vllm": {"enforce_eager": True},
        "llamacpp": {"slots": 32},
        "chairlift": {"kv_cache_dtype": "int8"},
    }
    for wrong in ("slots=32", "llamacpp.slots", "nobody.slots=1", "llamacpp.=1"):
        with pytest.raises(SystemExit, match="write ENGINE"):
            peers.parse_options([wrong])


def test_what_a_peer_lacks_is_named(tmp_path):
    engine = peers.ENGINES["openvino"]
    model = tmp_path / "models" / "smollm2"
    assert "venv-openvino/bin/python is not there" in peers.missing(engine, "bf16", tmp_path, model)
    python = tmp_path / "venv-openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert "openvino-bf16 is not there" in peers.missing(engine, "bf16", tmp_path, model)
    (model / "openvino-bf16").mkdir(parents=True)
    assert peers.missing(engine, "bf16", tmp_path, model) is None
    assert peers.missing(peers.ENGINES["transformers"], "int8", tmp_path, model) == "not compared in int8"


@pytest.mark.parametrize("name", ["openvino", "vllm", "llamacpp", "transformers"])
def test_there_is_help_for_every_peer(name):
    assert peers.install_help(name).splitlines()[0].endswith(f"`{name}`")
    assert "pip install" in peers.install_help(name)


def test_every_driver_is_there():
    assert {engine.driver for engine in peers.ENGINES.values()} == {
        path.name for path in (BENCHMARKS / "peers").glob("drive_*.py")
    }


def test_a_failed_engine_ends_neither_the_round_nor_the_others(start, monkeypatch):
    arguments = peers.parse_arguments(["--scenario", "set", "--limit", "2", "--repeats", "2"])
    comparison = peers.Comparison(arguments)
    monkeypatch.setattr(peers, "measure_machine", dict)
    for label, answers in (("bad bf16", "1 / 0"), ("chairlift bf16", HONEST), ("good bf16", HONEST)):
        comparison.processes[label, 64] = start(answers)
        comparison.engines[label] = {}
    comparison.round(0)
    comparison.round(1)
    assert comparison.failures == {"bad bf16": "ZeroDivisionError: division by zero"}
    order = [(turn["round"], turn["engine"]) for turn in comparison.turns]
    assert order == [(0, "chairlift bf16"), (0, "good bf16"), (1, "good bf16"), (1, "chairlift bf16")]
    figures = comparison.figures("set")
    assert set(figures) == {"chairlift bf16", "good bf16"}
    assert all(len(values) == 2 and None not in values for values in figures.values())
    comparison.close()


def test_a_chunked_answer_and_its_events_are_read():
    body = b'data: {"n": 1}\n\ndata: {"n": 2, "usage": {}}\n\ndata: [DONE]\n\n'
    chunked = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (10, body[:10], len(body) - 10, body[10:])
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server_process.events(server_process._body(head + chunked)) == [{"n": 1}, {"n": 2, "usage": {}}]
    with pytest.raises(server_process.ServerError, match="429 Too Many Requests: busy"):
        server_process._body(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy")
