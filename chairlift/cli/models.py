"""``chairlift models``: what can be loaded."""

from __future__ import annotations

import click


@click.command()
def models() -> None:
    """List the built-in models and the supported architectures."""
    from chairlift.model.config import ARCHITECTURES
    from chairlift.model.source import BUILTIN

    click.echo("Built in (fetched once, kept in the cache):")
    for model in BUILTIN.values():
        click.echo(f"  {model.name:<10} {model.title}: {model.description}")
    click.echo("\nArchitectures, from a hub id, a directory of safetensors, or a .gguf file:")
    for name in ARCHITECTURES:
        click.echo(f"  {name}")
