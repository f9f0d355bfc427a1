"""Commands of a federation over a network: provision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.shared_options import FEDERATE, app
from fedgist.data.sources.optional_packages import need
from fedgist.errors import InputError
from fedgist.report.terminal.console import console, words

NEEDS = "fedgist provision needs cryptography: pip install 'fedgist[federation]'"
FILE, REQUEST, RENEW = "federation.toml", "--request", "--renew"
FORMS = (FILE, REQUEST, "--sign", "--add-site", RENEW, "--revoke")
NEXT = "Next: "

FederationFile = Annotated[
    Path | None,
    typer.Argument(metavar="FEDERATION.TOML", help="Make the kits of this new federation."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="KITS", help="The authority's folder of all kits."),
]
Request = Annotated[
    Path | None,
    typer.Option(
        metavar="KIT", help="At a site: make the site's key in its kit, and request.csr to send."
    ),
]
Sign = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="REQUEST",
        help="Sign a site's request.csr, or the one in a kit; may be given several times.",
    ),
]
AddSite = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Add a site, with the next number, and make its kit."),
]
Renew = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Make a new certificate of a site, an administrator, server, or all; may be given "
        "several times.",
    ),
]
NewAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="With --renew server: the server's new address, also in kits."
    ),
]
Revoke = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SERIAL",
        help="Revoke all certificates of a site or an administrator, or one by its serial in hex.",
    ),
]


@app.command(rich_help_panel=FEDERATE)
def provision(
    federation: FederationFile = None,
    out: Out = None,
    request: Request = None,
    sign: Sign = None,
    add_site: AddSite = None,
    renew: Renew = None,
    address: NewAddress = None,
    revoke: Revoke = None,
) -> None:
    """Make the keys and certificates of a federation, sign requests, add sites, renew, revoke.

    The authority of the federation describes it in a file:

        name = "sepsis"
        server = "fed.example.org:8443"
        administrators = ["anna"]
        sites = ["berlin", "ulm"]
        keys = "site"
        days = 365

    Sites dial the address in server. With keys = "site", the default, each site
    makes its own key with --request, and the authority signs its request. With
    keys = "central", the authority makes all keys. Certificates are valid for
    this number of days, 365 by default.

    KITS/authority holds the key that signs all certificates: it stays with the
    authority. The other folders are the kits of server, administrators and sites.

    Examples
    --------
    fedgist provision federation.toml --out kits
    fedgist provision --request berlin
    fedgist provision --sign request.csr --out kits
    fedgist provision --add-site lyon --out kits
    fedgist provision --renew berlin --out kits
    fedgist provision --revoke ulm --out kits
    """
    need("cryptography.x509", NEEDS)
    from fedgist.federation.keys import provision as work

    kits, forms = out or Path(), dict[str, Callable[[], list[str]]]()
    if federation is not None:
        forms[FILE] = partial(work.provision, federation, kits)
    if request is not None:
        forms[REQUEST] = partial(work.request, request)
    if sign is not None:
        forms["--sign"] = partial(work.sign_requests, sign, kits)
    if add_site is not None:
        forms["--add-site"] = partial(work.add_site, add_site, kits)
    if renew is not None:
        forms[RENEW] = partial(work.renew, renew, kits, address)
    if revoke is not None:
        forms["--revoke"] = partial(work.revoke, revoke, kits)
    _check_form(list(forms), out, address)
    (form,) = forms.values()
    for sentence in form():
        style = "bold" if sentence.startswith(NEXT) else ""
        console(soft_wrap=True).print(words(sentence, style))


def _check_form(forms: Sequence[str], out: Path | None, address: str | None) -> None:
    """Check that the options name one thing to do, and what belongs to it."""
    if len(forms) != 1:
        problem = f"{' and '.join(forms)} exclude each other" if forms else "nothing to do"
        raise InputError(f"{problem}; fedgist provision takes exactly one of {', '.join(FORMS)}")
    form = forms[0]
    if address is not None and form != RENEW:
        raise InputError(f"--address {address} belongs to --renew server")
    if form == REQUEST and out is not None:
        raise InputError("--request names the kit itself and takes no --out")
    if form != REQUEST and out is None:
        raise InputError(f"{form} needs --out KITS, the authority's folder of all kits")
