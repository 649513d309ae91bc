"""Runs schemathesis on the OpenAPI document of a live server with a tiny model.

    pip install schemathesis
    python scripts/fuzz_api.py                               # some 2,000 cases
    python scripts/fuzz_api.py --max-examples 100 --seed 7   # more of them, others
    python scripts/fuzz_api.py --program VENV/bin/schemathesis

A case fails on a 5xx, a status or a body that the document does not have, or no answer within a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.server import running_server  # noqa: E402
from support.tiny_model import save_tiny_model, teach_tools  # noqa: E402

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Short sequences: a case may ask for 128 of them, as long as can be.
SERVE = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny", "--max-model-len", "160")


def main() -> int:
    """Returns what schemathesis does, or 1 if the server is not idle and well at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=30, help="random cases of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", default="schemathesis")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        save_tiny_model(model)
        teach_tools(model)
        with running_server(Path(scratch, "steps.jsonl"), str(model), *SERVE) as server:
            command = [options.program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--no-color"]
            command += ["--max-examples", str(options.max_examples), "--seed", str(options.seed)]
            command += ["--phases", "coverage,fuzzing", "--request-timeout", "60", "--wait-for-schema", "60"]
            command += ["--continue-on-failure"]
            result = subprocess.run(command, cwd=scratch)
            health = server.wait_until_idle(120)
            print(f"the server is {health['status']} and idle")
            return result.returncode or health["status"] != "ok"


if __name__ == "__main__":
    sys.exit(main())
