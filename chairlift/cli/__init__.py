"""The command line, one file per command."""

from __future__ import annotations

import sys

import click

from chairlift import __version__
from chairlift.cli.generate import generate
from chairlift.cli.models import models
from chairlift.cli.serve import serve
from chairlift.config import ConfigError
from chairlift.engine.client import EngineDeadError
from chairlift.model.source import ModelError
from chairlift.text.errors import PromptError, TokenizerError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="chairlift")
def cli() -> None:
    """LLM inference whose batch is decided at every decoding step."""


for command in (serve, generate, models):
    cli.add_command(command)


def main() -> None:
    """Entry point of the ``chairlift`` command. What a user can mend is told in one line, without a traceback."""
    try:
        cli(prog_name="chairlift")
    except (ConfigError, ModelError, TokenizerError, PromptError, EngineDeadError, OSError) as error:
        click.echo(f"chairlift: error: {error}", err=True)
        sys.exit(1)
