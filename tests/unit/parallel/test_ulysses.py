import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import sp_models as models
from sp_group import run_group

from spotlight.errors import ConfigError
from spotlight.parallel.comm import reduce_gradients
from spotlight.parallel.ulysses import MIN_ROWS, install, shares

torch.set_num_threads(1)


def ragged_mask(*lengths, text):
    return torch.arange(text)[None] < torch.tensor(lengths)[:, None]


def holey_mask(text):
    return torch.arange(text)[None] % 3 != 1


CASES = {
    "qwen-even": (models.qwen, lambda: models.qwen_inputs()),
    "qwen-uneven": (models.qwen, lambda: models.qwen_inputs(h=17, w=17, text=13)),
    "qwen-heads": (lambda: models.qwen(heads=6), lambda: models.qwen_inputs(h=5, w=7, text=37)),
    "qwen-mask": (models.qwen, lambda: models.qwen_inputs(text=16, mask=ragged_mask(11, text=16))),
    "qwen-mask-uneven": (
        lambda: models.qwen(heads=5),
        lambda: models.qwen_inputs(h=9, w=7, text=19, mask=ragged_mask(3, text=19)),
    ),
    "qwen-mask-holes": (models.qwen, lambda: models.qwen_inputs(h=5, w=5, text=17, mask=holey_mask(17))),
    "qwen-mask-full": (models.qwen, lambda: models.qwen_inputs(mask=ragged_mask(16, text=16))),
    "qwen-cfg-batch": (
        models.qwen,
        lambda: models.qwen_inputs(batch=2, h=7, w=9, text=21, mask=ragged_mask(21, 6, text=21)),
    ),
    "qwen-short-text": (models.qwen, lambda: models.qwen_inputs(h=8, w=8, text=2)),
    "qwen-few-rows": (models.qwen, lambda: models.qwen_inputs(h=3, w=3, text=5)),
    "qwen-modulate-index": (
        lambda: models.qwen(zero_cond_t=True),
        lambda: models.qwen_inputs(h=5, w=7, text=9),
    ),
    "flux-even": (models.flux, lambda: models.flux_inputs()),
    "flux-uneven": (lambda: models.flux(heads=6), lambda: models.flux_inputs(batch=2, h=9, w=11, text=13)),
    "sd3-even": (models.sd3, lambda: models.sd3_inputs()),
    "sd3-dual": (
        lambda: models.sd3(heads=6, dual=(0, 1), qk_norm="rms_norm"),
        lambda: models.sd3_inputs(batch=2, h=18, w=14, text=77),
    ),
    "tiny": (models.tiny, models.tiny_inputs),
}


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def sharded(model, inputs, size):
    def rank(comm):
        mine = copy.deepcopy(model)
        install(mine).bind(comm)
        return forward(mine, inputs)

    return run_group(size, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_output_equals_one_process_bit_for_bit(case, dtype, size):
    build, make = CASES[case]
    model, inputs = build().to(dtype), models.cast(make(), dtype)
    expected = forward(model, inputs)
    for output in sharded(model, inputs, size):
        assert torch.equal(output, expected)
        assert output.is_contiguous() == expected.is_contiguous()


def test_cfg_as_two_calls_of_different_text_length():
    model = models.qwen()
    pair = [models.qwen_inputs(h=7, w=7, text=t) for t in (29, 5)]
    expected = [forward(model, inputs) for inputs in pair]

    def rank(comm):
        mine = copy.deepcopy(model)
        install(mine).bind(comm)
        return [forward(mine, inputs) for inputs in pair]

    for outputs in run_group(3, rank):
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", ["qwen-mask-uneven", "flux-uneven", "sd3-dual", "tiny"])
def test_gradients_sum_to_one_process(case, size, checkpointing):
    build, make = CASES[case]
    model, inputs = build(), make()
    target = torch.randn(forward(model, inputs).shape, generator=torch.Generator().manual_seed(3))

    def backward(m):
        m.train()
        if checkpointing:
            m.enable_gradient_checkpointing()
        (m(**inputs)[0] - target).square().mean().backward()

    backward(model)

    def rank(comm):
        mine = copy.deepcopy(model)
        mine.zero_grad()
        install(mine).bind(comm)
        backward(mine)
        reduce_gradients(mine, comm)
        return {name: p.grad for name, p in mine.named_parameters()}

    for grads in run_group(size, rank):
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            assert (grads[name] - expected).norm() <= 1e-6 * max(1.0, expected.norm()), name


def test_lora_adapters_forward_and_gradients():
    from peft import LoraConfig

    model, inputs = models.qwen(), models.qwen_inputs(h=7, w=5, text=13)
    torch.manual_seed(2)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=targets))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
        p.requires_grad_("lora" in name)
    expected = forward(model, inputs)
    model(**inputs)[0].square().mean().backward()

    def rank(comm):
        mine = copy.deepcopy(model)
        mine.zero_grad()
        install(mine).bind(comm)
        output = forward(mine, inputs)
        mine(**inputs)[0].square().mean().backward()
        reduce_gradients(mine, comm)
        return output, {name: p.grad for name, p in mine.named_parameters() if p.requires_grad}

    for output, grads in run_group(3, rank):
        assert torch.equal(output, expected)
        assert grads
        for name, p in model.named_parameters():
            if p.requires_grad:  # the last block's text side leads nowhere and has none
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                assert (grads[name] - grad).norm() <= 1e-6 * max(1.0, grad.norm()), name


@pytest.mark.parametrize("case", ["qwen-mask", "flux-even", "sd3-dual"])
def test_install_changes_nothing_until_bound_and_remove_leaves_no_trace(case):
    build, make = CASES[case]
    model, inputs = build(), make()
    expected = forward(model, inputs)

    def traces(m):
        return sum(
            len(x._forward_hooks) + len(x._forward_pre_hooks) + ("forward" in vars(x)) for x in m.modules()
        )

    before = traces(model)
    sharding = install(model)
    assert traces(model) > before
    assert torch.equal(forward(model, inputs), expected)
    sharding.remove()
    assert traces(model) == before
    assert torch.equal(forward(model, inputs), expected)
    again = install(model)
    again.remove()
    assert traces(model) == before


def test_rebinding_between_forwards_and_a_second_model_beside_it():
    model, inputs = models.qwen(), models.qwen_inputs(h=5, w=5, text=9)
    other, other_inputs = models.sd3(), models.sd3_inputs()
    expected, other_expected = forward(model, inputs), forward(other, other_inputs)

    def rank(comm):
        mine = copy.deepcopy(model)
        sharding = install(mine)
        results = []
        for group in (comm, None, comm):
            sharding.bind(group)
            results.append(forward(mine, inputs))
        return results, forward(copy.deepcopy(other), other_inputs)  # never installed, so never sharded

    for results, beside in run_group(2, rank):
        assert all(torch.equal(r, expected) for r in results)
        assert torch.equal(beside, other_expected)


def test_a_broken_forward_leaves_the_model_usable():
    model, inputs = models.qwen(), models.qwen_inputs()
    expected = forward(model, inputs)

    def rank(comm):
        mine = copy.deepcopy(model)
        sharding = install(mine)
        sharding.bind(comm)
        comm.abort()
        with pytest.raises(Exception, match="abort"):
            forward(mine, inputs)
        sharding.bind(None)
        return forward(mine, inputs)

    assert all(torch.equal(r, expected) for r in run_group(2, rank))


def test_more_ranks_than_heads_is_refused():
    def rank(comm):
        with pytest.raises(ConfigError, match="2 attention heads"):
            install(models.qwen(heads=2)).bind(comm)

    run_group(3, rank)


def test_an_unknown_class_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="Linear") as caught:
        install(torch.nn.Linear(2, 2))
    assert "QwenImageTransformer2DModel" in caught.value.hint


def test_attention_that_goes_round_the_seam_is_an_error_not_a_wrong_picture():
    model, inputs = models.qwen(), models.qwen_inputs()

    class Elsewhere:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
            return hidden_states, encoder_hidden_states

    model.set_attn_processor(Elsewhere())

    def rank(comm):
        mine = copy.deepcopy(model)
        install(mine).bind(comm)
        with pytest.raises(ConfigError, match="0 scaled_dot_product_attention"):
            forward(mine, inputs)

    run_group(2, rank)


def test_extra_tokens_in_attention_are_refused():
    model, inputs = models.sd3(), models.sd3_inputs()

    def rank(comm):
        mine = copy.deepcopy(model)
        install(mine).bind(comm)
        with pytest.raises(ConfigError, match="tokens"):  # skipping block 0 skips the sharding
            mine(**inputs, skip_layers=[0])

    # The lengths of the last full forward are still known, so the ranks notice before they exchange.
    def primed(comm):
        mine = copy.deepcopy(model)
        install(mine).bind(comm)
        forward(mine, inputs)
        with pytest.raises((ConfigError, KeyError)):
            mine(**inputs, skip_layers=[0])

    run_group(2, primed)


@pytest.mark.parametrize("size", range(1, 9))
def test_shares_cover_the_total_and_avoid_small_pieces(size):
    for total in range(200):
        parts = shares(total, size, MIN_ROWS)
        assert sum(parts) == total
        assert len(parts) == size
        if total >= MIN_ROWS:
            assert all(p == 0 or p >= MIN_ROWS for p in parts)
        assert max(shares(total, size)) - min(shares(total, size)) <= 1
