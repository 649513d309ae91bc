"""chairlift and every rival engine that is installed, in turn, on the same requests; and how they compare.

    export PEERS_ROOT=~/peers                       # environments and models of the peers: docs/peers.md
    python benchmarks/peers.py                      # five rounds in bf16: some ten minutes
    python benchmarks/peers.py --precision bf16 int8 --json result.json
    python benchmarks/peers.py --option chairlift.max_num_batched_tokens=512 --option llamacpp.slots=32
    python benchmarks/peers.py --install-help vllm

All engines get the same requests as token ids (benchmarks/data/requests.json), greedy, with outputs of exact length,
which is checked. Each engine is started once and lives through all rounds in a process group of its own, which is
stopped (SIGSTOP) whenever another is measured. In each round and scenario the engines run one after the other, in the
opposite order every other round; ratios are taken round by round. `example` needs engines that hold four sequences, so
it starts a second process of each. The machine's matrix peaks and its bandwidth are measured anew in each round.

An engine that fails is reported, and left out from then on. Without `chairlift` itself the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers_report as report
from peers_process import DriverProcess, PeerEndedError, PeerError, Request

from chairlift.config import available_cores
from chairlift.measure.flops import useful_work
from chairlift.model.config import read_config
from chairlift.model.source import resolve

HERE = Path(__file__).resolve().parent
REQUESTS = HERE / "data" / "requests.json"
DOCUMENTATION = HERE.parent / "docs" / "peers.md"
PROMPT_TOKENS, OUTPUT_TOKENS = 12_417, 5_742  # of the whole set
MAX_NUM_SEQS = {"set": 64, "b1": 64, "example": 4}
WEIGHT_BYTES = {"bf16": 2, "int8": 1}
IDLE_SECONDS = 1.0
START_ATTEMPTS = 3


class Engine(NamedTuple):
    """How an engine of the comparison is found.

    Attributes:
        driver: file in benchmarks/peers.
        environment: folder of its virtual environment in PEERS_ROOT; ``None`` for the one that runs this.
        models: what it reads in the model's directory, for each precision that it is compared in.
        needs: what else must be there in PEERS_ROOT.
    """

    driver: str
    environment: str | None
    models: dict[str, str]
    needs: tuple[str, ...] = ()


ENGINES = {
    "chairlift": Engine("drive_chairlift.py", None, {"bf16": "safetensors", "int8": "safetensors"}),
    "chairlift-kv8": Engine("drive_chairlift_kv8.py", None, {"bf16": "safetensors", "int8": "safetensors"}),
    "chairlift-server": Engine("drive_chairlift_server.py", None, {"bf16": "safetensors", "int8": "safetensors"}),
    "openvino": Engine("drive_openvino.py", "venv-openvino", {"bf16": "openvino-bf16", "int8": "openvino-int8"}),
    "vllm": Engine("drive_vllm.py", "venv-vllm", {"bf16": "safetensors", "int8": "w8a8"}),
    "llamacpp": Engine(
        "drive_llamacpp.py", None, {"bf16": "bf16.gguf", "int8": "q8_0.gguf"}, ("llamacpp/build/bin/llama-server",)
    ),
    "transformers": Engine("drive_transformers.py", None, {"bf16": "safetensors"}),
}


def missing(engine: Engine, precision: str, root: Path, model: Path) -> str | None:
    """What an engine lacks for a precision; ``None`` if it can run."""
    if precision not in engine.models:
        return f"not compared in {precision}"
    needed = [root / name for name in engine.needs]
    if engine.environment is not None:
        needed.append(root / engine.environment / "bin" / "python")
    for path in (*needed, model / engine.models[precision]):
        if not path.exists():
            return f"{path} is not there"
    return None


def environment_of(name: str, root: Path) -> dict[str, str]:
    """The environment of a driver: the caller's, without settings of threads, but for those that the engine wants."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "GOMP_"))}
    environment["PEERS_ROOT"] = str(root)
    if name == "vllm":
        # What vLLM's documentation advises for the CPU: its own OpenMP, another allocator, a core for each thread.
        cores = sorted(os.sched_getaffinity(0))[: available_cores()]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        libraries = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), root / "venv-vllm" / "lib" / "libiomp5.so"]
        environment["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.exists())
    elif name in ("openvino", "transformers"):
        environment["OMP_NUM_THREADS"] = str(available_cores())
    return environment


def start(name: str, precision: str, max_num_seqs: int, arguments: argparse.Namespace) -> DriverProcess:
    """Starts an engine, warms it up, and leaves it stopped."""
    engine = ENGINES[name]
    settings = {
        "model": str(arguments.root / "models" / arguments.model),
        "precision": precision,
        "max_num_seqs": max_num_seqs,
        "cores": available_cores(),
        "options": arguments.options.get(name, {}),
    }
    python = sys.executable if engine.environment is None else arguments.root / engine.environment / "bin" / "python"
    command = [str(python), str(HERE / "peers" / engine.driver), json.dumps(settings)]
    process = DriverProcess(
        command, environment_of(name, arguments.root), arguments.start_timeout, arguments.turn_timeout
    )
    try:
        process.run([dict(request, out=8) for request in arguments.workload["set"]])
        process.run([dict(request, out=4) for request in arguments.workload["b1"]])
    except BaseException:
        process.close()
        raise
    return process


def start_again(name: str, precision: str, max_num_seqs: int, arguments: argparse.Namespace) -> DriverProcess:
    """``start``, a second and a third time if the engine crashes: nothing is measured yet.

    OpenVINO 2026.4's CPU plugin was seen to crash with a division by zero in some starts.
    """
    for _ in range(START_ATTEMPTS - 1):
        try:
            return start(name, precision, max_num_seqs, arguments)
        except PeerEndedError as error:
            progress(f"{name} {precision}: {error}; starting it again")
    return start(name, precision, max_num_seqs, arguments)


def idle_cores(process: DriverProcess) -> float:
    """Cores that an engine without work keeps busy. Above zero its threads spin, and it must be stopped."""
    time.sleep(IDLE_SECONDS)
    before = process.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (process.cpu_seconds() - before) / IDLE_SECONDS


class Comparison:
    """All engines of a run, their processes, and what they have shown so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.processes: dict[tuple[str, int], DriverProcess] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.turns: list[dict[str, Any]] = []
        self.machine: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}

    def start(self, name: str, precision: str) -> None:
        """Starts the processes that an engine needs for the scenarios, one after the other."""
        label = f"{name} {precision}"
        for max_num_seqs in sorted({MAX_NUM_SEQS[scenario] for scenario in self.arguments.scenario}, reverse=True):
            progress(f"starting {label}, {max_num_seqs} sequences")
            try:
                process = start_again(name, precision, max_num_seqs, self.arguments)
            except PeerError as error:
                self.fail(label, error)
                return
            self.processes[label, max_num_seqs] = process
            facts = {
                "description": process.description,
                "start_seconds": process.start_seconds,
                "idle": idle_cores(process),
            }
            process.pause()
            self.engines.setdefault(label, facts)

    def round(self, number: int) -> None:
        """Measures the machine, and then every engine on every scenario."""
        self.machine.append(measure_machine())
        for scenario in self.arguments.scenario:
            labels = [label for label, seqs in self.processes if seqs == MAX_NUM_SEQS[scenario]]
            for label in labels if number % 2 == 0 else reversed(labels):
                if (label, MAX_NUM_SEQS[scenario]) in self.processes:
                    self._turn(number, scenario, label)

    def _turn(self, number: int, scenario: str, label: str) -> None:
        process = self.processes[label, MAX_NUM_SEQS[scenario]]
        requests: list[Request] = self.arguments.workload[scenario]
        try:
            first = process.run([dict(request, out=1) for request in requests[:1]])  # and wakes the engine up
            if scenario == "b1":
                first = process.run([dict(request, out=1) for request in requests])
            turn = process.run(requests)
        except PeerError as error:
            self.fail(label, error)
            return
        process.pause()
        self.turns.append(
            {
                "round": number,
                "scenario": scenario,
                "engine": label,
                "seconds": turn.seconds,
                "seconds_to_first": first.seconds if scenario == "b1" else None,
                "others": turn.others,
            }
        )
        if scenario == "set":
            self.engines[label]["first_tokens"] = turn.first_tokens
        progress(f"round {number + 1}: {scenario}, {label}: {turn.seconds:.2f} s, others {turn.others:.2f} cores")

    def fail(self, label: str, error: PeerError) -> None:
        """Notes why an engine failed and ends its processes."""
        self.failures[label] = str(error)
        progress(f"{label} failed: {error}")
        for key in [key for key in self.processes if key[0] == label]:
            self.processes.pop(key).close()

    def close(self) -> None:
        """Ends all engines."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()

    def figures(self, scenario: str) -> dict[str, list[float | None]]:
        """What a scenario is measured by, for each engine and round."""
        tokens = sum(len(r["prompt"]) + r["out"] for r in self.arguments.workload[scenario])
        figures: dict[str, list[float | None]] = {}
        for turn in self.turns:
            if turn["scenario"] == scenario:
                rounds = figures.setdefault(turn["engine"], [None] * self.arguments.repeats)
                rounds[turn["round"]] = figure(scenario, turn, tokens, self.arguments.workload["b1"][0]["out"])
        return figures


def figure(scenario: str, turn: dict[str, Any], tokens: int, b1_tokens: int) -> float | None:
    """A turn in the unit of its scenario."""
    if scenario == "set":
        return tokens / float(turn["seconds"])
    if scenario == "b1":
        return report.decode_rate(b1_tokens, turn["seconds"], turn["seconds_to_first"])
    return float(turn["seconds"])


def measure_machine() -> dict[str, Any]:
    """What benchmarks/machine.py finds, from a process of its own: this one computes nothing."""
    progress("measuring the machine")
    result = subprocess.run([sys.executable, str(HERE / "machine.py")], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def shares(comparison: Comparison, scenario: str, figures: dict[str, list[float | None]]) -> dict[str, list[float]]:
    """Of the machine's ceiling, round by round: the matrix peak for the set, the read bandwidth for one sequence."""
    if scenario == "example":
        return {}
    arguments = comparison.arguments
    work = useful_work(read_config(resolve(str(arguments.root / "models" / arguments.model / "safetensors"))), 1.0)
    requests = arguments.workload["set"]
    outputs = sum(request["out"] for request in requests)
    rows = sum(len(request["prompt"]) for request in requests) + outputs - len(requests)  # the last is not computed
    flops = work.flops_per_row * rows + work.flops_per_token * outputs
    tokens = sum(len(request["prompt"]) for request in requests) + outputs
    result = {}
    for label, values in figures.items():
        precision = label.split()[1]
        weight_bytes = (work.flops_per_row + work.flops_per_token) / 2 * WEIGHT_BYTES[precision]
        result[label] = [
            value / tokens * flops / machine["measured"][f"{precision}_peak"]
            if scenario == "set"
            else value * weight_bytes / machine["measured"]["read_bandwidth"]
            for value, machine in zip(values, comparison.machine, strict=True)
            if value is not None
        ]
    return result


SHARE_TITLES = {"set": "of the matrix peak", "b1": "of the read bandwidth, by weights", "example": ""}


def print_report(comparison: Comparison, absent: dict[str, str]) -> None:
    """Everything that was found, in Markdown."""
    arguments, first = comparison.arguments, comparison.machine[0]["machine"]
    measured = {
        key: [entry["measured"][key] / 1e9 for entry in comparison.machine]
        for key in ("bf16_peak", "int8_peak", "read_bandwidth")
    }
    print(
        f"\n{first['cpu']}, {first['cores']} cores, {first['memory_gib']} GiB, torch {first['torch']}; "
        f"{', '.join(first['instruction_sets'])}"
    )
    print(
        f"bf16 peak {report.spread(measured['bf16_peak'], 0)} GFLOP/s, int8 {report.spread(measured['int8_peak'], 0)} "
        f"GOP/s, reads {report.spread(measured['read_bandwidth'], 1)} GB/s"
    )
    print(f"model {arguments.model}, {arguments.repeats} rounds in turn, median [range]\n")
    for label, facts in comparison.engines.items():
        ours = comparison.engines.get(f"{report.OURS} {label.split()[1]}", {}).get("first_tokens")
        if ours and "first_tokens" in facts:
            facts["same_first_tokens"] = report.same_first_tokens(ours, facts["first_tokens"])
    print(report.engine_table(comparison.engines))
    for scenario in arguments.scenario:
        figures = comparison.figures(scenario)
        if figures:
            known = shares(comparison, scenario, figures)
            print("\n" + report.table(report.SCENARIOS[scenario], figures, known, SHARE_TITLES[scenario]))
    disturbed = max((turn["others"] for turn in comparison.turns), default=0.0)
    print(f"\nothers kept at most {disturbed:.2f} cores busy during a turn")
    for label, reason in comparison.failures.items():
        print(f"{label} FAILED: {reason}")
    for label, reason in absent.items():
        print(f"{label} left out: {reason} (--install-help {label.split()[0]})")


def save(comparison: Comparison, absent: dict[str, str], path: Path) -> None:
    """Writes every figure of every turn as JSON."""
    arguments = comparison.arguments
    result = {
        "model": arguments.model,
        "repeats": arguments.repeats,
        "options": arguments.options,
        "machine": comparison.machine,
        "engines": comparison.engines,
        "turns": comparison.turns,
        "failures": comparison.failures,
        "left_out": absent,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def install_help(name: str) -> str:
    """The section of docs/peers.md on an engine: that of the heading that ends with its name in backquotes."""
    sections = re.split(r"^(?=## )", DOCUMENTATION.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for section in sections:
        if section.splitlines()[0].endswith(f"`{name}`"):
            return section.strip()
    return f"{name} needs nothing but this environment"


def load_workload(limit: int | None) -> dict[str, list[Request]]:
    """The requests of each scenario, the first ``limit`` of the set.

    Raises:
        SystemExit: the file is not the request set.
    """
    data = json.loads(REQUESTS.read_text())
    totals = sum(len(r["prompt"]) for r in data["reqs"]), sum(r["out"] for r in data["reqs"])
    if totals != (PROMPT_TOKENS, OUTPUT_TOKENS):
        raise SystemExit(
            f"{REQUESTS}: {totals} tokens instead of {(PROMPT_TOKENS, OUTPUT_TOKENS)}; not the request set"
        )
    return {"set": data["reqs"][:limit], "b1": [data["b1"]], "example": data["seed"]}


def parse_options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``ENGINE.NAME=VALUE``, the value as JSON where it is, else as text.

    Raises:
        SystemExit: of another form, or no such engine.
    """
    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, separator, value = text.partition("=")
        engine, dot, name = target.partition(".")
        if not (separator and dot and name) or engine not in ENGINES:
            raise SystemExit(f"--option {text}: write ENGINE.NAME=VALUE with one of {', '.join(ENGINES)}")
        try:
            options.setdefault(engine, {})[name] = json.loads(value)
        except json.JSONDecodeError:
            options.setdefault(engine, {})[name] = value
    return options


def progress(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="directory in PEERS_ROOT/models (default: smollm2)")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all installed")
    parser.add_argument("--precision", nargs="+", choices=WEIGHT_BYTES, default=["bf16"])
    parser.add_argument("--scenario", nargs="+", choices=report.SCENARIOS, default=list(report.SCENARIOS))
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--limit", type=int, help="take the first N requests of the set only")
    parser.add_argument("--option", action="append", default=[], metavar="ENGINE.NAME=VALUE", help="see the drivers")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--turn-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--install-help", choices=ENGINES, metavar="ENGINE")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1 or (arguments.limit is not None and arguments.limit < 1):
        parser.error("--repeats and --limit must be at least 1")
    arguments.root = Path(os.environ.get("PEERS_ROOT", "peers")).resolve()
    arguments.options = parse_options(arguments.option)
    arguments.workload = load_workload(arguments.limit)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.install_help:
        print(install_help(arguments.install_help))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives this
    comparison, absent = Comparison(arguments), {}
    try:
        for name in arguments.engine:
            for precision in arguments.precision:
                reason = missing(ENGINES[name], precision, arguments.root, arguments.root / "models" / arguments.model)
                if reason is None:
                    comparison.start(name, precision)
                else:
                    absent[f"{name} {precision}"] = reason
        for number in range(arguments.repeats):
            comparison.round(number)
    finally:
        comparison.close()
    print_report(comparison, absent)
    if arguments.json:
        save(comparison, absent, arguments.json)
    return int(not any(turn["engine"].startswith(report.OURS) for turn in comparison.turns))


if __name__ == "__main__":
    raise SystemExit(main())
