"""Values that a request cannot have are refused when it is made."""

from typing import Any

import pytest

from chairlift.scheduling.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.0), ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", float("nan")), ("top_k", -2),
        ("top_k", 1.5), ("top_k", "5"), ("seed", 0.5), ("seed", 2**64), ("temperature", float("nan")),
        ("temperature", -0.1), ("top_p", float("nan")), ("top_p", 0), ("min_p", float("nan")), ("min_p", 1.1),
    ],
)  # fmt: skip
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must "):
        SamplingParams(**{field: value})
