"""``chairlift serve``: the OpenAI-compatible server."""

from __future__ import annotations

import json
from typing import Any

import click

from chairlift import __version__
from chairlift.cli.options import engine_config, engine_options
from chairlift.config import EngineConfig
from chairlift.engine.executor import Capacity


@click.command()
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--served-model-name",
    "served_names",
    multiple=True,
    metavar="NAME",
    help="Name clients ask for; may be given several times.  [default: the model as given]",
)
@click.option(
    "--max-num-queued-reqs",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    metavar="N",
    help="Most sequences that may wait for a place; further requests get a 429.",
)
@click.option("--access-log", is_flag=True, help="Log a line for each HTTP request.")
@engine_options
def serve(
    model: str | None,
    host: str,
    port: int,
    served_names: tuple[str, ...],
    max_num_queued_reqs: int,
    access_log: bool,
    **options: Any,
) -> None:
    """Serve MODEL over an OpenAI-compatible API.

    MODEL is a built-in name (smollm2, the default), a hub id such as org/name, a directory with safetensors and a
    tokenizer, or a .gguf file.
    """
    config = engine_config(model, **options)
    names = served_names or (config.model,)
    places = config.static_batch_size if config.batching == "static" else config.max_num_seqs

    from chairlift.api.app import create_app
    from chairlift.api.server import bind, run
    from chairlift.api.server import serve as serve_app
    from chairlift.engine.remote import RemoteEngine
    from chairlift.model.source import resolve
    from chairlift.text.tokenizer import load_tokenizer

    with bind(host, port) as sock:  # first: an address in use should not cost the time to load a model
        source = resolve(config.model, config.revision)
        tokenizer = load_tokenizer(source)
        engine = RemoteEngine.start(config)
        click.echo(describe(config, engine.capacity))

        async def main() -> None:
            app = create_app(
                engine, tokenizer, served_model_names=names, max_open_sequences=places + max_num_queued_reqs
            )
            try:
                await serve_app(
                    app, sock, on_ready=lambda url: click.echo(invitation(url, names[0])), access_log=access_log
                )
            finally:
                await engine.close()

        run(main())


def describe(config: EngineConfig, capacity: Capacity) -> str:
    """What is loaded and what fits, a line each."""
    kv_bytes = capacity.num_token_slots * capacity.kv_bytes_per_token
    full = capacity.num_token_slots // capacity.max_model_len
    places = config.static_batch_size if config.batching == "static" else config.max_num_seqs
    return "\n".join(
        (
            f"chairlift {__version__}",
            f"  model      {capacity.model} ({capacity.architecture})",
            f"  precision  {capacity.dtype} on {capacity.device}, attention backend {capacity.attention_backend}",
            f"  weights    {_bytes(capacity.weight_bytes)}",
            f"  KV cache   {capacity.num_blocks:,} blocks × {capacity.block_size} tokens = "
            f"{capacity.num_token_slots:,} tokens, {_bytes(kv_bytes)} ({capacity.kv_bytes_per_token:,} bytes a token)",
            f"  fits       {full:,} sequences of the full {capacity.max_model_len:,} tokens at once",
            f"  batching   {config.batching}: up to {places} sequences and {capacity.max_num_batched_tokens} "
            "token rows a step",
        )
    )


def invitation(url: str, model: str) -> str:
    """Where the server is, and a line to paste that talks to it."""
    question = {"role": "user", "content": "What does a chairlift do?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0, "max_tokens": 60})
    quoted = body.replace("'", "'\\''")
    return (
        f"  address    {url}/v1\n\nready; try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'\n"
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
