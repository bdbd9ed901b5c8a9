"""Frozen dataclasses <-> JSON-able dicts, strict both ways: the wire and the journal speak only this.

`Codec(*classes)` reads each class's annotations once. A message is {"type": class name, field: value, ...};
fields at their default are left out. Unknown types, unknown or missing fields and wrong types raise
DataError that names the field.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from spotlight.core.types import SampleId
from spotlight.errors import DataError

Convert = Callable[[Any], Any]


class _Field(NamedTuple):
    name: str
    encode: Convert | None
    default: Any


class Codec:
    """Encodes and decodes the given dataclasses and whatever dataclasses their fields hold.

    `tag` is the key that says which class a dict is of, by the name that `name` gives it; `what` is how
    errors call a message. `types`: how to encode (None: as it is) and decode further types, by annotation.
    """

    def __init__(
        self,
        *classes: type,
        what: str = "message",
        tag: str = "type",
        name: Callable[[type], str] = lambda cls: cls.__name__,
        types: Mapping[Any, tuple[Convert | None, Convert]] | None = None,
    ) -> None:
        self._what, self._tag = what, tag
        self._types = {**_PLAIN, **(types or {})}
        self._fields: dict[type, tuple[_Field, ...]] = {}
        self._decoders: dict[type, dict[str, Convert]] = {}
        self._names = {cls: name(cls) for cls in classes}
        self._by_name = {name: cls for cls, name in self._names.items()}
        for cls in classes:
            self._learn(cls)

    def encode(self, message: Any) -> dict[str, Any]:
        """The JSON-able dict of `message`. Raises DataError if its class is not of this codec."""
        name = self._names.get(type(message))
        if name is None:
            raise DataError(f"not a {self._what}: {type(message).__name__}")
        return {self._tag: name, **self._to_dict(message)}

    def decode(self, data: Any) -> Any:
        """The message of a dict that `encode` made. Raises DataError on anything else."""
        if not isinstance(data, Mapping):
            raise DataError(f"not a {self._what}: {str(data)[:80]!r}")
        fields = dict(data)
        name = fields.pop(self._tag, None)
        cls = self._by_name.get(name) if isinstance(name, str) else None
        if cls is None:
            known = ", ".join(self._by_name)
            raise DataError(f"unknown {self._what} {str(name)[:60]!r}", hint=f"known: {known}")
        return self._from_dict(cls, fields)

    def _learn(self, cls: type) -> None:
        if cls in self._fields:
            return
        hints = get_type_hints(cls, include_extras=True)
        fields = dataclasses.fields(cls)
        self._fields[cls] = tuple(_Field(f.name, self._encoder(hints[f.name]), _default(f)) for f in fields)
        self._decoders[cls] = {f.name: self._decoder(hints[f.name]) for f in fields}

    def _to_dict(self, message: Any) -> dict[str, Any]:
        out = {}
        for name, encode, default in self._fields[type(message)]:
            value = getattr(message, name)
            if value != default:
                out[name] = value if encode is None else encode(value)
        return out

    def _from_dict(self, cls: type, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise DataError(f"{self._called(cls)}: expected an object, got {str(data)[:60]!r}")
        decoders, values, name = self._decoders[cls], {}, ""
        try:
            for name, value in data.items():
                decode = decoders.get(name)
                if decode is None:
                    raise DataError(f"{self._called(cls)}: unknown field {str(name)[:60]!r}")
                values[name] = decode(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self._called(cls)}: {name}: {error}") from error
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self._called(cls)}: {error}") from error

    def _called(self, cls: type) -> str:
        return f"{self._what} {self._names.get(cls, cls.__name__)!r}"

    def _encoder(self, hint: Any) -> Convert | None:
        """None stands for the identity, so that plain fields cost nothing."""
        if hint in self._types:
            return self._types[hint][0]
        if dataclasses.is_dataclass(hint):
            self._learn(hint)  # type: ignore[arg-type]
            return self._to_dict
        args = get_args(hint)
        if get_origin(hint) is tuple:
            return _list_encoder(self._encoder(args[0]))
        if get_origin(hint) in (Union, types.UnionType):
            return _optional(self._encoder(args[0]))
        return None

    def _decoder(self, hint: Any) -> Convert:
        if hint in self._types:
            return self._types[hint][1]
        if dataclasses.is_dataclass(hint):
            return lambda value: self._from_dict(hint, value)  # type: ignore[arg-type]
        origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            return lambda value: _one_of(value, args)
        if origin is tuple:
            return _tuple_decoder([self._decoder(arg) for arg in args if arg is not ...], ... in args)
        if origin in (Union, types.UnionType):  # only `X | None` is used
            inner = self._decoder(args[0])
            return lambda value: None if value is None else inner(value)
        if origin in (Mapping, dict):
            return _mapping
        raise TypeError(f"no codec for {hint}")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _list_encoder(inner: Convert | None) -> Convert:
    return list if inner is None else lambda value: [inner(item) for item in value]


def _optional(inner: Convert | None) -> Convert | None:
    return None if inner is None else lambda value: None if value is None else inner(value)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"expected a 64-bit integer, got {str(value)[:60]!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {str(value)[:60]!r}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {str(value)[:60]!r}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {str(value)[:60]!r}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {str(value)[:60]!r}")
    return {_text(key): _json(item) for key, item in value.items()}


def _json(value: Any, depth: int = 8) -> Any:
    """A free-form value as plain JSON; NaN, tensors and cycles do not pass."""
    if depth == 0:
        raise ValueError("nested too deeply")
    if value is None or type(value) in (str, bool):
        return value
    if isinstance(value, Mapping):
        return {_text(key): _json(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item, depth - 1) for item in value]
    return _integer(value) if isinstance(value, int) else _number(value)


def _one_of(value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"expected one of {', '.join(map(str, allowed))}, got {str(value)[:60]!r}")
    return value


def _tuple_decoder(inner: list[Convert], repeated: bool) -> Convert:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, got {str(value)[:60]!r}")
        if repeated:
            return tuple(map(inner[0], value))
        if len(value) != len(inner):
            raise ValueError(f"expected {len(inner)} items, got {len(value)}")
        return tuple(convert(item) for convert, item in zip(inner, value, strict=True))

    return decode


_PLAIN: dict[Any, tuple[Convert | None, Convert]] = {
    int: (None, _integer),
    float: (None, _number),
    str: (None, _text),
    bool: (None, _truth),
    SampleId: (str, lambda value: SampleId.parse(_text(value))),
}
