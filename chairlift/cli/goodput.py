"""``--goodput``, which takes several values as in ``vllm bench serve``: ``--goodput ttft:500 tpot:50``."""

from __future__ import annotations

import click

from chairlift.measure.metrics import SLO_NAMES, parse_goodput


class GoodputCommand(click.Command):
    """A command whose ``--goodput`` reaches over all objectives that follow it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats the flag before each further objective, which is a form that click knows."""
        repeated: list[str] = []
        after_goodput = False
        for arg in args:
            is_objective = arg.partition(":")[0] in SLO_NAMES and ":" in arg
            if after_goodput and is_objective and repeated[-1] != "--goodput":
                repeated.append("--goodput")
            repeated.append(arg)
            after_goodput = arg == "--goodput" or (after_goodput and is_objective)
        return super().parse_args(ctx, repeated)


def _parse(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, float]:
    try:
        return parse_goodput(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


goodput_option = click.option(
    "--goodput",
    multiple=True,
    callback=_parse,
    metavar="SLO:MS...",
    help="Objectives in milliseconds, such as: --goodput ttft:500 tpot:50 e2el:2000",
)
