"""``tidemill completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HOW = {
    "bash": 'eval "$(tidemill completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(tidemill completion zsh)"  in ~/.zshrc',
    "fish": "tidemill completion fish > ~/.config/fish/completions/tidemill.fish",
}


@click.command(epilog="  ".join(f"{shell}: {how}." for shell, how in _HOW.items()))
@click.argument("shell", type=click.Choice(tuple(_HOW)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    root = ctx.find_root().command
    if kind is None:  # unreachable while click knows the three shells of the choice above
        raise click.UsageError(f"No completion for {shell}.")
    click.echo(kind(root, {}, "tidemill", "_TIDEMILL_COMPLETE").source())
