"""Read TensorFlow Federated's .sqlite files: users, and the examples of each user.

The table ``client_metadata`` lists the users of each split. The table ``examples`` holds each
example as a ``tf.Example`` in protocol buffers; only its texts are read here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedgist.data.sources.file_sizes import regular
from fedgist.data.sources.optional_packages import need
from fedgist.errors import DataError, first_line

NEED_PROTOBUF = "TensorFlow Federated's files need protobuf: pip install 'fedgist[text]'"
# fields of each message with their numbers and types; * marks lists
_MESSAGES = {
    "BytesList": {"value": (1, "*bytes")},
    "Feature": {"bytes_list": (1, "BytesList")},
    "Entry": {"key": (1, "string"), "value": (2, "Feature")},
    "Features": {"feature": (1, "*Entry")},
    "Example": {"features": (1, "Features")},
}


def users_of(path: Path, split: str) -> list[str]:
    """Return the users of a split, sorted."""
    query = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id"
    return [str(user) for (user,) in _rows(path, query, (split,))]


def examples_of(
    path: Path, split: str, users: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the user and the texts by name of each example of the given users."""
    # the examples of other users are not read
    query = (
        "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
        "AND client_id IN (SELECT value FROM json_each(?))"
    )
    for user, blob in _rows(path, query, (split, json.dumps(list(users)))):
        yield str(user), _texts_in(blob, path)


def _rows(path: Path, query: str, values: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
    place = f"file:{quote(str(regular(path).resolve()))}?mode=ro"
    try:
        with closing(sqlite3.connect(place, uri=True)) as opened:
            yield from opened.execute(query, values)
    except sqlite3.Error as error:
        raise DataError(
            f"{path} is no file of TensorFlow Federated: {first_line(error)}"
        ) from error


def _texts_in(blob: object, path: Path) -> dict[str, str]:
    example = _example_class()()
    try:
        example.ParseFromString(blob)
        entries = [(e.key, e.value.bytes_list.value) for e in example.features.feature]
        return {key: values[0].decode("utf-8") for key, values in entries if values}
    except (TypeError, ValueError, need("google.protobuf.message", NEED_PROTOBUF).Error) as error:
        raise DataError(
            f"{path} holds an example that cannot be read: {first_line(error)}"
        ) from error


@lru_cache
def _example_class() -> Any:
    """Return the class of tf.Example, with only its text fields declared."""
    described = need("google.protobuf.descriptor_pb2", NEED_PROTOBUF)
    pools = need("google.protobuf.descriptor_pool", NEED_PROTOBUF)
    factory = need("google.protobuf.message_factory", NEED_PROTOBUF)
    kinds = described.FieldDescriptorProto
    file = described.FileDescriptorProto(name="fedgist_example.proto", package="fedgist")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removeprefix("*")
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if kind != plain else kinds.LABEL_OPTIONAL
            if plain in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".fedgist.{plain}"
            else:
                added.type = kinds.TYPE_BYTES if plain == "bytes" else kinds.TYPE_STRING
    pool = pools.DescriptorPool()
    pool.Add(file)
    return factory.GetMessageClass(pool.FindMessageTypeByName("fedgist.Example"))
