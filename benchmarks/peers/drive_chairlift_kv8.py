"""chairlift, offline, with an int8 KV cache."""

from __future__ import annotations

from drive_chairlift import Chairlift
from driver import Settings, serve


class ChairliftKv8(Chairlift):
    """As chairlift's driver, whose options it takes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings._replace(options={"kv_cache_dtype": "int8", **settings.options}))
        self.description += ", int8 KV cache"


if __name__ == "__main__":
    serve(ChairliftKv8)
