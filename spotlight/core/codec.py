"""Frozen dataclasses <-> JSON-able dicts, strict both ways: the wire and the journal speak only this.

`Codec(*classes)` reads each class's annotations once. A message is {"type": class name, field: value, ...};
fields at their default are left out. Unknown types, unknown or missing fields and wrong types raise
DataError.
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
    decode: Convert
    default: Any


class Codec:
    """Encodes and decodes the given dataclasses and whatever dataclasses their fields hold."""

    def __init__(self, *classes: type) -> None:
        self._fields: dict[type, tuple[_Field, ...]] = {}
        self._by_name = {cls.__name__: cls for cls in classes}
        for cls in classes:
            self._learn(cls)

    def encode(self, message: Any) -> dict[str, Any]:
        """The JSON-able dict of `message`. Raises DataError if its class is not of this codec."""
        cls = type(message)
        if self._by_name.get(cls.__name__) is not cls:
            raise DataError(f"not a message: {cls.__name__}")
        return {"type": cls.__name__, **self._to_dict(message)}

    def decode(self, data: Any) -> Any:
        """The message of a dict that `encode` made. Raises DataError on anything else."""
        name = data.get("type") if isinstance(data, Mapping) else None
        cls = self._by_name.get(name) if isinstance(name, str) else None
        if cls is None:
            raise DataError(f"not a message: {str(data)[:80]!r}")
        return self._from_dict(cls, {key: value for key, value in data.items() if key != "type"})

    def _learn(self, cls: type) -> None:
        if cls in self._fields:
            return
        hints = get_type_hints(cls)
        self._fields[cls] = tuple(
            _Field(f.name, self._encoder(hints[f.name]), self._decoder(hints[f.name]), _default(f))
            for f in dataclasses.fields(cls)
        )

    def _to_dict(self, message: Any) -> dict[str, Any]:
        out = {}
        for name, encode, _, default in self._fields[type(message)]:
            value = getattr(message, name)
            if value != default:
                out[name] = value if encode is None else encode(value)
        return out

    def _from_dict(self, cls: type, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise DataError(f"{cls.__name__}: expected an object, got {str(data)[:60]!r}")
        fields = self._fields[cls]
        if unknown := sorted(set(map(str, data)) - {f.name for f in fields}):
            raise DataError(f"{cls.__name__}: unknown field {unknown[0][:60]!r}")
        try:
            return cls(**{f.name: f.decode(data[f.name]) for f in fields if f.name in data})
        except (TypeError, ValueError) as error:
            raise DataError(f"{cls.__name__}: {error}") from error

    def _encoder(self, hint: Any) -> Convert | None:
        """None stands for the identity, so that plain fields cost nothing."""
        if hint is SampleId:
            return str
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
        if hint is SampleId:
            return lambda value: SampleId.parse(_text(value))
        if dataclasses.is_dataclass(hint):
            return lambda value: self._from_dict(hint, value)  # type: ignore[arg-type]
        if hint in _PLAIN:
            return _PLAIN[hint]
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


_PLAIN: dict[Any, Convert] = {int: _integer, float: _number, str: _text, bool: _truth}
