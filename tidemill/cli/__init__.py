"""The command line: one file per command group, joined and guarded here.

Whatever goes wrong becomes one sentence on standard error and an exit code; see
docs/reference/cli.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from tidemill import __version__
from tidemill.cli.accounts import teams, users
from tidemill.cli.batches import batches
from tidemill.cli.check import check
from tidemill.cli.child import bind_to_parent
from tidemill.cli.completion import completion
from tidemill.cli.files import files
from tidemill.cli.keys import keys
from tidemill.cli.migrate import migrate
from tidemill.cli.models import models
from tidemill.cli.providers import providers
from tidemill.cli.run import run
from tidemill.cli.screen import Exit, Failed
from tidemill.cli.serve import serve
from tidemill.cli.settings import settings
from tidemill.cli.usage import audit, usage
from tidemill.client import ClientError, ServerUnreachable
from tidemill.errors import SettingsError, TidemillError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tidemill", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an unexpected error came from.")
@click.option("--bound-to-parent", is_flag=True, hidden=True)
def cli(traceback: bool, bound_to_parent: bool) -> None:
    """Tidemill: a self-hosted OpenAI Batch API."""
    if bound_to_parent:
        bind_to_parent()


for command in (
    serve,
    run,
    check,
    files,
    batches,
    models,
    providers,
    settings,
    keys,
    teams,
    users,
    usage,
    audit,
    migrate,
    completion,
):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code: Any = cli.main(args=args, prog_name="tidemill", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message(), err=True)
        return Exit.USAGE
    except click.UsageError as exc:
        where = f" See '{exc.ctx.command_path} --help'." if exc.ctx else ""
        return _fail(exc.format_message() + where, Exit.USAGE)
    except Failed as exc:
        return _fail(exc.format_message(), exc.code)
    except click.ClickException as exc:
        return _fail(exc.format_message(), Exit.USAGE)
    except SettingsError as exc:
        return _fail(str(exc), Exit.USAGE)
    except ServerUnreachable as exc:
        return _fail(
            f"{exc}. Start one with 'tidemill serve', or name one with --url.", Exit.UNREACHABLE
        )
    except (ClientError, TidemillError) as exc:
        return _fail(str(exc), Exit.FAILED)
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader left (| head): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except OSError as exc:
        name = f"{exc.filename}: " if exc.filename else ""
        return _fail(f"{name}{exc.strerror or exc}", Exit.FAILED)
    except Exception as exc:
        if "--traceback" in args:
            raise
        return _fail(
            f"Unexpected {type(exc).__name__}: {exc} (tidemill --traceback … shows where)",
            Exit.INTERNAL,
        )
    return code if isinstance(code, int) else Exit.OK


def _fail(message: str, code: int) -> int:
    text = " ".join(message.split())
    click.echo(f"Error: {text if text.endswith(('.', '?', '!', ')')) else text + '.'}", err=True)
    return code
