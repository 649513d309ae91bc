"""The flags of the server, as they are written on a command line."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from chairlift.cli.options import engine_config, engine_options, server_config, server_options
from chairlift.config import ConfigError, EngineConfig, ServerConfig


def parsed(*arguments: str, env: dict[str, str] | None = None) -> tuple[ServerConfig, EngineConfig]:
    """What a command with both kinds of flags makes of these."""
    made: list[tuple[ServerConfig, EngineConfig]] = []

    @click.command()
    @server_options
    @engine_options
    def command(**options: Any) -> None:
        server = server_config(options)
        made.append((server, engine_config(None, **options)))

    CliRunner().invoke(command, arguments, env=env, catch_exceptions=False, standalone_mode=False)
    return made[0]


def test_without_flags_the_settings_are_their_own_defaults() -> None:
    assert parsed() == (ServerConfig(), EngineConfig())


def test_keys_come_from_flags_or_from_the_environment() -> None:
    assert parsed("--api-key", "a", "--api-key", "b")[0].api_keys == ("a", "b")
    assert parsed(env={"CHAIRLIFT_API_KEY": "a b"})[0].api_keys == ("a", "b")
    assert parsed("--api-key", "c", env={"CHAIRLIFT_API_KEY": "a"})[0].api_keys == ("c",)


def test_several_origins_one_by_one_or_as_json() -> None:
    expected = ("https://a.example", "https://b.example")
    assert parsed("--allowed-origins", expected[0], "--allowed-origins", expected[1])[0].allowed_origins == expected
    assert parsed("--allowed-origins", '["https://a.example", "https://b.example"]')[0].allowed_origins == expected
    assert parsed("--allowed-origins", '["*"]')[0].allowed_origins == ("*",)
    for wrong in ("[", "[1]"):
        with pytest.raises(ConfigError, match=r"--allowed-origins .* is not a JSON array of strings"):
            parsed("--allowed-origins", wrong)


def test_sizes_and_times() -> None:
    server, _ = parsed("--max-body-size", "1MiB", "--request-timeout", "1.5", "--shutdown-timeout", "0")
    assert (server.max_body_size, server.request_timeout, server.shutdown_timeout) == (2**20, 1.5, 0)
