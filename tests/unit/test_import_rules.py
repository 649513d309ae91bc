"""Who may import what, so that policy stays readable without torch and commands start fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chairlift

PACKAGE = Path(chairlift.__file__).parent
MAY_IMPORT_TORCH = ("execution", "model")
TORCH_FREE = ("model/source.py", "model/config.py", "model/gguf_file.py", "model/__init__.py")


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it, relative imports refused."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
    return modules


def test_scheduling_imports_the_standard_library_and_itself_alone():
    files = list((PACKAGE / "scheduling").rglob("*.py"))
    assert len(files) > 5
    for path in files:
        for module in imported_modules(path):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or module.startswith("chairlift.scheduling"), f"{path}: {module}"


def test_torch_is_imported_only_where_it_computes():
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.split("/")[0] in MAY_IMPORT_TORCH and relative not in TORCH_FREE:
            continue
        torch = {module for module in imported_modules(path) if module.split(".")[0] in ("torch", "numba")}
        assert not torch, f"{relative} imports {torch}"


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    probe = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}}, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import chairlift; chairlift.SamplingParams()",
        "from chairlift.cli import cli; cli(['--help'], standalone_mode=False)",
        "from chairlift.cli import cli; cli(['serve', '--help'], standalone_mode=False)",
        "import chairlift.engine.core, chairlift.scheduling.continuous, chairlift.scheduling.static",
        "import chairlift.api.app, chairlift.api.server, chairlift.engine.remote, chairlift.text.tokenizer",
        "import chairlift.cluster.router, chairlift.cluster.launch, chairlift.cluster.host",
    ],
)
def test_nothing_but_computing_loads_torch(code: str):
    loaded = loaded_by(code)
    assert "chairlift" in loaded
    assert not loaded & {"torch", "numba", "transformers", "ray"}


def test_help_loads_no_web_framework_either():
    loaded = loaded_by("from chairlift.cli import cli; cli(['--help'], standalone_mode=False)")
    assert not loaded & {"fastapi", "uvicorn", "pydantic", "tokenizers", "numpy"}
