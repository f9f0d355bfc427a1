"""A site without its network: it prepares for a run, answers envelopes, and keeps an audit log."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from filelock import BaseFileLock

from fedgist.data.dataset import Dataset
from fedgist.data.row_traces import traces
from fedgist.engines.process_control import as_workers_do
from fedgist.errors import FedgistError, MessageError, SiteError
from fedgist.federation.keys.kits import Kit
from fedgist.federation.network.frames import LARGEST_NOTE, Note
from fedgist.federation.network.invitation import (
    Hello,
    Invitation,
    digest_of_recipe,
    outlines,
    parsed_note,
)
from fedgist.federation.site import audit_log
from fedgist.federation.site.facts import LARGEST, FactsSite, check_question
from fedgist.federation.site.file import SiteFile
from fedgist.federation.site.ledger import Ledger, check_same_recipe
from fedgist.federation.site.model import write_site_model
from fedgist.federation.site.policy import (
    ReleasePolicy,
    check_approved,
    check_names,
    check_run,
    digest_of_settings,
)
from fedgist.federation.site.setup import SitePart, setup_at_site, site_part, try_training
from fedgist.federation.site.store import NO_STAGE, SiteStore, locked
from fedgist.federation.site.total_keys import FactsBook, KitCredentials, TotalsBook
from fedgist.recipe.reading import Recipe, recorded
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.digests import of_arrays, of_text
from fedgist.wire.envelope import header_of
from fedgist.wire.secure.site import LIMIT, SecureSite
from fedgist.wire.site import Site, SiteState, StageKey, Work
from fedgist.world.facts.question import parsed
from fedgist.world.secure_sums import check_secure_sums

RUNS, MODELS, SECRET = "runs", "models", "secret"  # in the folder of a site's state
TOTALS = "totals.json"  # beside the runs: what a total was opened of
GROUPS = "facts-groups.json"  # over which sites totals of facts were opened
ROUNDS_KEPT = 2  # whose stages can be asked again


@dataclass(frozen=True, eq=False)
class Prepared:
    """A site that is prepared for a run, and what it said of itself."""

    site: Site
    part: SitePart
    hello: Hello
    handle: Callable[[bytes], bytes]


@dataclass(frozen=True, eq=False)
class Asked:
    """A site that is prepared for a question of facts, and what it said of itself."""

    hello: Hello
    handle: Callable[[bytes], bytes]


class SiteAgent:
    """What a site does in a federation, whichever network carries its envelopes."""

    def __init__(
        self,
        site: SiteFile,
        say: Callable[[str], None] = lambda _: None,
        kit: Kit | None = None,
    ) -> None:
        """Take part with the data, model and policy of a ``site.toml``; ``say`` shows notes.

        The kit's keys are needed for secure sums.
        """
        self.file, self.folder, self.say, self.kit = site, site.state_folder, say, kit
        self.prepared: Prepared | None = None
        self.asked: Asked | None = None  # a question of facts that is under way
        self.lock: BaseFileLock | None = None
        # how often each run had each work done
        self.worked = defaultdict[str, Counter[Work]](Counter)

    def prepare(self, content: Note) -> Note:
        """Prepare for a run; return what the server must know of this site.

        A site that is prepared for the same run already only says hello again.
        """
        invitation = parsed_note(Invitation, content)
        self.hold()
        self.asked = self._asked(invitation) if invitation.question else None
        if self.asked is not None:
            return self.asked.hello.model_dump(mode="json")
        before = self.prepared
        if before is None or (before.hello.run, before.hello.digest) != (
            invitation.run,
            invitation.digest,
        ):
            try:
                before = self._prepared(invitation)
            except FedgistError as error:
                audit_log.write(self.folder, f"run {invitation.run}: does not take part: {error}")
                raise
        last = max(before.site.done, default=None)
        hello = before.hello.model_copy(update={"last": last})
        self.prepared = replace(before, hello=hello)
        return hello.model_dump(mode="json")

    def hold(self) -> None:
        """Lock the state folder for the life of this process; do nothing if it holds the lock.

        Raises
        ------
        SiteError
            If another process works with the folder: two would spend one budget twice.
        """
        if self.lock is None:
            self.lock = locked(self.folder)

    def close(self) -> None:
        """Let go of the state folder."""
        if self.lock is not None:
            self.lock.release()
        self.lock = None

    def largest(self) -> int:
        """Return the size in bytes of the largest envelope that this site opens."""
        if self.asked is not None:
            return LARGEST
        if self.prepared is None:
            return LARGEST_NOTE
        plain = self.prepared.site.largest_request()
        secure = self.prepared.part.side.setup.federation.sums == "secure"
        return max(plain, LIMIT) if secure else plain

    def answer(self, envelope: bytes) -> bytes:
        """Answer an envelope, and write down in words what the answer tells."""
        prepared = self.asked or self.prepared
        if prepared is None:
            raise MessageError("a request came before the invitation")
        with as_workers_do():
            reply = prepared.handle(envelope)
        request = header_of(envelope)
        text = audit_log.sentence(request, reply)
        kind = "run" if self.asked is None else "facts"
        audit_log.write(self.folder, f"{kind} {prepared.hello.run}: {text}")
        self.say(text)
        if request.purpose == "finish" and self.asked is None:
            self._write_model()
        return reply

    def _asked(self, invitation: Invitation) -> Asked:
        """Prepare for a question of facts, if the site's policy allows it."""
        if self.asked is not None and self.asked.hello.run == invitation.run:
            return self.asked
        try:
            question = parsed(invitation.question)
            if (digest := of_text(invitation.question)) != invitation.digest:
                text = f"the question's digest is {digest}; the server's is {invitation.digest}"
                raise SiteError(text, "plan")
            check_question(question, self.file, len(set(invitation.names)))
            site = FactsSite(question, invitation, self.file, self._secret(), digest_of, self.say)
            hello = site.hello()
        except FedgistError as error:
            audit_log.write(self.folder, f"facts {invitation.run}: does not take part: {error}")
            raise
        audit_log.write(self.folder, f"facts {invitation.run}: takes part")
        if question.sums != "secure":
            return Asked(hello, site.handle)
        if self.kit is None:
            raise SiteError("secure sums need the keys of a kit")
        policy, names, name = self.file.policy, invitation.names, self.file.table.name
        totals = TotalsBook(self.folder / TOTALS)
        secure = SecureSite(
            site,
            KitCredentials(self.kit, names, policy.sites),
            recipe=invitation.digest,
            least=policy.least_sites,
            book=FactsBook(totals, self.folder / GROUPS, names, name),
        )
        return Asked(hello, secure.handle)

    def _write_model(self) -> None:
        """Write the site's model, which its last download completes."""
        assert self.prepared is not None  # the caller's
        site, part = self.prepared.site, self.prepared.part
        if part.population.clients[0].architectures[0] in site.finished:
            folder = self.folder / MODELS / self.prepared.hello.run
            files.private_folder(folder)
            write_site_model(folder, part, self.file, site.host.state(), site.finished)
            files.make_private(folder)
            self.say(f"the trained model is in {folder}: fedgist predict {folder} DATA --client 0")

    def saw(self, text: str) -> None:
        """Show the state of the connection."""
        self.say(text)

    def _prepared(self, invitation: Invitation) -> Prepared:
        """Read the recipe, the rows, the model and the stored state of a run."""
        if invitation.number >= len(invitation.names):
            raise SiteError(
                f"the server calls this site number {invitation.number} of {len(invitation.names)}",
                "plan",
            )
        recipe = self._recipe(invitation)
        check_run(setup_at_site(recipe, self.file), self.file)
        store, state = self._stored(invitation, recipe)
        part = site_part(
            recipe, invitation.names, invitation.number, self.file, self._secret(), self.say
        )
        self._check_totals(invitation, part)
        with as_workers_do():
            try_training(part)
        anew = self._begins_anew(invitation, state)
        site = self._site(invitation, part, store)
        for kept in site.host.features.values():
            if kept.note:
                self.say(kept.note)
        if state is not None:
            site.restore(state)
        if store.rows_before not in {"", store.rows}:
            text = f"the rows of {part.data.name} changed since this run was last at work here"
            self.say(text)
            audit_log.write(self.folder, f"run {invitation.run}: {text}")
        store.keep(site.state())  # so that the run is bound to this recipe from now on
        hello = Hello(
            run=invitation.run,
            digest=invitation.digest,
            number=invitation.number,
            outlines=outlines(part.task),
            public_digest=part.task.public_digest,
            began_anew=anew,
        )
        for sentence in part.left_out:
            self.say(sentence)
        audit_log.write(
            self.folder, f"run {invitation.run}: takes part as number {invitation.number}"
        )
        return Prepared(site, part, hello, self._handler(invitation, part, site))

    def _check_totals(self, invitation: Invitation, part: SitePart) -> None:
        """Raise an error unless a run's totals hide this site's messages, if sums are secure."""
        if part.side.setup.federation.sums != "secure":
            return
        check_secure_sums(part.side)  # a server may not have done so
        if len(set(invitation.names)) < len(invitation.names):
            raise SiteError("the server names a site twice", "plan")
        least = self.file.policy.least_sites
        for name in part.population.clients[0].architectures:
            count = sum(name in client.architectures for client in part.side.clients)
            if count < least:
                text = f"{self.file.file}: policy.least_sites = {least}; {count} sites have {name}"
                raise SiteError(text, "policy", "least_sites")
        if self.kit is None:
            raise SiteError("secure sums need the keys of a kit")

    def _stored(self, invitation: Invitation, recipe: Recipe) -> tuple[SiteStore, SiteState | None]:
        """Return the folder of a run's state, and the state, if this site has one of the run.

        If the state is lost, or an old copy, the ledger still says which rounds of which recipe
        were charged.
        """
        settings = digest_of_settings(recipe)
        store = SiteStore(
            self.folder / RUNS / invitation.run, invitation.run, invitation.number, settings
        )
        state = store.load()
        charged = Ledger(self.folder).charged(self.file.table.name, invitation.run)
        if charged is not None:
            check_same_recipe(invitation.run, charged, settings)
            newest = max(state.released, default=NO_STAGE) if state else NO_STAGE
            if charged.round > newest[0]:  # what was charged later may be out, and is forgotten
                store.lost = charged.round
        return store, state

    def _recipe(self, invitation: Invitation) -> Recipe:
        """Return the recipe of an invitation, if the site's policy allows all that it names."""
        recipe, places = recorded(invitation.recipe), len(invitation.names)
        if (digest := digest_of_recipe(recipe)) != invitation.digest:
            text = f"the recipe's digest is {digest}; the server's is {invitation.digest}"
            raise SiteError(text, "plan")
        check_names(recipe, self.file)
        check_approved(recipe, self.file)
        count = 0 if recipe.left_open else recipe.clients.num_clients
        if count > places:  # a huge number would fill the memory
            raise SiteError(
                f"the recipe has clients.num_clients = {count}, and the invitation names {places} "
                "sites",
                "plan",
            )
        return recipe

    def _begins_anew(self, invitation: Invitation, state: SiteState | None) -> bool:
        """Return whether the site begins anew although it answered before; refuse if it may not."""
        newest: StageKey | None = None if state is None else max(state.answered, default=None)
        if invitation.last is None or (newest is not None and newest >= invitation.last):
            return False
        lost = f"this site answered round {invitation.last[0]}, and its state in {self.folder} is "
        lost += "missing" if newest is None else f"of round {newest[0]}"
        if invitation.state_lost == "refuse":
            raise SiteError(f"{lost}: put it back from a copy (federation.state_lost = 'refuse')")
        audit_log.write(self.folder, f"run {invitation.run}: {lost}: it begins anew")
        self.say(f"{lost}: it begins anew")
        return True

    def _site(self, invitation: Invitation, part: SitePart, store: SiteStore) -> Site:
        data, digest = part.data, digest_of(part.data)
        store.rows = digest
        name = self.file.table.name
        account = Ledger(self.folder).account(name, digest)
        if account.digest != digest and self.file.policy.epsilon is not None:
            self.say(
                f"the rows of {name!r} ({data.name}) are others than when their privacy budget was "
                "opened: the same budget goes on (fedgist site --new-data opens a new one)"
            )
        policy = ReleasePolicy(
            self.file, invitation.run, store.recipe, name, digest, part.side.spending, store.lost
        )
        return Site(
            part.side.method,
            part.task,
            part.population,
            part.settings,
            run=invitation.run,
            rounds_kept=ROUNDS_KEPT,
            keep=store.keep,
            consent=policy,
            worked=self.worked[invitation.run],
        )

    def _handler(
        self, invitation: Invitation, part: SitePart, site: Site
    ) -> Callable[[bytes], bytes]:
        """Return what answers envelopes: the site itself, or in secure sums."""
        policy, kit = self.file.policy, self.kit
        if part.side.setup.federation.sums != "secure":
            return site.handle
        assert kit is not None  # it was checked before training
        return SecureSite(
            site,
            KitCredentials(kit, invitation.names, policy.sites),
            recipe=invitation.digest,
            least=policy.least_sites,
            book=TotalsBook(self.folder / TOTALS),
        ).handle

    def _secret(self) -> int:
        """Return a seed that the server does not know; it is made once."""
        path = self.folder / SECRET
        if not path.exists():
            files.write(path, f"{secrets.randbits(62)}\n", private=True)
        try:
            return int(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise SiteError(f"{path} cannot be read: put it back from a copy") from error


def digest_of(data: Dataset) -> str:
    """Return the digest of a site's rows."""
    inputs = traces("x", data.inputs) | traces("x_test", data.inputs_test)
    return of_arrays({"y": data.y, "y_test": data.y_test, **inputs})
