"""The comparison from the command line on a real model, and its report in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from chairlift.cli.compare import compare
from chairlift.config import ConfigError
from chairlift.model.source import ModelError

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ENGINE = ("--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "32MiB", "--seed", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(compare, [*arguments, *ENGINE])


@pytest.fixture(scope="module")
def files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, Path]:
    """The worked example's JSON document, its report and the report's path."""
    directory = tmp_path_factory.mktemp("compare")
    document, report = directory / "out.json", directory / "out.html"
    saving = ("--json", str(document), "--html", str(report), "--save-detailed")
    done = run(
        "worked-example", "--model", str(tiny_model), "--repeats", "1", "--goodput", "e2el:1e9", "ttft:1e9", *saving
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "continuous-4 against static-4" in done.stdout
    return json.loads(document.read_text()), report.read_text(), report


def test_the_counts_of_the_worked_example(files: tuple[dict, str, Path]) -> None:
    static, continuous = (policy["repeats"][0] for policy in files[0]["policies"])
    assert [
        (b["requests"], b["generating_steps"], b["row_steps"], b["wasted_row_steps"]) for b in static["batches"]
    ] == [(["A", "B", "C", "D"], 200, 800, 510), (["E", "F"], 40, 80, 0)]
    assert [(b["row_steps"], b["wasted_row_steps"]) for b in continuous["batches"]] == [(370, 0)]
    last_of_d = max(n for n, step in enumerate(continuous["steps"]) if "D" in {item["name"] for item in step["work"]})
    assert sum(item["name"] == "D" and item["sampled"] for s in continuous["steps"] for item in s["work"]) == 10
    assert continuous["steps"][last_of_d + 1]["admitted"] == ["E"]
    assert continuous["metrics"]["rows_wasted"] == 0
    assert static["metrics"]["request_goodput"] == static["metrics"]["request_throughput"]


class Page(HTMLParser):
    """What of a document matters here: addresses it points to, ids, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.addresses += [values[name] for name in ("src", "href", "xlink:href") if values.get(name)]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_stands_alone(files: tuple[dict, str, Path]) -> None:
    page = Page(files[1])
    assert not page.open
    assert [address for address in page.addresses if not address.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)|@import|<script", files[1])
    assert len(set(page.ids)) == len(page.ids)
    targets = {address[1:] for address in page.addresses if address.startswith("#")}
    assert targets <= set(page.ids)
    assert set(re.findall(r"var\((--[\w-]+)\)", files[1])) <= set(re.findall(r"(--[\w-]+):", files[1]))


def test_the_report_shows_both_timelines_with_a_lane_for_each_place(files: tuple[dict, str, Path]) -> None:
    text = files[1]
    timeline = text[text.index("Who held which place") : text.index("Step by step")]
    assert re.findall(r'id="timeline-lanes-([\w-]+)"', timeline) == ["static-4-4", "continuous-4-4"]
    for panel in timeline.split('id="timeline-lanes-')[1:]:
        vertical = panel.split("matplotlib.axis_")[2]  # the first of the two has numbers, too
        lanes = re.findall(r"<text[^>]*>(\d)</text>", vertical)
        assert lanes == ["1", "2", "3", "4"]
        for name in "ABCDEF":
            assert re.search(rf"<text[^>]*>{name}</text>", panel)
    assert "200 generating steps, 800 row-steps, 510 of them wasted" in text
    assert '<th scope="row">Effective utilisation (%)</th>' in text


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_a_browser_opens_the_report_without_complaint(files: tuple[dict, str, Path], tmp_path: Path) -> None:
    assert BROWSER is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path}",
    )
    done = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=2000", "--dump-dom", files[2].as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == 4
    assert done.stdout.count('id="timeline-lanes-') == 2


def test_a_peak_and_a_trace_on_a_real_model(tiny_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model), "--repeats", "1", "--scale-to", "64")
    document, report = tmp_path / "peak.json", tmp_path / "peak.html"
    sizes = ("--static-batch-size", "4", "--static-batch-size", "8", "--max-num-seqs", "6", "--num-requests", "20")
    done = run("peak-50", *model, *sizes, "--json", str(document), "--html", str(report))
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(document.read_text())
    assert [policy["name"] for policy in result["policies"]] == ["static-4", "static-8", "continuous-6"]
    assert [change["from"] for change in result["changes"]] == ["static-4", "static-8"]
    for policy in result["policies"]:
        metrics = policy["repeats"][0]["metrics"]
        assert metrics["completed"] == 20
        assert metrics["max_running"] <= policy["size"]
        assert metrics["total_output_tokens"] == result["workload"]["output_tokens"]
        assert "requests" not in policy["repeats"][0]
    assert "Sequences in each step" in report.read_text()
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,40,4\n" * 5)
    done = run("--trace", str(trace), "--max-requests", "3", *model, "--json", str(document))
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(document.read_text())["workload"]["requests"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a scenario or --trace"),
        (("peak-50", "--trace", "x"), "give a scenario or --trace"),
        (("nonsense",), "is not one of"),
        (("peak-50", "--goodput", "ttft"), "is no objective"),
        (("peak-50", "--save-detailed"), "--json"),
        (("peak-50", "--json", "/nonexistent/x.json"), "is no directory"),
        (("peak-50", "--static-batch-size", "0"), "--static-batch-size"),
        (("peak-50", "--matrix-peak", "0"), "--matrix-peak"),
        (("peak-50", "--repeats", "0"), "--repeats"),
        (("peak-50", "--batching", "static"), "No such option"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(compare, list(arguments))
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_workload_that_cannot_run_is_an_error(tiny_model: Path) -> None:
    for arguments in (
        ("bursty", "--burstiness", "0"),
        ("--trace", "/nonexistent"),
        ("peak-50", "--model", "/nonexistent"),
    ):
        done = run(*arguments, *(() if "--model" in arguments else ("--model", str(tiny_model))))
        assert done.exit_code == 1
        assert type(done.exception) in (ConfigError, ModelError), done.exception
