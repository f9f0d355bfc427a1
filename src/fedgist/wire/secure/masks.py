"""Keys that two sites agree on, and what follows from them: masks, and sealed shares.

X25519 agrees on a secret, HKDF with SHA-256 derives a key of it for one purpose on one occasion,
ChaCha20 stretches a key to a mask, and AES-GCM seals a share. A key serves once, so its nonce is 0.
"""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgist.errors import MessageError
from fedgist.wire.secure.ring import Ring

KEY = 32  # bytes


def public_of(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two sites agree on for a purpose.

    Raises
    ------
    MessageError
        If the other's public key is none.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise MessageError("a public key of another site is none") from error
    return HKDF(SHA256(), KEY, None, purpose).derive(secret)


def mask(key: bytes, count: int) -> Ring:
    """Return ``count`` uniform numbers of a key."""
    stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Return a content that only the other site can read; ``about`` must be the same there."""
    return AESGCM(key).encrypt(bytes(12), content, about)


def opened(key: bytes, content: bytes, about: bytes) -> bytes:
    """Return a sealed content.

    Raises
    ------
    MessageError
        If it was changed, or was sealed on another occasion.
    """
    try:
        return AESGCM(key).decrypt(bytes(12), content, about)
    except InvalidTag as error:
        raise MessageError("sealed shares were changed, or are of another attempt") from error
