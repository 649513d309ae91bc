"""A rollout on disk: written whole or not at all, and read only if it is whole and belongs to this one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from chairlift.canary.rollout import PHASES, Event, Phase, Rollout
from chairlift.config import ConfigError

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedState:
    """What is needed to go on.

    Attributes:
        identity: what the rollout is of; see :attr:`CanaryConfig.identity`.
        phase, step, events: of the rollout.
        spent_starts: of its judge.
        positions: of its sessions.
    """

    identity: dict[str, Any]
    phase: Phase
    step: int
    spent_starts: int
    events: list[Event] = field(default_factory=list)
    positions: list[tuple[str, float]] = field(default_factory=list)

    def apply(self, rollout: Rollout) -> None:
        """Puts a rollout where this one was."""
        rollout.phase, rollout.step, rollout.events = self.phase, self.step, list(self.events)


def save(path: Path, state: SavedState) -> None:
    """Replaces the file. A crash leaves the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "identity": state.identity,
        "phase": state.phase,
        "step": state.step,
        "spent_starts": state.spent_starts,
        "events": [event.as_dict() for event in state.events],
        "positions": state.positions,
    }
    text = json.dumps(
        {"version": VERSION, "sha256": _digest(content), "content": content}, ensure_ascii=False, allow_nan=False
    )
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load(path: Path, identity: dict[str, Any], num_steps: int) -> SavedState | None:
    """Returns what was saved; ``None`` if nothing was.

    Args:
        path: of the file.
        identity: of the rollout that is to go on.
        num_steps: how many steps it has.

    Raises:
        ConfigError: the file is damaged, or of another rollout; it says what to do.
    """
    way_out = f"move it away to begin anew at the first step, or give another --state than {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the state in {path} cannot be read ({error}); {way_out}") from error
    try:
        document = json.loads(text)
        version, digest, content = document["version"], document["sha256"], document["content"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no state of a canary, or a damaged one; {way_out}") from error
    if version != VERSION:
        raise ConfigError(f"the state in {path} is of version {version!r}, and this program reads {VERSION}; {way_out}")
    if digest != _digest(content):
        raise ConfigError(f"the state in {path} is damaged (its checksum is wrong); {way_out}")
    if content["identity"] != identity:
        changed = [name for name in identity if content["identity"].get(name) != identity[name]]
        was = ", ".join(f"{name} {content['identity'].get(name)!r}" for name in changed)
        raise ConfigError(f"the state in {path} is of another rollout ({was}); start it with the same, or {way_out}")
    if content["phase"] not in PHASES or not 0 <= content["step"] < num_steps:
        raise ConfigError(f"the state in {path} has a phase or a step that there is not; {way_out}")
    return SavedState(
        content["identity"],
        cast("Phase", content["phase"]),
        content["step"],
        content["spent_starts"],
        [Event(**event) for event in content["events"]],
        [(name, position) for name, position in content["positions"]],
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
