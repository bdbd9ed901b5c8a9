from __future__ import annotations

import pytest
import torch
from fakes.random_sd3 import RandomSD3

from spotlight.rl import batching
from spotlight.rl.models import Conditioning

CHUNKS = [1, 2, 3, 4, 5, 7, 8, 13, 32, 64, 128]
COUNT = 128


@pytest.fixture(scope="module")
def adapter() -> RandomSD3:
    """The size of the embedded model."""
    return RandomSD3(layers=4)


@pytest.fixture(scope="module")
def inputs(adapter):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(COUNT, 1, 16, 32, generator=generator)
    times = torch.rand(COUNT, generator=generator)
    return latents, times, batching.encode(adapter, [f"{i:03d}" for i in range(COUNT)])


def velocities(adapter, inputs, size: int, **options) -> torch.Tensor:
    latents, times, cond = inputs
    parts = [range(at, min(at + size, COUNT)) for at in range(0, COUNT, size)]
    return torch.cat(
        [
            batching.velocity(adapter, latents[list(p)], times[list(p)], cond.index(list(p)), **options)
            for p in parts
        ]
    )


@pytest.mark.parametrize("size", CHUNKS)
def test_a_rows_velocity_has_the_same_bits_in_every_batch(adapter, inputs, size):
    with torch.no_grad():
        assert torch.equal(velocities(adapter, inputs, size), velocities(adapter, inputs, 16))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_forward_with_gradient_has_the_bits_of_forward_without(adapter, inputs, size):
    with torch.no_grad():
        expected = velocities(adapter, inputs, 16)
    assert torch.equal(velocities(adapter, inputs, size).detach(), expected)


def test_filled_rows_give_no_gradient(adapter, inputs):
    latents, times, cond = (inputs[0][:1], inputs[1][:1], inputs[2].index([0]))
    whole = inputs[0][:4].clone().requires_grad_(True)
    alone = latents.clone().requires_grad_(True)
    batching.velocity(adapter, alone, times, cond).square().sum().backward()
    four = batching.velocity(adapter, whole, inputs[1][:4], inputs[2].index(range(4)))
    four[:1].square().sum().backward()
    assert torch.allclose(alone.grad[0], whole.grad[0], rtol=1e-4, atol=1e-6)
    assert not whole.grad[1:].any()


def test_guidance_mixes_the_two_velocities(adapter, inputs):
    latents, times, cond = inputs[0][:3], inputs[1][:3], inputs[2].index(range(3))
    negative = batching.encode(adapter, [""] * 3)
    with torch.no_grad():
        plain = batching.velocity(adapter, latents, times, cond)
        empty = batching.velocity(adapter, latents, times, negative)
        guided = batching.velocity(adapter, latents, times, cond, negative=negative, cfg=3.0)
    assert torch.allclose(guided, empty + 3 * (plain - empty), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_prompts_conditioning_has_the_same_bits_in_every_batch(adapter, size):
    prompts = ["007", "42", "007", "", "é", "999", "1", "2"]
    whole = batching.encode(adapter, prompts)
    parts = Conditioning.cat(
        [batching.encode(adapter, prompts[at : at + size]) for at in range(0, len(prompts), size)]
    )
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, parts[name])
        assert torch.equal(tensor[0], tensor[2])


def test_decode_keeps_the_number_of_images(adapter):
    images = batching.decode(adapter, torch.zeros(2, 1, 16, 32))
    assert images.shape == (2, 1, 16, 32)
