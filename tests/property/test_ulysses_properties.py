"""The exchange around attention, for any lengths, heads and group size: exactly plain attention."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "parallel"))
from sp_group import run_group

from spotlight.parallel.ulysses import MIN_ROWS, _SplitHeads, shares

torch.set_num_threads(1)


def local(x, lengths, comm):
    """What a rank holds of (B, H, all rows, D)."""
    parts = []
    for stream, total in zip(x.split(lengths, dim=2), lengths, strict=True):
        owned = shares(total, comm.size, MIN_ROWS)
        parts.append(stream.split(owned, dim=2)[comm.rank if owned[comm.rank] else 0])
    return torch.cat(parts, dim=2)


@pytest.mark.timeout(180)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 5),
    heads=st.integers(5, 9),
    text=st.integers(1, 40),
    image=st.integers(1, 70),
    batch=st.integers(1, 3),
    text_first=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sharded_attention_is_plain_attention(size, heads, text, image, batch, text_first, masked, seed):
    g = torch.Generator().manual_seed(seed)
    masked = masked and text_first
    lengths, joint = ([text, image], ("text", "image")) if text_first else ([image, text], ("image", "text"))
    q, k, v = (torch.randn(batch, heads, text + image, 8, generator=g) for _ in range(3))
    mask = None
    if masked:
        known = torch.rand(batch, text, generator=g) < 0.7
        mask = torch.cat([known, known.new_ones(batch, image)], dim=1)[:, None, None]
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def rank(comm):
        mine = [local(x, lengths, comm) for x in (q, k, v)]
        part = None
        if masked:  # a model builds it from the whole text and the image rows it sees
            seen = local(whole[:, :1, text:], [image], comm).shape[2]
            part = mask[..., : text + seen]
        with _SplitHeads(comm, lengths, joint) as mode:
            got = F.scaled_dot_product_attention(*mine, attn_mask=part)
        assert mode.calls == 1
        return torch.equal(got, local(whole, lengths, comm))

    assert all(run_group(size, rank, form_timeout_s=20))
