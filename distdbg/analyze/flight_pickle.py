"""Plain values out of a pickle, and nothing else: torch writes its Flight Recorder's dumps as pickles.

A pickle is a program, and Python's own reader runs it. This one knows only the opcodes that make numbers, text,
lists, tuples and dicts; there is none among them that names a class, calls anything or sets an attribute. It stops
at the first other one, and at limits on what a small file can make large.
"""

import struct
from collections.abc import Callable
from pickletools import opcodes
from typing import Any

MAX_VALUES = 20_000_000  # a dump of 2,000 collectives has some 300,000
MAX_INT_BYTES = 16

_MARK = object()
_STOP = 0x2E


class PickleError(ValueError):
    """What is wrong with the bytes, as the end of a sentence: "is truncated", "holds ..."."""


class _Reader:
    """The state of one reading: the bytes, the position, the stack, the memo."""

    __slots__ = ("at", "data", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    # ---- arguments

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise PickleError("is truncated")
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, form: struct.Struct) -> Any:
        at = self.at
        self.at = at + form.size
        return form.unpack_from(self.data, at)[0]

    def byte(self) -> int:
        at = self.at
        self.at = at + 1
        return self.data[at]

    # ---- the stack

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        for position in range(len(stack) - 1, -1, -1):
            if stack[position] is _MARK:
                found = stack[position + 1 :]
                del stack[position:]
                return found
        raise PickleError("is damaged (no beginning of a list)")

    def pop(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        if len(found) < count or _MARK in found:
            raise PickleError("is damaged (values are missing)")
        del self.stack[-count:]
        return found

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise PickleError("is damaged (a value of another kind)")
        return self.stack[-1]


def loads(data: bytes) -> Any:
    """The value of a pickle of protocol 2 or newer that holds plain values only.

    Keys of dicts are numbers and text. Raises PickleError for anything else, before making it.
    """
    reader = _Reader(data)
    if data[:1] != b"\x80":
        raise PickleError("is no pickle of protocol 2 or newer")
    try:
        _run(reader)
    except (IndexError, struct.error):
        raise PickleError("is truncated") from None
    except KeyError:
        raise PickleError("is damaged (refers to what is not there)") from None
    if len(reader.stack) != 1 or reader.stack[0] is _MARK:
        raise PickleError("is damaged (no single value)")
    return reader.stack[0]


def _run(reader: _Reader) -> None:
    """Go through the opcodes. Raises IndexError or struct.error where the bytes end too early, KeyError in the memo."""
    data, handlers = reader.data, _HANDLERS
    for _ in range(MAX_VALUES):
        at = reader.at
        code = data[at]
        reader.at = at + 1
        if code == _STOP:
            return
        handler = handlers.get(code)
        if handler is None:
            name = next((op.name for op in opcodes if ord(op.code) == code), f"0x{code:02x}")
            raise PickleError(f"holds more than plain values (opcode {name}), and was not read on")
        handler(reader)
    raise PickleError(f"holds more than {MAX_VALUES} values")


# ---- opcodes


def _constant(value: Any) -> Callable[[_Reader], None]:
    def handler(reader: _Reader) -> None:
        reader.stack.append(value)

    return handler


def _fixed(form: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(form)

    def handler(reader: _Reader) -> None:
        reader.stack.append(reader.number(packed))

    return handler


def _sized(form: str, *, text: bool) -> Callable[[_Reader], None]:
    length = struct.Struct(form)

    def handler(reader: _Reader) -> None:
        found = reader.take(reader.number(length))
        # Text may be a file name in any encoding; what is not UTF-8 is shown as far as it goes.
        reader.stack.append(found.decode("utf-8", "replace") if text else found)

    return handler


def _integer(form: str) -> Callable[[_Reader], None]:
    length = struct.Struct(form)

    def handler(reader: _Reader) -> None:
        size = reader.number(length)
        if not 0 <= size <= MAX_INT_BYTES:
            raise PickleError(f"holds a number of {size} bytes")
        reader.stack.append(int.from_bytes(reader.take(size), "little", signed=True))

    return handler


def _put(form: str) -> Callable[[_Reader], None]:
    index = struct.Struct(form)

    def handler(reader: _Reader) -> None:
        if not reader.stack or reader.stack[-1] is _MARK:
            raise PickleError("is damaged (nothing to keep)")
        reader.memo[reader.number(index)] = reader.stack[-1]

    return handler


def _get(form: str) -> Callable[[_Reader], None]:
    index = struct.Struct(form)

    def handler(reader: _Reader) -> None:
        reader.stack.append(reader.memo[reader.number(index)])

    return handler


def _get_short(reader: _Reader) -> None:
    reader.stack.append(reader.memo[reader.byte()])


def _memoize(reader: _Reader) -> None:
    if not reader.stack or reader.stack[-1] is _MARK:
        raise PickleError("is damaged (nothing to keep)")
    reader.memo[len(reader.memo)] = reader.stack[-1]


def _skip(count: int) -> Callable[[_Reader], None]:
    def handler(reader: _Reader) -> None:
        reader.take(count)

    return handler


def _make(kind: Callable[[], Any]) -> Callable[[_Reader], None]:
    def handler(reader: _Reader) -> None:
        reader.stack.append(kind())

    return handler


def _tuple(count: int) -> Callable[[_Reader], None]:
    def handler(reader: _Reader) -> None:
        reader.stack.append(tuple(reader.pop(count)))

    return handler


def _store(found: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleError("is damaged (a key without a value)")
    for key in items[::2]:
        # A tuple in a tuple in a tuple can take for ever to hash; no dump has such keys.
        if type(key) not in (str, int):
            raise PickleError("holds a dict whose keys are neither text nor numbers")
    found.update(zip(items[::2], items[1::2], strict=True))


def _append(reader: _Reader) -> None:
    value = reader.pop(1)
    reader.top(list).extend(value)


def _appends(reader: _Reader) -> None:
    values = reader.pop_to_mark()
    reader.top(list).extend(values)


def _set_item(reader: _Reader) -> None:
    pair = reader.pop(2)
    _store(reader.top(dict), pair)


def _set_items(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    _store(reader.top(dict), items)


def _dict(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    found: dict[Any, Any] = {}
    _store(found, items)
    reader.stack.append(found)


_BY_NAME: dict[str, Callable[[_Reader], None]] = {
    "PROTO": _skip(1),
    "FRAME": _skip(8),
    "MARK": _constant(_MARK),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "BININT": _fixed("<i"),
    "BININT1": lambda reader: reader.stack.append(reader.byte()),
    "BININT2": _fixed("<H"),
    "BINFLOAT": _fixed(">d"),
    "LONG1": _integer("<B"),
    "LONG4": _integer("<i"),
    "SHORT_BINUNICODE": _sized("<B", text=True),
    "BINUNICODE": _sized("<I", text=True),
    "BINUNICODE8": _sized("<Q", text=True),
    "SHORT_BINBYTES": _sized("<B", text=False),
    "BINBYTES": _sized("<I", text=False),
    "BINPUT": _put("<B"),
    "LONG_BINPUT": _put("<I"),
    "MEMOIZE": _memoize,
    "BINGET": _get_short,
    "LONG_BINGET": _get("<I"),
    "EMPTY_LIST": _make(list),
    "APPEND": _append,
    "APPENDS": _appends,
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": lambda reader: reader.stack.append(tuple(reader.pop_to_mark())),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "EMPTY_DICT": _make(dict),
    "DICT": _dict,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
}
_HANDLERS = {ord(op.code): _BY_NAME[op.name] for op in opcodes if op.name in _BY_NAME}
