"""One YAML mapping, read strictly: no aliases, no key twice, no objects, an error that names the line."""

from __future__ import annotations

from typing import Any

import yaml

from spotlight.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader without aliases (no expansion bombs) and without duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "aliases are not allowed", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"duplicate key {key.value!r}", key.start_mark
            )
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Parse one YAML mapping strictly. Raises ConfigError that names `where` and the line."""
    try:
        tree = yaml.load(data.decode("utf-8-sig"), Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {str(error)[:300]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, a day that is in no calendar
        raise ConfigError(f"{where}: {str(error)[:100]}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: a recipe is a mapping of keys, not {type(tree).__name__}")
    return tree
