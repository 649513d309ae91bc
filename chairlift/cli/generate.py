"""``chairlift generate``: one-off completions from the command line."""

from __future__ import annotations

import sys
from typing import Any

import click

from chairlift.cli.options import engine_config, engine_options
from chairlift.config import ConfigError
from chairlift.scheduling.sampling_params import SamplingParams


@click.command()
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@click.option("--chat/--no-chat", default=True, show_default=True, help="Put each prompt through the chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True, metavar="N", help="Most tokens to generate.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens.")
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@engine_options
def generate(
    prompts: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Complete each PROMPT, all in one batch, and print the answers in order.

    Without a PROMPT, standard input is one.
    """
    if not prompts:
        prompts = (sys.stdin.read(),)
    config = engine_config(None, **options)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error

    from chairlift.engine.llm import LLM

    llm = LLM.from_config(config)
    try:
        if chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
    finally:
        llm.close()
    for number, output in enumerate(outputs):
        if number:
            click.echo()
        click.echo(output.outputs[0].text)
