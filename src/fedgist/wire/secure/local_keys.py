"""Sites of secure sums in one process: each knows the others by a key of this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedgist.wire.secure.engine import SecureEngine
from fedgist.wire.secure.site import SecureSite
from fedgist.wire.site import Site

__all__ = ["LocalCredentials", "SecureEngine", "secure_handlers"]


@dataclass(frozen=True)
class LocalCredentials:
    """A site's own key, and the public keys of all sites."""

    own: Ed25519PrivateKey
    public: Mapping[int, Ed25519PublicKey]

    @property
    def certificate(self) -> bytes:
        """Nothing: the sites of a process know each other."""
        return b""

    def sign(self, text: bytes) -> bytes:
        """Return this site's signature."""
        return self.own.sign(text)

    def is_signed(self, member: int, certificate: bytes, text: bytes, signature: bytes) -> bool:
        """Return whether a signature is that of a site of this process."""
        del certificate
        try:
            self.public[member].verify(signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True


def secure_handlers(sites: Mapping[int, Site]) -> dict[int, Callable[[bytes], bytes]]:
    """Return what answers envelopes for each site, in secure sums."""
    keys = {client: Ed25519PrivateKey.generate() for client in sites}
    public = {client: key.public_key() for client, key in keys.items()}
    return {
        client: SecureSite(site, LocalCredentials(keys[client], public)).handle
        for client, site in sites.items()
    }
