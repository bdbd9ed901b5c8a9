"""Secrets are cut out by value, by shape and by key; ordinary text stays."""

from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.observe.redact import MASK, RedactingFilter, Redactor, is_secret_key

CANARY = "c4nary/+=&value"
PLAIN = st.text() | st.integers() | st.none() | st.booleans()


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "token", "AWS_SECRET_ACCESS_KEY", "api_key", "apikey", "wandb.api_key", "password",
     "DB_PASSWD", "auth", "client_secret", "private_key", "GOOGLE_APPLICATION_CREDENTIALS"],
)  # fmt: skip
def test_names_that_hold_secrets(name: str) -> None:
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokenizer", "num_tokens", "author", "key", "keys", "monkey", "secretary", "path", ""],
)
def test_names_that_hold_none(name: str) -> None:
    assert not is_secret_key(name)


def test_known_values_go_wherever_they_stand() -> None:
    redactor = Redactor.from_environment({"HF_TOKEN": CANARY, "HOME": "/somewhere/long"})
    assert redactor.text(f"GET /x?{CANARY} in /somewhere/long") == f"GET /x?{MASK} in /somewhere/long"
    assert "c4nary" not in redactor.text("url-quoted: c4nary%2F%2B%3D%26value")
    tree = {"a": [CANARY, {"b": f"x{CANARY}y"}], CANARY: 1, "n": 5}
    assert "c4nary" not in json.dumps(redactor.scrub(tree))
    assert redactor.scrub(tree)["n"] == 5


def test_short_and_empty_values_do_not_blank_the_text() -> None:
    assert Redactor.from_environment({"TOKEN": "", "API_KEY": "on"}).text("turned on") == "turned on"


def test_a_secret_that_contains_another_goes_whole() -> None:
    assert Redactor(["abcdefgh", "abcdefgh-ijkl"]).text("x abcdefgh-ijkl") == f"x {MASK}"


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "a" * 34, "AKIA" + "B" * 16, "ghp_" + "c" * 36, "sk-" + "d" * 40, "AIza" + "e" * 35,
     "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
     "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIE\n-----END RSA PRIVATE" + " KEY-----"],
)  # fmt: skip
def test_well_known_shapes(secret: str) -> None:
    assert Redactor().text(f"before {secret} after") == f"before {MASK} after"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://user:hunter2@host/x", f"https://user:{MASK}@host/x"),
        ("Authorization: Bearer abcdef123456", f"Authorization: Bearer {MASK}"),
        ("password=correct-horse-battery", f"password={MASK}"),
        ('{"api_key": "abcdefghijkl"}', f'{{"api_key": "{MASK}"}}'),
        ("lease token=1234567890 stays", "lease token=1234567890 stays"),
        ("a secret: short", "a secret: short"),
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
        ("", ""),
    ],
)
def test_pairs_in_text(text: str, clean: str) -> None:
    assert Redactor().text(text) == clean


def test_a_string_under_a_secret_key_goes_a_number_stays() -> None:
    scrubbed = Redactor().scrub({"token": "tiny", "password": "", "lease": {"token": 17}, "max_tokens": 8})
    assert scrubbed == {"token": MASK, "password": "", "lease": {"token": 17}, "max_tokens": 8}


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_scrubbing_twice_is_scrubbing_once(tree: object) -> None:
    redactor = Redactor([CANARY])
    assert redactor.scrub(redactor.scrub(tree)) == redactor.scrub(tree)


@pytest.mark.parametrize("unit", ["a", "token=", "eyJ", "://", "-----BEGIN ", "bearer ", "a:b@", "sk-", '"'])
def test_hostile_text_of_half_a_megabyte_ends(unit: str) -> None:
    text = unit * (500_000 // len(unit))
    assert isinstance(Redactor([CANARY]).text(text), str)  # the per-test timeout is the bound


def test_log_records_arguments_and_tracebacks_are_scrubbed() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter(Redactor([CANARY])))
    logger = logging.getLogger("spotlight.test_redact")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        logger.warning("login with %s", CANARY)
        try:
            raise ValueError(f"refused: {CANARY}")
        except ValueError:
            logger.exception("no login")
    finally:
        logger.removeHandler(handler)
    assert "c4nary" not in stream.getvalue()
    assert f"login with {MASK}" in stream.getvalue()
    assert f"ValueError: refused: {MASK}" in stream.getvalue()
