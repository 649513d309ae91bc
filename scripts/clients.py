"""Runs real clients against a server with a tiny model, each in an environment of its own; prints a table for
docs/clients.md.

    python scripts/clients.py                       # makes the environments
    python scripts/clients.py --environments DIR    # keeps them there, and uses those that are there
    python scripts/clients.py litellm llm           # some of them
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.server import running_server  # noqa: E402
from support.tiny_model import save_tiny_model, teach_tools  # noqa: E402

CLIENTS = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain-openai": "langchain-openai",
    "instructor": "instructor",
    "pydantic-ai-slim": "pydantic-ai-slim[openai]",
    "llm": "llm",
    "aiperf": "aiperf",
}
"""What to install for each. aiperf is a load generator and has no script of its own."""
LOAD = ("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "20", "--isl", "32")


def environment(directory: Path, client: str) -> Path:
    """The environment of a client, made if it is not there; returns its folder of programs."""
    path = directory / f"venv-{client}"
    if not (path / "bin" / "python").is_file():
        venv.create(path, with_pip=True)
        subprocess.run([path / "bin" / "pip", "install", "--quiet", CLIENTS[client]], check=True)
    return path / "bin"


def run(client: str, programs: Path, url: str, model: Path) -> subprocess.CompletedProcess[str]:
    """Puts one client through its paces."""
    if client == "aiperf":
        command = [programs / "aiperf", "profile", "-m", "tiny", "--url", url, "--tokenizer", model, *LOAD]
        command += ["--osl", "8", "--ui", "none"]
    else:
        script = ROOT / "tests" / "clients" / f"exercise_{client.replace('-', '_')}.py"
        command = [programs / "python", script, url, "tiny"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=model)


def version(client: str, programs: Path) -> str:
    """Of the client's package."""
    code = f"from importlib.metadata import version; print(version({client!r}))"
    return subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Runs those asked for; fails if any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", choices=[*CLIENTS, []])
    parser.add_argument("--environments", type=Path)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        save_tiny_model(model)
        teach_tools(model)
        serve = (str(model), "--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny")
        with running_server(Path(scratch, "steps.jsonl"), *serve) as server:
            print("| client | version | result |\n|---|---|---|")
            for client in options.clients or CLIENTS:
                programs = environment(options.environments or Path(scratch), client)
                result = run(client, programs, server.url, model)
                outcome = "passes" if result.returncode == 0 else "FAILS"
                print(f"| {client} | {version(client, programs)} | {outcome} |", flush=True)
                if result.returncode:
                    failed = True
                    print(result.stdout[-2000:], result.stderr[-4000:], file=sys.stderr)
            server.wait_until_idle()
    return failed


if __name__ == "__main__":
    sys.exit(main())
