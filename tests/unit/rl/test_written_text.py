"""Which text a prompt asks to be written."""

from __future__ import annotations

import pytest

from spotlight.rl.data import written_text


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign with "Spring Sale" on it', "Spring Sale"),
        ("a sign with “Spring Sale” on it", "Spring Sale"),
        ("ein Schild „Guten Tag“", "Guten Tag"),
        ("табличка «Да»", "Да"),
        ("「東京」の看板", "東京"),
        ('写着"你好"的牌子', "你好"),
        ("写着'你好'的牌子", "你好"),
        ('شعار "سلام"', "سلام"),
        ('a mug "☕🙂"', "☕🙂"),
        ("A cat holding a sign that says '123'", "123"),
        ("a cat's sign that says '123'", "123"),
        ("a sign ‘don’t stop’", "don’t stop"),
        ('"A" above "B"', "A B"),
        ('"" above "B"', "B"),
        ("It's a dog's life", None),
        ('a sign ""', None),
        ("''", None),
        ('"  "', None),
        ("a photo of a cat", None),
        ('an unclosed "quote', None),
        ("", None),
        ("417", "417"),
        ("  E=mc²  ", "E=mc²"),
    ],
)
def test_written_text(prompt: str, text: str | None) -> None:
    assert written_text(prompt) == text
