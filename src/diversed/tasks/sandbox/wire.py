"""Values between examiner and candidate: JSON over a pipe, with a tag for what JSON does not have."""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import json
import os
import struct
from collections.abc import Callable
from typing import Any

LARGEST_MESSAGE = 16 << 20  # bytes

Refer = Callable[[Any], Any]


def encode(x: Any, refer: Refer) -> Any:
    """Plain values by value, anything else through ``refer``. Subclasses lose what makes them special: an ``int`` that
    claims to equal everything arrives as the ``int`` it is."""
    if x is None or x is True or x is False:
        return x
    if isinstance(x, str):
        return str.__str__(x)
    if isinstance(x, int):
        return ["int", hex(x)]
    if isinstance(x, float):
        return ["float", float.hex(x)]
    if isinstance(x, complex):
        return ["complex", float.hex(x.real), float.hex(x.imag)]
    if isinstance(x, bytes | bytearray):
        return [type(x).__name__ if type(x) in (bytes, bytearray) else "bytes", bytes(x).hex()]
    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(x, kind):
            return [kind.__name__, [encode(item, refer) for item in x]]
    for table in (collections.Counter, collections.OrderedDict, dict):
        if isinstance(x, table):
            return [table.__name__, [[encode(k, refer), encode(v, refer)] for k, v in dict.items(x)]]
    if isinstance(x, range):
        return ["range", x.start, x.stop, x.step]
    if isinstance(x, decimal.Decimal | fractions.Fraction):
        return [type(x).__name__, str(x)]
    if isinstance(x, datetime.datetime | datetime.date | datetime.time):
        return [type(x).__name__, x.isoformat()]
    if isinstance(x, datetime.timedelta):
        return ["timedelta", x.days, x.seconds, x.microseconds]
    if isinstance(x, type):
        name = x.__name__
        return ["builtin", name] if vars(builtins).get(name) is x else refer(x)
    if type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
        return encode(x.item(), refer)
    return refer(x)


def decode(x: Any, referred: Callable[[int], Any]) -> Any:
    if not isinstance(x, list):
        return x
    tag, *rest = x
    match tag:
        case "int":
            return int(rest[0], 16)
        case "float":
            return float.fromhex(rest[0])
        case "complex":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "bytes" | "bytearray":
            return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
        case "list" | "tuple" | "set" | "frozenset" | "deque":
            kind: Any = collections.deque if tag == "deque" else getattr(builtins, tag)
            return kind([decode(item, referred) for item in rest[0]])
        case "Counter" | "OrderedDict" | "dict":
            table: Any = dict if tag == "dict" else getattr(collections, tag)
            return table({decode(k, referred): decode(v, referred) for k, v in rest[0]})
        case "range":
            return range(*rest)
        case "Decimal":
            return decimal.Decimal(rest[0])
        case "Fraction":
            return fractions.Fraction(rest[0])
        case "datetime" | "date" | "time":
            return getattr(datetime, tag).fromisoformat(rest[0])
        case "timedelta":
            return datetime.timedelta(*rest)
        case "builtin":
            found = getattr(builtins, rest[0])
            if isinstance(found, type):
                return found
        case "reference":
            return referred(rest[0])
    raise ValueError(f"unknown tag {tag!r}")


def send(fd: int, message: Any) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("!Q", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, largest: int | None = None) -> Any:
    size = struct.unpack("!Q", read_exactly(fd, 8))[0]
    if largest is not None and size > largest:
        raise EOFError(f"a message of {size} bytes")
    return json.loads(read_exactly(fd, size))


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the pipe is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
