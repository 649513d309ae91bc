"""What a server and the actor of a replica tell each other. One message carries all that came since the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.engine.client import EngineStats
from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Begin:
    """Run this sequence; the id is the server's."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants this sequence any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The replica takes requests.

    Attributes:
        capacity: of its engine.
        node: address of the machine it is on.
    """

    capacity: Capacity
    node: str


@dataclass(frozen=True, slots=True)
class News:
    """What came since the last word of a replica.

    Attributes:
        deltas: new tokens and ends, by the server's id of the request.
        broken: sequences that the engine could not go on with because it ended: why, by the same id.
        records: of the steps.
        stats: the engine's state now.
        capacity: of the engine that runs, or ran last.
    """

    stats: EngineStats
    capacity: Capacity
    deltas: dict[str, SequenceDelta] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
