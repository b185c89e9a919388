"""``tidemill providers``: what a server knows of its providers, and forgetting it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import click

from tidemill.cli import options
from tidemill.cli.office import OPERATOR
from tidemill.cli.screen import Failed, emit, say, table
from tidemill.providers import parse
from tidemill.settings import load


class _Listing(click.Group):
    """A group that is its ``list`` where no command is named: the options are that command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``list`` in front of nothing and of options, but for those that ask for help. A shell
        that completes wants the commands."""
        bare = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        if bare and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Listing)
def providers() -> None:
    """A server's providers. Without a command: ``list``."""


@providers.command("list")
@options.server
@options.as_json
def list_(url: str, api_key: str | None, as_json: bool) -> None:
    """List them: does it batch, since when is that known, and why."""
    with options.client(url, api_key) as client:
        found = client.list_providers()
    if as_json:
        emit(found)
        return
    table(
        ("provider", "kind", "batch API", "asked", "reason", "models not batched"),
        [
            (
                one["id"],
                one["kind"],
                one["batch_api"],
                "never" if one["age_s"] is None else _ago(one["age_s"]),
                one["reason"],
                ", ".join(entry["model"] for entry in one["not_batched"]),
            )
            for one in found
        ],
    )


@providers.command()
@click.argument("provider")
@click.argument("models", nargs=-1)
@options.config
@options.setting_flags(("storage_path", "providers"))
@options.as_json
def forget(
    provider: str,
    models: Sequence[str],
    config: Path | None,
    storage_path: str | None,
    providers: str | None,
    as_json: bool,
) -> None:
    """Forget that PROVIDER refused to batch MODELS (all of them where none is named), so that the
    next file goes there again. Works on the store; a running server sees the change at once."""
    settings = load({"storage_path": storage_path, "providers": providers}, toml=config).settings
    configured = [one.name for one in parse(settings.providers)]
    if configured and provider not in configured:
        raise Failed(f"No provider is named '{provider}'; there are: {', '.join(configured)}")
    # Late: the other commands start without loading the store.
    from tidemill.backends.eligibility import Eligibility
    from tidemill.storage.keyring import open_facts

    async def work() -> int:
        async with open_facts(Path(settings.storage_path)) as facts:
            known = Eligibility(facts, ttl_days=1)
            return await known.forget(provider, models or None, OPERATOR)

    forgotten = anyio.run(work)
    if as_json:
        emit({"provider": provider, "forgotten": forgotten})
    else:
        say(f"Forgot {forgotten} refusal{'' if forgotten == 1 else 's'} of {provider}.")


def _ago(seconds: int) -> str:
    """A rough age.

    >>> _ago(5), _ago(200), _ago(86_400)
    ('5 s ago', '3 min ago', '24 h ago')
    """
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"
