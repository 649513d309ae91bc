"""What every JSON object that a client sends has in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from chairlift.api.unknown import note_unknown

Unsupported = dict[str, tuple[object, ...]]


class Body(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(extra="forbid", strict=True)

    place: ClassVar[str] = ""
    """Where such an object stands in a body, for warnings of fields that it does not have."""
    unsupported: ClassVar[Unsupported] = {}
    """Fields that the engine does not have yet, with the values, beside null, that ask nothing of it."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change the answer."""

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, data: Any) -> Any:
        """Drops what is unknown, ignored or asks for nothing, and refuses what the engine does not have."""
        if not isinstance(data, dict):
            return data
        kept = {}
        fields = [field.alias or name for name, field in cls.model_fields.items()]
        for name, value in data.items():
            if name in cls.unsupported:
                if value is not None and value not in cls.unsupported[name]:
                    raise PydanticCustomError("unsupported", "is not supported yet; leave it out", {"field": name})
            elif name in fields:
                kept[name] = value
            elif name not in cls.ignored:
                note_unknown(name, cls.place, (*fields, *cls.unsupported, *cls.ignored))
        return kept
