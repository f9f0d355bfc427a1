"""Stand-ins for torch's layers against torch's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.compiled.kernel_library import Kernel
from fedgist.core.nets.convolution import AveragePool2d, Conv2d, MaxPool2d
from fedgist.core.nets.layers import BatchNorm, Dropout, Pass, current, replace_layers
from fedgist.testing.laws import close

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
ALL = torch.ones(6, dtype=torch.bool)
SOME = torch.tensor([True, False, True, True, False, True])


@contextmanager
def training(
    mask: Tensor, key: Tensor | None = None, parts: int = 1, *, whole: bool = False
) -> Iterator[Pass]:
    run = Pass(mask, random.key(0) if key is None else key, parts, whole)
    token = current.set(run)
    try:
        yield run
    finally:
        current.reset(token)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grads(out: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """Return the gradients of a sum in which every number has another weight."""
    weights = numbers(*out.shape, seed=99)
    return list(
        torch.autograd.grad(
            (out * weights).sum(), [t for t in inputs if t is not None], retain_graph=True
        )
    )


# batch norm

KINDS: list[tuple[type[nn.BatchNorm1d | nn.BatchNorm2d], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (6, 3)),
    (nn.BatchNorm1d, (6, 3, 4)),
    (nn.BatchNorm2d, (6, 3, 4, 5)),
]
KIND = pytest.mark.parametrize(("kind", "shape"), KINDS, ids=["columns", "signals", "images"])


def pair(
    kind: type[nn.BatchNorm1d | nn.BatchNorm2d], **options: Any
) -> tuple[BatchNorm, nn.BatchNorm1d | nn.BatchNorm2d]:
    """Return our batch norm and torch's, with the same numbers."""
    reference, old = kind(3, **options), kind(3, **options)
    if reference.affine:
        nn.init.normal_(reference.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(reference.bias, generator=torch.Generator().manual_seed(2))
    reference.running_mean, reference.running_var = numbers(3, seed=3), numbers(3, seed=4).square()
    old.load_state_dict(reference.state_dict())
    return BatchNorm(old, "bn"), reference


@KIND
@pytest.mark.parametrize("mask", [ALL, SOME], ids=["full", "masked"])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.7, "eps": 0.3}], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["stacked", "each"])
def test_batch_norm_learns_as_torchs_does_on_the_rows_present(
    kind: type[nn.BatchNorm1d | nn.BatchNorm2d],
    shape: tuple[int, ...],
    each: bool,  # noqa: FBT001
    mask: Tensor,
    options: dict[str, Any],
) -> None:
    # rejects: means over all rows, absent ones included; a biased running variance; momentum the
    # other way round
    layer, reference = pair(kind, **options)
    layer.each = each
    for seed in range(2):
        present = numbers(*shape, seed=seed)[mask].requires_grad_()
        x = torch.zeros(shape)
        x[mask] = present.detach() + 3.0
        x.requires_grad_()
        with training(mask) as run:
            out = layer(x)
        expected = reference(present + 3.0)
        torch.testing.assert_close(out[mask], expected, rtol=1e-4, atol=1e-5)
        gradients = grads(out[mask], x, layer.weight, layer.bias)
        for a, b in zip(
            gradients, grads(expected, present, reference.weight, reference.bias), strict=True
        ):
            torch.testing.assert_close(
                a[mask] if a.shape == x.shape else a, b, rtol=1e-4, atol=1e-4
            )
        assert not gradients[0][~mask].any()
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(
                run.updates[f"bn.{name}"], getattr(reference, name), rtol=1e-5, atol=1e-6
            )
            setattr(layer, name, run.updates[f"bn.{name}"])


@KIND
def test_batch_norm_evaluates_as_torchs_does_and_remembers_nothing(
    kind: type[nn.BatchNorm1d | nn.BatchNorm2d], shape: tuple[int, ...]
) -> None:
    layer, reference = pair(kind, eps=0.1)
    x, before = numbers(*shape), layer.running_mean.clone()
    torch.testing.assert_close(layer(x), reference.eval()(x))
    assert torch.equal(layer.running_mean, before)


def test_two_passes_through_one_batch_norm_remember_both() -> None:
    layer, reference = pair(nn.BatchNorm1d)
    with training(ALL) as run:
        for seed in range(2):
            layer(numbers(6, 3, seed=seed))
            reference(numbers(6, 3, seed=seed))
    torch.testing.assert_close(run.updates["bn.running_var"], reference.running_var)


@pytest.mark.parametrize("each", [False, True], ids=["stacked", "each"])
def test_one_row_present_gives_the_bias_and_no_nan(each: bool) -> None:  # noqa: FBT001
    layer, _ = pair(nn.BatchNorm1d)
    layer.each = each
    x = numbers(6, 3).requires_grad_()
    mask = torch.arange(6) == 2
    with training(mask) as run:
        out = layer(x)
    torch.testing.assert_close(out[2], layer.bias)
    assert all(bool(torch.isfinite(t).all()) for t in (*run.updates.values(), *grads(out[mask], x)))


@KIND
@pytest.mark.parametrize("parts", [1, 2])
def test_batch_norm_of_a_whole_batch_is_that_of_one_with_all_rows_present(
    kind: type[nn.BatchNorm1d | nn.BatchNorm2d], shape: tuple[int, ...], parts: int
) -> None:
    layer, _ = pair(kind)
    x = numbers(*shape).requires_grad_()

    def normalize(*, whole: bool) -> tuple[Any, ...]:
        with training(ALL, None, parts, whole=whole) as run:
            out = layer(x)
        return out, run.updates, grads(out.square(), x, layer.weight, layer.bias)

    torch.testing.assert_close(normalize(whole=True), normalize(whole=False), rtol=1e-4, atol=1e-5)


def test_a_whole_batch_of_one_number_is_normalized_as_a_masked_one() -> None:
    layer, _ = pair(nn.BatchNorm1d)
    seen = []
    for whole in (True, False):
        with training(ALL[:1], whole=whole) as run:
            seen.append((layer(numbers(1, 3)), run.updates))
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(seen[0][0][0], layer.bias)


def test_batch_norm_is_the_same_for_all_at_once_for_each_and_alone() -> None:
    layer, _ = pair(nn.BatchNorm2d)
    x, masks = numbers(3, 6, 3, 2, 2), torch.stack([ALL, SOME, torch.arange(6) < 1])

    def normalize(x: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with training(mask) as run:
            return layer(x), run.updates

    out, updates = torch.func.vmap(normalize)(x, masks)
    layer.each = True
    for_each = torch.func.vmap(normalize)(x, masks)
    torch.testing.assert_close(for_each[1], updates, rtol=1e-4, atol=1e-5)
    for i in range(3):
        alone, updates_alone = normalize(x[i], masks[i])
        torch.testing.assert_close(out[i][masks[i]], alone[masks[i]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(for_each[0][i], alone)
        torch.testing.assert_close({n: u[i] for n, u in updates.items()}, updates_alone)


def test_batch_norm_without_running_statistics_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"body\.bn: batch norm without running statistics"):
        replace_layers(
            nn.ModuleDict(
                {"body": nn.ModuleDict({"bn": nn.BatchNorm1d(3, track_running_stats=False)})}
            )
        )


# dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_a_share_p_and_scales_the_rest(p: float) -> None:
    # rejects scaling by 1 / p, and keeping a share p
    with training(ALL):
        out = Dropout(p, channels=False)(torch.full((6, 5000), 3.0))
    kept = out != 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=4 * (p * (1 - p) / 30_000) ** 0.5)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3.0 / (1 - p)))


def test_dropout2d_drops_whole_channels_of_single_rows() -> None:
    with training(ALL):
        out = Dropout(0.5, channels=True)(torch.ones(6, 50, 3, 4)).flatten(2)
    assert torch.equal(out, out[..., :1].expand_as(out))
    assert 0.4 < float((out[..., 0] != 0).float().mean()) < 0.6
    assert len({tuple(row.tolist()) for row in out[..., 0]}) == 6


@pytest.mark.parametrize("channels", [False, True])
def test_dropout_of_nothing_everything_and_in_evaluation(channels: bool) -> None:  # noqa: FBT001
    x = numbers(6, 3, 2)
    assert torch.equal(Dropout(0.5, channels=channels)(x), x)
    with training(ALL):
        assert torch.equal(Dropout(0.0, channels=channels)(x), x)
        assert not Dropout(1.0, channels=channels)(x).any()


def test_dropout_follows_its_key_and_no_two_draws_of_a_pass_are_alike() -> None:
    # rejects one draw for all layers, or for two views of a batch
    layers = Dropout(0.5, channels=False), Dropout(0.5, channels=False)
    x = torch.ones(6, 40)

    def draws(seed: int) -> list[Tensor]:
        with training(ALL, random.key(seed)):
            return [layer(x) for layer in (*layers, layers[0])]

    first, again, other = draws(1), draws(1), draws(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    different = [*first, *other]
    assert not any(torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])


@pytest.mark.parametrize("channels", [False, True])
def test_dropout_is_the_same_stacked_and_alone_bit_for_bit(channels: bool) -> None:  # noqa: FBT001
    layer, keys = Dropout(0.3, channels=channels), random.fold(random.key(0), torch.arange(4))

    def drop_twice(x: Tensor, key: Tensor) -> Tensor:
        with training(ALL, key):
            out: Tensor = layer(x) + layer(2 * x)
            return out

    x = numbers(4, 6, 5, 3)
    stacked = torch.func.vmap(drop_twice)(x, keys)
    assert all(torch.equal(stacked[i], drop_twice(x[i], keys[i])) for i in range(4))


def test_dropout_passes_gradients_where_it_passes_numbers() -> None:
    x = torch.ones(6, 30, requires_grad=True)
    with training(ALL):
        out = Dropout(0.4, channels=False)(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], out.detach())


# convolutions


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"padding": (0, 2)},
        {"stride": 2, "padding": 1},
        {"groups": 2, "dilation": 2},
        {"padding": "same", "bias": False},
    ],
    ids=str,
)
def test_stacked_convolutions_and_their_gradients_are_torchs_client_by_client(
    kernel: Kernel, options: dict[str, Any]
) -> None:
    old = nn.Conv2d(4, 6, 3, **options)
    layer = Conv2d(old)
    layer.kernel = kernel
    params = {
        n: numbers(3, *p.shape, seed=i).requires_grad_()
        for i, (n, p) in enumerate(layer.named_parameters())
    }
    x = numbers(3, 2, 4, 7, 7, seed=9).requires_grad_()

    def convolve(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, params, (x,))
        return out

    out = torch.func.vmap(convolve)(params, x)
    alone = [
        torch.func.functional_call(old, {n: p[i] for n, p in params.items()}, x[i])
        for i in range(3)
    ]
    expected = torch.stack(alone)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        grads(out, x, *params.values()), grads(expected, x, *params.values()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("compiled")
def test_a_shared_filter_meets_stacked_images() -> None:
    layer = Conv2d(nn.Conv2d(2, 3, 3))
    x = numbers(4, 2, 2, 5, 5)
    expected = torch.stack([F.conv2d(images, layer.weight, layer.bias) for images in x])
    for kernel in KERNELS:
        layer.kernel = kernel
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected)


# linear layers


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4)], ids=["columns", "tokens"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_stacked_linear_layers_and_their_gradients_are_torchs_client_by_client(
    bias: bool,  # noqa: FBT001
    shape: tuple[int, ...],
    large: bool,  # noqa: FBT001
) -> None:
    layer = replace_layers(nn.Sequential(nn.Linear(4, 1025 if large else 3, bias=bias)))
    params = {
        n: numbers(3, *p.shape, seed=i).requires_grad_()
        for i, (n, p) in enumerate(layer.named_parameters())
    }
    x = numbers(3, *shape, seed=9).requires_grad_()

    def apply_layer(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, params, (x,))
        return out

    biases = params["0.bias"] if bias else [None] * 3
    expected = torch.stack(
        [F.linear(*each) for each in zip(x, params["0.weight"], biases, strict=True)]
    )
    stacked = torch.func.vmap(apply_layer)(params, x)
    alone = torch.stack([apply_layer({n: p[i] for n, p in params.items()}, x[i]) for i in range(3)])
    assert grads(stacked, *params.values())[0].is_contiguous() or not large
    for out in (stacked, alone):
        torch.testing.assert_close(out, expected)
        for a, b in zip(
            grads(out, x, *params.values()), grads(expected, x, *params.values()), strict=True
        ):
            assert close({"": a}, {"": b}, 16)  # of up to 1,025 terms
    shared = torch.func.vmap(apply_layer, in_dims=(None, 0))(
        {n: p[0] for n, p in params.items()}, x
    )
    again = F.linear(x, params["0.weight"][0], biases[0])
    for a, b in zip(
        grads(shared, x, *params.values()), grads(again, x, *params.values()), strict=True
    ):
        assert close({"": a}, {"": b}, 16)  # of up to 1,025 terms


# pooling


def distinct(*shape: int) -> Tensor:
    """Numbers without ties, half of them negative."""
    size = int(torch.tensor(shape).prod())
    return (
        torch.randperm(size, generator=torch.Generator().manual_seed(0)).view(shape) - size / 2
    ).float()


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7), (5, 5), (2, 2)], ids=str)
def test_pooling_and_its_gradient_are_torchs(size: tuple[int, int]) -> None:
    # rejects a gradient shared among the window, or sent to its first place
    x, y = (distinct(3, 2, *size).requires_grad_() for _ in range(2))
    out, expected = MaxPool2d(nn.MaxPool2d(2))(x), F.max_pool2d(y, 2)
    assert torch.equal(out, expected)
    assert torch.equal(grads(out, x)[0], grads(expected, y)[0])


@pytest.mark.parametrize("size", [(4, 6), (5, 7)], ids=str)
def test_pooling_is_torchs_when_clients_are_stacked(size: tuple[int, int]) -> None:
    x = distinct(3, 2, 2, *size).requires_grad_()
    out = torch.func.vmap(MaxPool2d(nn.MaxPool2d(2)), in_dims=1)(x.movedim(0, 1))
    expected = torch.stack([F.max_pool2d(images, 2) for images in x])
    assert torch.equal(out, expected)
    assert torch.equal(grads(out, x)[0], grads(expected, x)[0])


def test_among_equals_one_place_of_a_window_gets_the_whole_gradient() -> None:
    x = torch.zeros(1, 1, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(MaxPool2d(nn.MaxPool2d(2))(x).sum(), x)
    assert sorted(grad.unfold(2, 2, 2).unfold(3, 2, 2).reshape(4, 4)[0].tolist()) == [
        0.0,
        0.0,
        0.0,
        1.0,
    ]
    assert float(grad.sum()) == 4.0


@pytest.mark.parametrize("innermost", [True, False], ids=["batch innermost", "plain"])
@pytest.mark.parametrize("shape", [(3, 8, 5, 7, 7), (1, 64, 3, 4, 6), (2, 1, 4, 9, 1)], ids=str)
def test_a_mean_of_images_is_torchs_in_any_order_of_memory(
    shape: tuple[int, ...], *, innermost: bool
) -> None:
    # rejects means over the batch or the channels, and gradients that are not divided
    x = numbers(*shape)
    if innermost:  # as compiled convolutions leave it
        x = x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    x = x.requires_grad_()
    layer = replace_layers(nn.Sequential(nn.AdaptiveAvgPool2d((1, 1))))
    assert isinstance(next(layer.children()), AveragePool2d)
    out = torch.func.vmap(layer)(x)
    expected = torch.stack([F.adaptive_avg_pool2d(images, 1) for images in x])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads(out, x), grads(expected, x))
    if not innermost:
        assert torch.equal(out, expected)


# convolutions that pool


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("sides", "padding"), [(5, 0), (3, 1), ((2, 3), (0, 2))], ids=str)
@pytest.mark.parametrize("size", [(12, 12), (9, 11)], ids=str)
def test_a_convolution_that_pools_and_its_gradients_are_torchs_client_by_client(
    *, kernel: Kernel, bias: bool, sides: Any, padding: Any, size: tuple[int, int]
) -> None:
    # rejects a kernel shifted the wrong way, and a window that is cut off or overlaps at the odd
    # edge
    old = nn.Conv2d(3, 4, sides, padding=padding, bias=bias)
    layer = Conv2d(old, nn.MaxPool2d(2))
    layer.kernel = kernel
    x = numbers(2, 6, 3, *size).requires_grad_()
    params = {
        n: torch.stack([p, numbers(*p.shape)]).detach().requires_grad_()
        for n, p in layer.named_parameters()
    }

    def convolve_and_pool(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, params, (x,))
        return out

    out = torch.func.vmap(convolve_and_pool)(params, x)
    expected = torch.stack(
        [
            F.max_pool2d(
                F.conv2d(
                    x[k], params["weight"][k], params["bias"][k] if bias else None, 1, padding
                ),
                2,
            )
            for k in range(2)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        grads(out, x, *params.values()), grads(expected, x, *params.values()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_among_equals_one_place_of_a_window_gets_the_whole_gradient_of_both() -> None:
    # an image of one colour, as the margins of a digit are: rejects a share for each of the equals
    conv = Conv2d(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    (grad,) = torch.autograd.grad(conv(torch.ones(1, 1, 6, 6)).sum(), list(conv.parameters())[1:])
    assert grad.tolist() == [4.0, 4.0]


def test_only_plain_sequences_and_narrow_convolutions_pool_as_they_go() -> None:
    def small() -> list[nn.Module]:
        return [nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU()]

    inner = nn.Sequential(*small())
    joined = replace_layers(nn.Sequential(inner, nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)))
    assert [type(m).__name__ for m in inner] == ["Conv2d", "Identity", "ReLU"]
    # eight channels in are too many
    assert "Identity" not in [type(m).__name__ for m in joined.children()]
    for apart in (
        # its owner may call the layers one by one
        nn.ModuleDict({"features": nn.Sequential(*small())}),
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2, ceil_mode=True)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
    ):
        assert "Identity" not in names_of(replace_layers(apart)).values()


# putting them in place


def names_of(module: nn.Module) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in module.named_modules() if n and not list(m.children())}


def test_layers_are_replaced_at_any_depth_and_names_are_kept() -> None:
    inner = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout2d(), nn.ReLU(), nn.MaxPool2d(2)
    )
    whole = nn.ModuleDict({"body": inner, "drop": nn.Dropout(0.2)})
    arrays = {n: p.clone() for n, p in whole.named_parameters()}
    replace_layers(whole)
    assert names_of(inner)["1"] == "BatchNorm"
    assert isinstance(whole["drop"], Dropout)
    assert {n: torch.equal(p, arrays[n]) for n, p in whole.named_parameters()} == dict.fromkeys(
        arrays, True
    )
    with training(ALL) as run:
        inner(numbers(6, 1, 6, 6))
    assert set(run.updates) == {"body.1.running_mean", "body.1.running_var"}


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d((2, 3)),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2, 2, dilation=2),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        nn.GroupNorm(1, 4),
    ],
    ids=str,
)
def test_layers_without_a_stand_in_stay_torchs_own(layer: nn.Module) -> None:
    assert replace_layers(nn.Sequential(layer))[0] is layer  # type: ignore[index]


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(3), nn.MaxPool2d(2)], ids=str)
def test_a_layer_that_stands_in_two_places_is_replaced_in_both(layer: nn.Module) -> None:
    whole = replace_layers(nn.Sequential(layer, nn.ReLU(), layer))
    assert not any(type(m).__module__.startswith("torch.nn.modules.") for m in (whole[0], whole[2]))  # type: ignore[index]
    assert whole[0] is whole[2]  # type: ignore[index]
