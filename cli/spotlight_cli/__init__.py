"""The `spotlight` command: parse, call `spotlight.api`, render."""
