"""The command line, one file per command, each read when its command is used."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from chairlift import __version__
from chairlift.config import ConfigError
from chairlift.engine.client import EngineDeadError
from chairlift.model.source import ModelError
from chairlift.text.errors import PromptError, TokenizerError

# Here and not only in the commands' own files: a list of commands should not cost the libraries of all of them.
COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible API.",
    "generate": "Complete prompts, all in one batch, and print the answers.",
    "compare": "Measure static against continuous batching on one engine.",
    "bench": "Put a load on an OpenAI endpoint and measure what its clients see.",
    "plan": "Size a deployment, with the arithmetic.",
    "simulate": "Run the scheduler on hardware that is not at hand.",
    "canary": "Move live traffic from one server to another.",
    "models": "List the built-in models and the supported architectures.",
}


class _Commands(click.Group):
    """A group that knows its commands by name and reads them when they are called."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"chairlift.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="chairlift")
def cli() -> None:
    """LLM inference whose batch is decided at every decoding step."""


def main() -> None:
    """Entry point of the ``chairlift`` command. What a user can mend is told in one line, without a traceback."""
    try:
        cli(prog_name="chairlift")
    except (ConfigError, ModelError, TokenizerError, PromptError, EngineDeadError, OSError) as error:
        click.echo(f"chairlift: error: {error}", err=True)
        sys.exit(1)
