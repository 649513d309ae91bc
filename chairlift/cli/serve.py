"""``chairlift serve``: the OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from chairlift import __version__, logs
from chairlift.cli.cluster import cluster_config, cluster_options
from chairlift.cli.options import engine_config, engine_options, server_config, server_options
from chairlift.cluster.config import ClusterConfig
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.executor import Capacity

if TYPE_CHECKING:
    import socket
    from ssl import SSLContext

    from starlette.types import ASGIApp

    from chairlift.api.lifecycle import Lifecycle
    from chairlift.api.tracing import SpanWriter
    from chairlift.cluster.router import RoutedEngine
    from chairlift.engine.supervisor import SupervisedEngine

logger = logging.getLogger(__name__)


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
@cluster_options
@server_options
@engine_options
def serve(model: str | None, host: str, port: int, served_names: tuple[str, ...], **options: Any) -> None:
    """Serve MODEL over an OpenAI-compatible API.

    MODEL is a built-in name (smollm2, the default), a hub id such as org/name, a directory with safetensors and a
    tokenizer, or a .gguf file.
    """
    server = server_config(options)
    cluster = cluster_config(options)
    config = engine_config(model, **options)
    run_server(config, server, host, port, served_names or (config.model,), cluster)


def run_server(
    config: EngineConfig,
    server: ServerConfig,
    host: str,
    port: int,
    names: tuple[str, ...],
    cluster: ClusterConfig | None = None,
) -> None:
    """Serves until it is told to stop: by one engine, or by replicas on a cluster.

    Raises:
        ConfigError, ModelError, TokenizerError, EngineDeadError, OSError: it cannot begin; the message says what to
            change.
    """
    from chairlift.api.server import allow_many_connections, bind, run, tls_context
    from chairlift.model.source import resolve

    log_config = logs.LogConfig(server.log_format, server.log_level)
    logs.configure(log_config)
    tls = tls_context(server)
    allow_many_connections()
    places = config.static_batch_size if config.batching == "static" else config.max_num_seqs
    max_open_sequences = places * (cluster.replicas if cluster else 1) + server.max_num_queued_reqs
    spans = _span_writer(server, names[0])
    with bind(host, port) as sock:  # first: an address in use should not cost the time to load a model
        source = resolve(config.model, config.revision)  # which fetches it, before an engine looks for it too
        engine = _engine(config, cluster, log_config)

        async def main() -> None:
            try:
                # The engine loads meanwhile, on another core.
                from chairlift.api.app import create_app
                from chairlift.api.lifecycle import Lifecycle
                from chairlift.text.tokenizer import load_tokenizer

                tokenizer = load_tokenizer(source)
                await engine.begin()
                _say(server, describe(config, engine.capacity), "loaded", asdict(engine.capacity))
                lifecycle = Lifecycle(server.request_timeout, max_open_sequences)
                lifecycle.on_drain(engine.stop_restarting)
                app = create_app(
                    engine,
                    tokenizer,
                    served_model_names=names,
                    config=server,
                    max_open_sequences=max_open_sequences,
                    lifecycle=lifecycle,
                    spans=spans,
                    admin_key=None if cluster is None else cluster.admin_key,
                )
                await _answer(app, sock, server, names[0], lifecycle, tls)
            finally:
                await engine.close()

        run(main())
    if spans is not None:
        spans.close()


def _engine(
    config: EngineConfig, cluster: ClusterConfig | None, log_config: logs.LogConfig
) -> SupervisedEngine | RoutedEngine:
    if cluster is None:
        from chairlift.engine.supervisor import SupervisedEngine

        return SupervisedEngine.launch(config, log_config)
    from chairlift.cluster.launch import on_cluster

    return on_cluster(config, cluster, log_config)


async def _answer(
    app: ASGIApp, sock: socket.socket, server: ServerConfig, name: str, lifecycle: Lifecycle, tls: SSLContext | None
) -> None:
    """Serves until it is told to stop, and says when it is ready."""
    from chairlift.api.server import serve as serve_app

    await serve_app(
        app,
        sock,
        on_ready=lambda url: _say(server, invitation(url, name), "ready", {"address": f"{url}/v1"}),
        lifecycle=lifecycle,
        shutdown_timeout=server.shutdown_timeout,
        tls=tls,
    )


def _span_writer(server: ServerConfig, model_name: str) -> SpanWriter | None:
    if server.otlp_traces_endpoint is None:
        return None
    from chairlift.api.tracing import SpanWriter

    return SpanWriter.to_endpoint(server.otlp_traces_endpoint, model_name)


def _say(server: ServerConfig, text: str, event: str, fields: dict[str, Any]) -> None:
    """Tells people what they see on their terminal; programs get a line of their log."""
    if server.log_format == "text":
        click.echo(text)
    else:
        logger.info(event, extra={logs.FIELDS: fields})


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
