"""What a page in a browser may ask of a server without keys: nothing.

Such a server trusts the machine that it runs on, and so does a browser there: any page can send it
a form or a text, and one whose name is pointed at 127.0.0.1 (DNS rebinding) can read the answers.
Neither can send a key, so a server with keys needs none of this.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from tidemill.errors import Forbidden


def check(headers: Mapping[str, str]) -> None:
    """Raises ``Forbidden`` for a request to another name than this machine's, or from a page of
    another machine."""
    host = headers.get("host", "")
    if host and not _is_here("//" + host):
        raise _stranger(f"is not asked for as '{host[:100]}'")
    origin = headers.get("origin", "")
    # Schemes of installed programs (app:, vscode-file:) are no pages that somebody came across.
    if origin == "null" or (origin.startswith(("http:", "https:")) and not _is_here(origin)):
        raise _stranger(f"does not answer pages of '{origin[:100]}'")


def _is_here(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _stranger(what: str) -> Forbidden:
    return Forbidden(
        f"A server without keys serves only its own machine and {what}: give it keys "
        "(TIDEMILL_API_KEYS, 'tidemill keys add'), or start it with --insecure.",
        code="untrusted_origin",
    )
