"""A site without its network: it prepares for a run, answers envelopes, and writes its audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from fedgist.engines.envelope import Header, header_of
from fedgist.engines.process_control import as_workers_do
from fedgist.engines.site import Site, StageKey
from fedgist.errors import FederationError, FedgistError, MessageError, SiteError
from fedgist.federation import audit_log
from fedgist.federation.certificates import SITE
from fedgist.federation.frames import LARGEST_NOTE, Note
from fedgist.federation.kits import Kit
from fedgist.federation.site_file import SiteFile
from fedgist.federation.site_ledger import Ledger
from fedgist.federation.site_policy import ReleasePolicy, check_approved, check_names, check_run
from fedgist.federation.site_setup import SitePart, site_part, try_training
from fedgist.federation.site_store import SiteStore
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.own_code import modules_from
from fedgist.recipe.reading import Recipe, recorded
from fedgist.recipe.resolve import resolve
from fedgist.runs import atomic_files as files
from fedgist.runs.digests import of_arrays, of_text

SECRET = "secret.txt"  # a seed that the server does not know
ROUNDS_KEPT = 2  # whose stages can be asked again
