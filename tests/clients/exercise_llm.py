"""The llm command against a server. Run: python exercise_llm.py URL MODEL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def exercise(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        models = [{"model_id": "ours", "model_name": model, "api_base": f"{url}/v1", "supports_schema": True}]
        Path(directory, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
        environment = os.environ | {"LLM_USER_PATH": directory, "OPENAI_API_KEY": "-"}

        def run(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", "-m", "ours", "--key", "-", *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        fixed = ("-o", "max_tokens", "12", "-o", "seed", "5", "What does a chairlift do?")
        assert run(*fixed) == run("--no-stream", *fixed)
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        assert json.loads(run("--schema", json.dumps(schema), "a lift"))["a"] in (1, 2)


if __name__ == "__main__":
    exercise(sys.argv[1], sys.argv[2])
    print("ok")
