"""What goes over the wire in a secure sum, as arrays: keys, sealed shares, masked numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedgist.core.message import message
from fedgist.errors import MessageError
from fedgist.wire.secure.masks import KEY
from fedgist.wire.secure.member import Unmasked
from fedgist.wire.secure.occasion import Advertised
from fedgist.wire.secure.ring import Ring
from fedgist.wire.secure.shares import LENGTH

_TABLE = 2  # dimensions
_SIZE = 2  # bytes of the length before bytes of any length


@message(reduce="each")
class Keys:
    """Public keys of sites ``members`` (n,): both keys, (n, 64).

    Their certificates and signatures are rows of bytes, padded, with their lengths before them.
    """

    members: Tensor
    keys: Tensor
    certificates: Tensor
    signatures: Tensor

    @staticmethod
    def of(advertised: Iterable[Advertised]) -> Keys:
        """Return the message of some keys."""
        listed = sorted(advertised, key=lambda one: one.member)
        keys = _rows([one.sealing + one.masking for one in listed], 2 * KEY)
        certificates, signatures = (
            _any([getattr(one, name) for one in listed]) for name in ("certificate", "signature")
        )
        return Keys(_numbers(one.member for one in listed), keys, certificates, signatures)

    def all(self) -> list[Advertised]:
        """Return the keys."""
        keys, numbers = _read(self.keys, 2 * KEY), _members(self.members)
        papers = _read_any(self.certificates), _read_any(self.signatures)
        return [
            Advertised(n, key[:KEY], key[KEY:], certificate, signature)
            for n, key, certificate, signature in zip(numbers, keys, *papers, strict=True)
        ]


@message(reduce="each")
class Sealed:
    """Sealed shares: for, or of, the sites ``members`` (n,); (n, 148)."""

    members: Tensor
    shares: Tensor

    @staticmethod
    def of(sealed: Mapping[int, bytes]) -> Sealed:
        """Return the message of some shares."""
        return Sealed(_numbers(sealed), _rows(list(sealed.values()), SEALED))

    def all(self) -> dict[int, bytes]:
        """Return the shares by site."""
        return dict(zip(_members(self.members), _read(self.shares, SEALED), strict=True))


@message(reduce="each")
class Masked:
    """Masked numbers, (length,): integers modulo 2^64."""

    numbers: Tensor

    def ring(self) -> Ring:
        """Return the numbers."""
        if self.numbers.dtype != torch.int64 or self.numbers.dim() != 1:
            raise MessageError("masked numbers are a list of integers")
        return self.numbers.numpy().view(np.uint64)


@message(reduce="each")
class Survivors:
    """The sites whose masked numbers are in the total, (n,)."""

    members: Tensor

    @staticmethod
    def of(members: Iterable[int]) -> Survivors:
        """Return the message of some sites."""
        return Survivors(_numbers(sorted(members)))

    def all(self) -> frozenset[int]:
        """Return the sites."""
        return frozenset(_members(self.members))


@message(reduce="each")
class Confirmations:
    """Signatures of the survivors by the sites ``members`` (n,); (n, most + 2)."""

    members: Tensor
    signatures: Tensor

    @staticmethod
    def of(confirmed: Mapping[int, bytes]) -> Confirmations:
        """Return the message of some signatures."""
        return Confirmations(_numbers(confirmed), _any(list(confirmed.values())))

    def all(self) -> dict[int, bytes]:
        """Return the signatures by site."""
        return dict(zip(_members(self.members), _read_any(self.signatures), strict=True))


@message(reduce="each")
class Opened:
    """Shares of mask keys of the sites ``gone`` (n, 66), and of own masks of those ``there``."""

    gone: Tensor
    keys: Tensor
    there: Tensor
    seeds: Tensor

    @staticmethod
    def of(answer: Unmasked) -> Opened:
        """Return the message of a site's shares."""
        keys, seeds = list(answer.keys.values()), list(answer.seeds.values())
        parts = _numbers(answer.keys), _rows(keys, LENGTH), _numbers(answer.seeds)
        return Opened(*parts, _rows(seeds, LENGTH))

    def all(self) -> Unmasked:
        """Return the shares by site."""
        keys = zip(_members(self.gone), _read(self.keys, LENGTH), strict=True)
        seeds = zip(_members(self.there), _read(self.seeds, LENGTH), strict=True)
        return Unmasked(dict(keys), dict(seeds))


SEALED = 2 * LENGTH + 16  # bytes: two shares, and AES-GCM's tag


def _numbers(members: Iterable[int]) -> Tensor:
    return torch.tensor(list(members), dtype=torch.int64)


def _members(members: Tensor) -> list[int]:
    if members.dtype != torch.int64 or members.dim() != 1:
        raise MessageError("sites are named by a list of integers")
    numbers: list[int] = members.tolist()
    if len(set(numbers)) < len(numbers) or any(number < 0 for number in numbers):
        raise MessageError("a site is named twice, or by a negative number")
    return numbers


def _rows(rows: list[bytes], width: int) -> Tensor:
    if not rows:
        return torch.zeros(0, width, dtype=torch.uint8)
    whole = bytearray(b"".join(rows))
    return torch.frombuffer(whole, dtype=torch.uint8).view(len(rows), width)


def _read(rows: Tensor, width: int) -> list[bytes]:
    if rows.dtype != torch.uint8 or rows.dim() != _TABLE or rows.shape[1] != width:
        raise MessageError(f"rows of {width} bytes were expected, not {list(rows.shape)}")
    return [row.numpy().tobytes() for row in rows]


def _any(rows: list[bytes]) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = [len(row).to_bytes(_SIZE, "big") + row.ljust(width, b"\0") for row in rows]
    return _rows(padded, width + _SIZE)


def _read_any(rows: Tensor) -> list[bytes]:
    if rows.dim() != _TABLE or rows.shape[1] < _SIZE:
        raise MessageError("signatures were expected")
    whole = _read(rows, rows.shape[1])
    return [row[_SIZE : _SIZE + int.from_bytes(row[:_SIZE], "big")] for row in whole]
