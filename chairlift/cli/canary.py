"""``chairlift canary``: a router that moves live traffic over, and the commands that steer it."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from chairlift.config import ConfigError

if TYPE_CHECKING:
    from chairlift.canary.router import Router

DEFAULT_GATES = "p99_e2e<5s,error_rate<1%,p99_ttft<1s,vs_stable.p99_e2e<1.1"
KEY_VARIABLE = "CHAIRLIFT_CANARY_KEY"


def _parsed(parse: str) -> Callable[[click.Context, click.Parameter, str], Any]:
    """A callback that reads a value with a function of :mod:`chairlift.canary.config`."""

    def callback(ctx: click.Context, param: click.Parameter, value: str) -> Any:
        from chairlift.canary import config

        try:
            return getattr(config, parse)(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def _duration(flag: str, default: str, text: str) -> Callable[[Any], Any]:
    return click.option(
        flag, default=default, show_default=True, metavar="TIME", callback=_parsed("parse_duration"), help=text
    )


@click.group(invoke_without_command=True)
@click.option("--stable", metavar="URL", help="The server that has the traffic now.")
@click.option("--candidate", metavar="URL", help="The server that is to get it.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--steps",
    default="10,25,50,100",
    show_default=True,
    metavar="PERCENTS",
    callback=_parsed("parse_steps"),
    help="The candidate's shares, one after another.",
)
@_duration("--hold", "5m", "How long each step lasts at least.")
@click.option(
    "--gate", default=DEFAULT_GATES, show_default=True, metavar="GATES", help="What the candidate must keep to."
)
@_duration("--window", "5m", "How far gates look back.")
@click.option(
    "--min-samples", type=int, default=20, show_default=True, metavar="N", help="Fewest requests to judge by."
)
@click.option(
    "--false-rollback",
    type=float,
    default=0.01,
    show_default=True,
    metavar="P",
    help="Most probable that a rollout is rolled back whose candidate keeps to the gates.",
)
@click.option(
    "--false-pass",
    type=float,
    default=0.05,
    show_default=True,
    metavar="P",
    help="Most probable that a candidate gets past a step while it violates a gate.",
)
@click.option(
    "--promote-undecided", is_flag=True, help="Promote on estimates once the hold is over, without certainty."
)
@click.option("--shadow", is_flag=True, help="Send copies to the candidate, compare its answers and drop them.")
@click.option(
    "--stable-adapter", metavar="NAME", help="For a stable side of another shape: generate, or package.module:NAME."
)
@click.option(
    "--session-header", default="x-session-id", show_default=True, metavar="NAME", help="Names a request's session."
)
@click.option(
    "--session-fallback",
    type=click.Choice(["address", "request"]),
    default="address",
    show_default=True,
    help="What makes a session where neither the header nor the body's user does.",
)
@click.option("--trust-forwarded-for", is_flag=True, help="Take client addresses from X-Forwarded-For.")
@_duration("--connect-timeout", "5s", "For a connection to a server.")
@_duration("--first-byte-timeout", "2m", "Until a stream begins.")
@_duration("--idle-timeout", "1m", "Between two pieces of a stream.")
@_duration("--total-timeout", "10m", "For a whole answer.")
@click.option("--health-path", default="/health", show_default=True, metavar="PATH", help="What probes ask for.")
@_duration("--health-interval", "5s", "Between two probes.")
@_duration("--down-after", "15s", "Time without any answer after which the candidate is rolled back.")
@_duration("--drain-timeout", "30s", "For open answers to end, once the router is told to stop.")
@click.option("--max-body", "max_body_bytes", type=int, default=4 * 1024**2, show_default=True, metavar="BYTES")
@click.option("--state", "state_file", type=click.Path(path_type=Path, dir_okay=False), help="Survive a restart here.")
@click.option("--control-key", envvar=KEY_VARIABLE, metavar="KEY", help="Of the control API.  [default: a random one]")
@click.option("--stable-api-key", envvar="CHAIRLIFT_STABLE_KEY", metavar="KEY", help="Instead of the client's.")
@click.option("--candidate-api-key", envvar="CHAIRLIFT_CANDIDATE_KEY", metavar="KEY", help="Instead of the client's.")
@click.option("--live/--no-live", default=None, help="Show the state in the terminal.  [default: if it is one]")
@click.pass_context
def canary(ctx: click.Context, /, **options: Any) -> None:
    """Move live traffic from one server to another, a share at a time, while its gates hold.

    \b
    chairlift canary --stable http://old:8000 --candidate http://new:8000 --steps 10,25,50,100 --hold 5m

    Clients talk to the router as they did to the server. Its state: /canary, /canary/status, /metrics.
    """
    if ctx.invoked_subcommand is None:
        for name in ("stable", "candidate"):
            if options[name] is None:
                raise click.UsageError(f"give --{name} URL, or one of the commands below (see --help)")
        _run(**options)


def _run(host: str, port: int, control_key: str | None, live: bool | None, **options: Any) -> None:
    from chairlift.api.server import bind, run
    from chairlift.canary.router import Router

    config = _config(options)
    key = control_key or secrets.token_urlsafe(16)
    console_is_live = sys.stdout.isatty() if live is None else live
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if console_is_live:  # lines of a log would tear the picture apart
        logging.getLogger("chairlift.canary").setLevel(logging.CRITICAL)

    def tell(event: Any) -> None:
        if not console_is_live:
            click.echo(f"{event.kind.replace('_', ' ')} ({event.share * 100:g} %, {event.by}): {event.reason}")

    def invite(url: str) -> None:
        shown = "as given" if control_key else key
        click.echo(f"  address      {url}/v1\n  state        {url}/canary\n  control key  {shown}\n\nready")

    with bind(host, port) as sock:
        router = Router(config, key, on_event=tell)

        async def main() -> None:
            if console_is_live:
                await _with_picture(router, sock, invite)
            else:
                await router.run(sock, invite)

        run(main())


def _config(options: dict[str, Any]) -> Any:
    from chairlift.canary.config import CanaryConfig, Timeouts, parse_upstream
    from chairlift.canary.gates import parse_gates
    from chairlift.canary.session import SessionRule

    timeouts = Timeouts(**{name: options.pop(f"{name}_timeout") for name in ("connect", "first_byte", "idle", "total")})
    session = SessionRule(
        options.pop("session_header").lower(), options.pop("session_fallback"), options.pop("trust_forwarded_for")
    )
    return CanaryConfig(
        stable=parse_upstream("stable", options.pop("stable")),
        candidate=parse_upstream("candidate", options.pop("candidate")),
        gates=parse_gates(options.pop("gate")),
        adapter=options.pop("stable_adapter"),
        stable_key=options.pop("stable_api_key"),
        candidate_key=options.pop("candidate_api_key"),
        timeouts=timeouts,
        session=session,
        **options,
    )


async def _with_picture(router: Router, sock: Any, invite: Callable[[str], None]) -> None:
    import asyncio

    from rich.live import Live

    from chairlift.canary.terminal import render

    async def draw() -> None:
        with Live(auto_refresh=False) as live:
            while True:
                live.update(render(router.status()), refresh=True)
                await asyncio.sleep(1)

    drawing: list[asyncio.Task[None]] = []

    def begin(url: str) -> None:
        invite(url)
        drawing.append(asyncio.create_task(draw()))

    try:
        await router.run(sock, begin)
    finally:
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)


_url = click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="Of the router.")
_key = click.option(
    "--control-key", envvar=KEY_VARIABLE, required=True, metavar="KEY", help="That it printed or was given."
)


def _action(name: str, text: str) -> None:
    @canary.command(name, help=text)
    @_url
    @_key
    def command(url: str, control_key: str) -> None:
        status = _ask(f"{url.rstrip('/')}/canary/{name}", control_key)
        click.echo(f"{status['phase'].replace('_', ' ')}, {status['share'] * 100:g} % on the candidate")


_action("promote", "Move up a step now, or start again after a rollback.")
_action("hold", "Stay at this step; gates can still roll back.")
_action("resume", "Let a held rollout go on.")
_action("rollback", "Give all traffic back to stable.")


@canary.command()
@_url
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
def status(url: str, as_json: bool, watch: bool) -> None:
    """Show the state of a router."""
    address = f"{url.rstrip('/')}/canary/status"
    if as_json:
        click.echo(json.dumps(_ask(address), indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.live import Live

    from chairlift.canary.terminal import render

    if not watch:
        Console().print(render(_ask(address)))
        return
    with Live(auto_refresh=False) as live:
        try:
            while True:
                live.update(render(_ask(address)), refresh=True)
                time.sleep(1)
        except KeyboardInterrupt:
            return


def _ask(address: str, key: str | None = None) -> dict[str, Any]:
    """Gets ``address``, or posts to it with a key, and returns the JSON object that comes back."""
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, not {address[:64]!r}")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = Request(address, method="POST" if key else "GET", headers=headers)  # noqa: S310 - checked above
    try:
        with urlopen(request, timeout=10) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
            return answer
    except HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {error.code}"
        raise ConfigError(f"the router refused: {message}") from error
    except (URLError, ValueError, TimeoutError) as error:
        raise ConfigError(f"no router answers at {address}: {getattr(error, 'reason', error)}; check --url") from error
