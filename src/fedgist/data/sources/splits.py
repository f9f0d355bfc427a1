"""Splits of a user's labelled rows, and the data set made of them.

Test rows are held out, labels and clients are numbered, and mean and std are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgist.core.far_numbers import narrowed
from fedgist.core.objectives.target import NUMERIC, Target
from fedgist.data.dataset import Dataset
from fedgist.data.division import USUAL, Division, OwnTestRowsError
from fedgist.data.held_out_rows import held_out
from fedgist.data.label_check import MANY_CLASSES, MissingClients, MissingLabels, check_among
from fedgist.data.lazy_rows import Inputs, lazy_or_none, outline
from fedgist.errors import DataError, listed

Values = NDArray[Any]
Missing = Literal["refuse", "mean"]  # the treatment of missing numbers
_NUMBERS_AT_ONCE = 1 << 24
_EXACT = 2**53  # beyond this, double precision does not hold every whole number


class RowOptions(TypedDict, total=False):
    """The options of every source of a user's own rows, as :func:`dataset` takes them."""

    test_fraction: float | None
    """Fraction of each class held out as test rows. Default 0.2. Not with test rows of their own.

    Each client's rows are divided by themselves; ``data.divide = "pooled"`` divides all together.
    """
    division: Division
    """Which rows are test rows, if the data have none of their own."""
    missing: Missing
    """What to do with a missing number (NaN).

    ``"refuse"``, the default: it is an error. ``"mean"``: the mean of its column over the training
    rows replaces it.
    """
    classes: Sequence[str]
    """Names of the classes in the order of their numbers."""
    target: Target
    """The form of the labels, which the objective determines."""
    missing_labels: MissingLabels
    """Whether single labels may be missing."""
    missing_clients: MissingClients
    """What to do with a row without a client."""
    precise: bool
    """Whether numbers stay in 64 bits: for facts about rows, not for training."""


def division_of(options: RowOptions) -> Division:
    """Return how test rows are chosen, with the share that is stated."""
    division, fraction = options.get("division", USUAL), options.get("test_fraction")
    return division if fraction is None else replace(division, fraction=fraction)


@dataclass(frozen=True, eq=False)
class Split:
    """Examples ``inputs`` ``(rows, *shape)``, their labels, and their clients if known.

    Inputs are a tensor, or rows that are read when they are used. ``clients`` are an array (rows,)
    of text, as :func:`as_texts` returns it. So are ``labels``, or they are numbers (rows, outputs),
    with NaN where one is missing, or the classes of pixels (rows, height, width), -1 where it is
    missing. ``groups`` (rows,) are what stays together if rows are held out, such as patients.
    """

    inputs: Inputs
    labels: Values
    clients: Values | None = None
    groups: Values | None = None
    ownerless: int = 0  # rows without a client, which are not among these

    def take(self, mask: Values) -> Split:
        """Return the rows where the Boolean ``mask`` (rows,) is true."""
        clients, groups = (v if v is None else v[mask] for v in (self.clients, self.groups))
        return Split(self.inputs[torch.from_numpy(mask)], self.labels[mask], clients, groups)

    def divided(self, division: Division) -> tuple[Split, Split]:
        """Return training rows and test rows."""
        mask = held_out(division, self.labels, self.clients, self.groups)
        return self.take(~mask), self.take(mask)

    def owned(self, missing_clients: MissingClients, subject: str) -> Split:
        """Return the rows that have a client.

        Raises
        ------
        DataError
            If a row has none, unless ``missing_clients`` is ``"drop"``.
        """
        if self.clients is None:
            return self
        absent = np.array([not name.strip() for name in self.clients], dtype=bool)
        if not absent.any():
            return self
        if missing_clients == "refuse":
            raise DataError(
                f"{subject}: the client is empty in {int(absent.sum())} of {len(absent)} rows; "
                "data.missing_clients = 'drop' leaves such rows out"
            )
        return replace(self.take(~absent), ownerless=int(absent.sum()))


def note_on_left_out(count: int, lack: str = "label") -> tuple[str, ...]:
    """Return a note for the user on rows that were left out because they have no label."""
    return (f"rows that are left out because they have no {lack}: {count}",) if count else ()


def with_a_label(rows: Split, target: Target) -> Split:
    """Return the rows that have a number, a label or a pixel's class: all, if rows have classes."""
    if target in NUMERIC:
        return rows.take(~np.all(np.isnan(rows.labels), axis=1))
    if target == "pixels":
        return rows.take(np.any(rows.labels >= 0, axis=(1, 2)))
    return rows


def last_of_each(groups: Values, fraction: float) -> Values:
    """Choose the last share ``fraction`` of each group's rows, in their order, as test rows.

    ``groups`` (rows,) is the group of each row. Return Booleans (rows,), true for a test row.
    Shares are rounded, and every group keeps at least one training row.
    """
    _, members, counts = np.unique(groups, return_inverse=True, return_counts=True)
    in_groups = np.argsort(members, kind="stable")
    mask = np.zeros(len(groups), dtype=bool)
    for rows in np.split(in_groups, np.cumsum(counts)[:-1]):
        kept = max(len(rows) - int(fraction * len(rows) + 0.5), 1)
        mask[rows[kept:]] = True
    return mask


def as_groups(values: Values, subject: str) -> Values:
    """Return groups (rows,) as text; raise DataError if a row has none."""
    groups = as_clients(values, subject)
    if (absent := groups == "").any():
        raise DataError(
            f"{subject}: the group is empty in {int(absent.sum())} of {len(absent)} rows: a row of "
            "its own needs a name of its own"
        )
    return groups


def refuse_group(group: str | None, test_rows: str) -> None:
    """Raise OwnTestRowsError if a group is named beside the data's own test rows."""
    if group is not None:
        raise OwnTestRowsError(f"group = {group!r} is not read: {test_rows}")


def as_clients(values: Values, subject: str) -> Values:
    """Return clients (rows,) as text, as :func:`as_texts` does; missing ones are empty texts."""
    if values.dtype.kind not in "fO":
        return as_texts(values, subject)
    absent = np.array([value is None or _is_nan(value) for value in values], dtype=bool)
    if not absent.any():
        return as_texts(values, subject)
    present = values[~absent]
    if values.dtype.kind == "f":
        present = whole_numbers(present, subject)
    clients = np.full(len(values), "", dtype=object)
    clients[~absent] = as_texts(np.array([*present]), subject)
    return clients


def _is_nan(value: object) -> bool:
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def as_texts(values: Values, subject: str) -> Values:
    """Return labels or clients (rows,), given as whole numbers, Booleans or text, as text."""
    if values.ndim != 1:
        raise DataError(f"{subject} have shape {list(values.shape)}; one value per row is needed")
    if values.dtype.kind == "f":
        values = whole_numbers(values, subject)
    if values.dtype.kind not in "iubUO":
        raise DataError(f"{subject} must be whole numbers or text, not {values.dtype}")
    for row, value in enumerate(values if values.dtype.kind == "O" else ()):
        if not isinstance(value, str):
            raise DataError(
                f"{subject} must be whole numbers or text; row {row} (counted from 0) holds {value}"
            )
    distinct, index = np.unique(values, return_inverse=True)
    return np.array([str(value) for value in distinct], dtype=object)[index]


def whole_numbers(values: Values, subject: str) -> Values:
    """Return floating-point numbers (rows,) as int64; raise DataError if one is not whole."""
    whole = (np.abs(values) < _EXACT) & (values == np.round(values))
    if not whole.all():
        row = int(np.argmin(whole))
        raise DataError(
            f"{subject} must be whole numbers or text; row {row} (counted from 0) holds "
            f"{values[row]}"
        )
    return values.astype(np.int64)


def in_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct texts in sorted order, in numerical order if all are whole numbers."""
    distinct = set(texts)
    try:
        return tuple(sorted(distinct, key=lambda text: (int(text), text)))
    except ValueError:
        return tuple(sorted(distinct))


def codes(texts: Values, classes: Sequence[str]) -> Tensor:
    """Return the position of each text in ``classes``: int64 (rows,)."""
    position = {text: number for number, text in enumerate(classes)}
    return torch.tensor([position[text] for text in texts], dtype=torch.int64)


def moments(x: Tensor, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of ``x / scale`` for each channel or column.

    ``x`` is (rows, channels, ...), bytes or numbers. A constant channel gets std 1, so that the
    division by it is harmless. Of rows without numbers (on the device ``meta``) nothing is known
    yet: see :func:`~fedgist.data.normalization.with_sampled_moments`.
    """
    if x.is_meta:
        return (0.0,), (1.0,)
    mean, std, constant = (_byte_moments if x.dtype == torch.uint8 else _real_moments)(x, scale)
    return tuple(mean.tolist()), tuple(torch.where(constant, 1.0, std).tolist())


def _byte_moments(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute moments from counts of byte values: exact, and without a floating-point copy."""
    levels = torch.arange(256, dtype=torch.float64) / scale
    counts = [channel.reshape(-1).bincount(minlength=256) for channel in x.unbind(1)]
    share = torch.stack(counts).double()
    share = share / share.sum(1, keepdim=True)
    mean, square = share @ levels, share @ levels**2
    return mean, (square - mean**2).clamp(min=0).sqrt(), (share > 0).sum(1) == 1


def _real_moments(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute moments of a few columns at a time, to bound the copy in double precision."""
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, x[:, 0].numel()))
    parts = []
    for piece in torch.split(x.transpose(0, 1), at_once):
        columns = piece.flatten(1).double() / scale
        std, mean = torch.std_mean(columns, dim=1, correction=0)
        parts.append((mean, std, columns.amin(1) == columns.amax(1)))
    mean, std, constant = (torch.cat(part) for part in zip(*parts, strict=True))
    return mean, std, constant


def as_mask(values: Values, subject: str) -> Values:
    """Return Booleans (rows,) from Booleans, 0 and 1, or their texts."""
    meanings = {"0": False, "false": False, "1": True, "true": True}
    mask = [meanings.get(text.strip().lower()) for text in as_texts(values, subject)]
    if None in mask:
        row = mask.index(None)
        raise DataError(
            f"{subject} must be 0 or 1, or false or true, in every row; row {row} (counted from 0) "
            f"holds {str(values[row])!r:.80}"
        )
    return np.array(mask, dtype=bool)


def dataset(
    name: str,
    train: Split,
    test: Split | None = None,
    *,
    test_fraction: float | None = None,
    division: Division = USUAL,
    classes: Sequence[str] = (),
    missing: Missing = "refuse",
    target: Target = "class",
    missing_labels: MissingLabels = "refuse",
    missing_clients: MissingClients = "refuse",
    drawn: bool = False,
    inputs: Sequence[str] = (),
    precise: bool = False,
) -> Dataset:
    """Make a data set: number labels and clients in sorted order, compute the moments.

    Without ``test`` rows are held out by ``division``, with the share ``test_fraction`` if it is
    given. ``drawn`` says that ``test`` was made so: then a class may have no training rows. Clients
    without training rows come after the others. ``classes`` gives the order of the classes if it is
    not the sorted one. If ``target`` is numbers or labels, ``classes`` are their names.
    With ``missing_labels = "mask"`` rows without any label are left out, with a note. So are rows
    without a client with ``missing_clients = "drop"``. ``inputs`` are the names of columns, for the
    note on missing numbers. If ``precise``, numbers stay in 64 bits.
    """
    if test is None:
        stated = division if test_fraction is None else replace(division, fraction=test_fraction)
        train, test = train.divided(stated)
        drawn = True
    train, test = (rows.owned(missing_clients, name) for rows in (train, test))
    given = len(train.labels) + len(test.labels)
    if missing_labels == "mask":
        train, test = with_a_label(train, target), with_a_label(test, target)
    first, last = (outline(rows.inputs) for rows in (train, test))
    if not len(first) or not first[0].numel():
        raise DataError(f"{name} has no training {'columns' if len(first) else 'rows'}")
    names, (y, y_test) = _labels(name, train, test, classes, target, drawn=drawn)
    x, x_test = (first, last) if precise else narrowed(first, last)
    fill = means(name, x) if missing == "mean" else None
    replaced = () if fill is None else note_on_replaced(x, x_test, inputs)
    x, x_test = fill_in(x, fill), fill_in(x_test, fill)
    scale = 255.0 if first.dtype == torch.uint8 else 1.0
    mean, std = moments(x, scale)
    clients = _all_clients(train, test)
    return Dataset(
        name,
        *(x, y, x_test, y_test, len(names), scale, mean, std),
        lazy=lazy_or_none(train.inputs),
        lazy_test=lazy_or_none(test.inputs),
        classes=names,
        fill=fill,
        clients=None if train.clients is None else codes(train.clients, clients),
        clients_test=None if test.clients is None else codes(test.clients, clients),
        client_names=clients,
        groups=None if train.groups is None else codes(train.groups, sorted({*train.groups})),
        target=target,
        notes=(
            *note_on_left_out(given - len(y) - len(y_test)),
            *note_on_left_out(train.ownerless + test.ownerless, "client"),
            *replaced,
        ),
        measured=frozenset({"moments", "fill"} if fill is not None else {"moments"}),
    )


def _labels(
    name: str, train: Split, test: Split, classes: Sequence[str], target: Target, *, drawn: bool
) -> tuple[tuple[str, ...], tuple[Tensor, Tensor]]:
    """Return the names of what is predicted, and the labels of training and test rows."""
    if target in NUMERIC:
        parts = (torch.from_numpy(rows.labels.astype(np.float64)) for rows in (train, test))
        y, y_test = narrowed(*parts)
        names = tuple(classes) or tuple(str(i) for i in range(y.shape[1]))
        return names, (y, y_test)
    if target == "pixels":
        pixels = [torch.from_numpy(rows.labels.astype(np.int16)) for rows in (train, test)]
        most = max(int(part.max()) for part in pixels if part.numel())
        names = tuple(classes) or tuple(str(i) for i in range(most + 1))
        return names, (pixels[0], pixels[1])
    known = np.concatenate([train.labels, test.labels]) if drawn else train.labels
    names = tuple(classes) or _classes_of(name, known)
    check_among(name, {*train.labels, *test.labels}, names, stated=bool(classes))
    return names, (codes(train.labels, names), codes(test.labels, names))


def means(name: str, x: Tensor) -> Tensor:
    """Return the mean (*shape) over the rows of ``x`` (rows, *shape), ignoring NaN."""
    if x.is_meta:
        raise DataError(f"{name}: missing = 'mean' needs all rows in memory: data.read = 'once'")
    mean = x.nanmean(0, dtype=torch.float64).to(x.dtype) if x.is_floating_point() else x[0].float()
    if bool((empty := mean.isnan().flatten()).any()):
        raise DataError(
            f"{name}: column {int(empty.byte().argmax())} (counted from 0) is missing in every "
            "training row"
        )
    return mean


def note_on_replaced(x: Tensor, x_test: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on the missing numbers that are replaced, by column if these have names."""
    if not x.is_floating_point():
        return ()
    counts = x.isnan().sum(0) + x_test.isnan().sum(0)
    total = int(counts.sum())
    if not total:
        return ()
    where = ""
    if counts.ndim == 1 and len(names) == len(counts):
        where = ": " + listed(
            f"{name} ({count})" for name, count in zip(names, counts.tolist(), strict=True) if count
        )
    return (f"missing numbers that the mean of their column replaces: {total}{where}",)


def fill_in(x: Tensor, fill: Tensor | None) -> Tensor:
    """Return ``x`` (rows, *shape) with ``fill`` (*shape) in place of missing numbers (NaN)."""
    return x if fill is None or not x.is_floating_point() else torch.where(x.isnan(), fill, x)


def _classes_of(name: str, labels: Values) -> tuple[str, ...]:
    """Return the distinct labels in sorted order."""
    classes = in_order(labels)
    if len(classes) > MANY_CLASSES and len(labels) < 2 * len(classes):
        raise DataError(
            f"{name} has {len(classes)} different labels in {len(labels)} training rows, such as "
            f"{classes[0]!r} and {classes[-1]!r}: labels are classes, each with several rows"
        )
    return classes


def _all_clients(train: Split, test: Split) -> tuple[str, ...]:
    """Return the clients with training rows, then the clients with only test rows."""
    trained, tested = (set() if r.clients is None else set(r.clients) for r in (train, test))
    return in_order(trained) + in_order(tested - trained)
