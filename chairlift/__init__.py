"""chairlift: LLM inference whose batch is decided at every decoding step.

``from chairlift import LLM, SamplingParams`` is the offline interface; ``chairlift serve`` is the server. Importing
this package is cheap: torch is loaded when an :class:`LLM` is built, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chairlift.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chairlift.engine.llm import LLM, Completion, GenerationOutput

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "SamplingParams", "GenerationOutput", "Completion", "__version__"]

_LAZY = {"LLM", "GenerationOutput", "Completion"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from chairlift.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
