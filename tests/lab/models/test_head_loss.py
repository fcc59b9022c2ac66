"""The chunked loss of a large head has the value and gradients of the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from polarstep.rng import generator
from polarstep_lab.models import head_loss as module
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.models.head_loss import head_loss, loss_of_rows, softcapped

POSITIONS, WIDTH, VOCABULARY, CAP = 37, 8, 29, 3.0


def draw(dtype, scale=1.0):
    """Activations and a head with logits large enough for the cap to matter."""
    g = generator(0, "head loss")
    x = torch.randn(POSITIONS, WIDTH, generator=g, dtype=torch.float64)
    weight = scale * torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,), generator=g)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(x, weight, targets, softcap):
    logits = softcap * torch.tanh(F.linear(x, weight) / softcap)
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 4 * VOCABULARY, 2**30], ids=["row by row", "tens", "whole"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_value_and_gradients_are_the_plain_formulas(dtype, rtol, chunk):
    x, weight, targets = draw(dtype)
    expected = plain(x, weight, targets, CAP)
    grads = torch.autograd.grad(3 * expected, (x, weight))
    loss = head_loss(x, weight, targets, CAP, chunk=chunk)
    ours = torch.autograd.grad(3 * loss, (x, weight))
    assert torch.allclose(loss, expected, rtol=rtol)
    for mine, reference in zip(ours, grads, strict=True):
        assert mine.dtype == dtype
        assert (mine - reference).norm() <= rtol * reference.norm()


def test_finite_differences():
    x, weight, targets = draw(torch.float64)
    assert torch.autograd.gradcheck(lambda *p: head_loss(*p, targets, CAP), (x, weight))


@pytest.mark.parametrize("softcap", [2.0, 15.0, module.LARGEST_SOFTCAP])
def test_logits_of_any_size_stay_finite(softcap):
    x, weight, targets = draw(torch.float32, scale=1e6)
    loss = head_loss(x, weight, targets, softcap)
    assert loss.item() == pytest.approx(plain(x, weight, targets, softcap).item(), rel=1e-5)
    loss.backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("softcap", [0.0, -1.0, 65.0])
def test_a_cap_outside_its_range_is_refused(softcap):
    with pytest.raises(ValueError, match=f"softcap={softcap}: expected above 0 and at most 64"):
        head_loss(*draw(torch.float32), softcap)


def test_no_gradient_is_made_where_none_is_wanted():
    x, weight, targets = draw(torch.float32)
    asked = []

    def rows(z, targets, softcap, with_gradient):
        asked.append(with_gradient)
        return loss_of_rows(z, targets, softcap, with_gradient)

    with torch.no_grad():
        alone = head_loss(x, weight, targets, CAP, rows=rows)
    frozen = head_loss(x.detach(), weight.detach(), targets, CAP, rows=rows)
    trained = head_loss(x, weight.detach(), targets, CAP, rows=rows)
    assert asked == [False, False, True]
    assert alone == frozen == trained
    trained.backward()
    assert x.grad is not None
    assert weight.grad is None


def test_logits_are_kept_in_the_precision_of_their_product():
    """The gradient of the weight is summed over the chunks in the weight's own precision."""
    x, weight, targets = draw(torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    seen = []

    def rows(z, *others):
        loss, gradient = loss_of_rows(z, *others)
        seen.append((z.shape[0], z.dtype, loss.dtype, gradient.dtype))
        return loss, gradient

    loss = head_loss(half, weight, targets, CAP, rows=rows, chunk=10 * VOCABULARY)
    loss.backward()
    assert [row[0] for row in seen] == [10, 10, 10, 7]
    assert {row[1:] for row in seen} == {(torch.bfloat16, torch.float32, torch.bfloat16)}
    assert (half.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    reference = plain(x, weight, targets, CAP)
    assert loss.item() == pytest.approx(reference.item(), rel=2e-3)
    (exact,) = torch.autograd.grad(reference, weight)
    assert (weight.grad - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_models_loss_is_that_of_its_logits(precision):
    model = GPT(GPTConfig(vocab_size=17, width=16, layers=2, heads=2, context=12), generator(0))
    tokens = torch.randint(0, 17, (3, 13), generator=generator(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    lower = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with lower:
        logits, loss = model(inputs), model.loss(inputs, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert logits.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        for value in (loss, expected)
    )
    tolerance = 1e-5 if precision == "float32" else 0.02
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine - reference).norm() <= tolerance * reference.norm() + 1e-12


def test_under_autocast_everything_between_embedding_and_loss_is_in_its_precision():
    model = GPT(GPTConfig(vocab_size=17, width=16, layers=2, heads=2, context=12), generator(0))
    seen = []
    for part in (*model.blocks, *(block.mlp.down for block in model.blocks)):
        part.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        features = model.features(torch.arange(12)[None])
    assert [features.dtype, *seen] == [torch.bfloat16] * 5
    assert model.features(torch.arange(12)[None]).dtype == torch.float32


def test_rounded_logits_do_not_bias_the_loss():
    """A product rounded to bfloat16 moves each logit by up to 2⁻⁹ of it, the mean loss by far less."""
    g = generator(2)
    x = torch.randn(2000, 64, generator=g)
    weight = 0.4 * torch.randn(500, 64, generator=g)
    z = x @ weight.T
    targets = torch.multinomial(softcapped(z, 15.0).softmax(1), 1, generator=g)[:, 0]
    exact, _ = loss_of_rows(z, targets, 15.0, False)
    rounded, _ = loss_of_rows(z.bfloat16(), targets, 15.0, False)
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-3)


def test_one_compiled_layer_serves_all_layers_models_and_modes():
    """A second model of the same shapes uses the compiled functions of the first."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    functions = {}

    def compiled(function):
        if function not in functions:
            functions[function] = torch.compile(function, dynamic=False, backend=counter)
        return functions[function]

    torch._dynamo.reset()
    tokens = torch.randint(0, 17, (3, 13), generator=generator(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    counts = []
    for seed in range(3):
        config = GPTConfig(vocab_size=17, width=16, layers=4, heads=2, context=12)
        model = GPT(config, generator(seed))
        loss = model.loss(inputs, targets, compiled)
        assert loss.item() == pytest.approx(model.loss(inputs, targets).item(), rel=1e-5)
        loss.backward()
        model.eval()
        with torch.no_grad():
            model.loss(inputs, targets, compiled)
        model.train()
        model.loss(inputs, targets, compiled).backward()
        counts.append(counter.frame_count)
    # A layer and a loss, with gradients and without.
    assert counts == [4, 4, 4]
