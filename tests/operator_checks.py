"""What must hold of the operators whether a library is loaded or not.

Run as a script, it holds them to it before anything was built, and with building switched off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

THEIRS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
# stride, padding, output_padding, groups, dilation of each number of dimensions
PARAMETERS: dict[int, tuple[Any, ...]] = {
    1: ((3,), (1,), (2,), 1, (2,)),
    2: ((2, 1), (1, 0), (1, 1), 2, (1, 2)),
    3: ((1, 2, 2), (0, 1, 0), (0, 1, 0), 1, (1, 1, 2)),
}


def public(ndim: int) -> Callable[..., Tensor]:
    import upconv

    return {1: upconv.conv_transpose1d, 2: upconv.conv_transpose2d, 3: upconv.conv_transpose3d}[
        ndim
    ]


def operator(ndim: int) -> Callable[..., Tensor]:
    import upconv  # noqa: F401

    return getattr(torch.ops.upconv, f"conv_transpose{ndim}d")


def tensors(ndim: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(ndim)
    groups = PARAMETERS[ndim][3]

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    size = (3, 2, 2)[:ndim]
    return leaf(batch, 2, *size), leaf(2, 2, *size[::-1]), leaf(2 * groups)


def check_gradients(ndim: int) -> None:
    """First and second derivatives by finite differences, and only the ones asked for."""
    x, w, b = tensors(ndim)

    def call(*given: Tensor) -> Tensor:
        return operator(ndim)(*given, *PARAMETERS[ndim])

    assert gradcheck(call, (x, w, b))
    assert gradgradcheck(call, (x[:1], w, b))
    assert gradcheck(call, (x[0], w, b))  # unbatched
    for index in range(3):
        alone = [t if i == index else t.detach() for i, t in enumerate((x, w, b))]
        assert gradcheck(call, alone)


def transforms(x: Tensor, w: Tensor) -> dict[str, Callable[[Callable[..., Tensor]], Any]]:
    """Every way to differentiate or batch a function of two tensors."""
    x, w = x.detach(), w.detach()
    tx, tw = torch.cos(x), torch.cos(w)

    def scalar(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: f(*given).sin().sum()

    def dual(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            result = f(forward_ad.make_dual(x, tx), forward_ad.make_dual(w, tw))
            return tuple(forward_ad.unpack_dual(result))

    def unrecorded_dual(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return dual(f)

    def only_weight_dual(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(f(x, forward_ad.make_dual(w, tw))))

    many_x, many_w = torch.stack([x, 2 * x, -x]), torch.stack([w, 2 * w, -w])
    return {
        "vmap over input": lambda f: func.vmap(f, (0, None))(many_x, w),
        "vmap over weight": lambda f: func.vmap(f, (None, 0))(x, many_w),
        "vmap over both": lambda f: func.vmap(f)(many_x, many_w),
        "vmap over the channels' end": lambda f: func.vmap(f, (-1, None))(many_x.movedim(0, -1), w),
        "jvp": lambda f: func.jvp(f, (x, w), (tx, tw)),
        "vjp": lambda f: func.vjp(f, x, w)[1](torch.ones_like(f(x, w))),
        "grad": lambda f: func.grad(scalar(f), argnums=(0, 1))(x, w),
        "jacrev": lambda f: func.jacrev(f, argnums=1)(x, w),
        "jacfwd": lambda f: func.jacfwd(f, argnums=1)(x, w),
        "vmap of grad": lambda f: func.vmap(func.grad(scalar(f), argnums=1), (0, None))(many_x, w),
        "grad of grad": lambda f: func.grad(lambda a: scalar(func.grad(scalar(f)))(a, w))(x),
        "hessian": lambda f: func.hessian(lambda a: f(x[:1], a).sin().sum())(w),
        "dual level": dual,
        "dual level without grad mode": unrecorded_dual,
        "dual level, weight alone": only_weight_dual,
        "autograd.functional.jvp": lambda f: torch.autograd.functional.jvp(
            f, (x, w), (tx, tw), strict=False
        ),
    }


def check_transforms_of_the_bias(ndim: int, function: Callable[..., Tensor]) -> None:
    """Outputs as wide as there are channels, where a bias along the width would go unnoticed."""
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 4, *[6] * ndim), torch.randn(3, 4, 8, *[3] * ndim), torch.randn(3, 8)
    x = x.unsqueeze(1)

    def jacobian(f: Callable[..., Tensor]) -> Any:
        return func.jacfwd(lambda bias: f(x[0], w[0], bias).sum(-1))(b[0])

    def of_grad(f: Callable[..., Tensor]) -> Any:
        scalar = lambda x, w, bias: f(x, w, bias).sin().sum()  # noqa: E731
        return func.vmap(func.grad(scalar, argnums=(0, 1, 2)))(x, w, b)

    ways: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "all": lambda f: func.vmap(f)(x, w, b),
        "the bias": lambda f: func.vmap(f, (None, None, 0))(x[0], w[0], b),
        "weight and bias": lambda f: func.vmap(f, (None, 0, 0))(x[0], w, b),
        "the input": lambda f: func.vmap(f, (0, None, None))(x, w[0], b[0]),
        "jacobian": jacobian,
        "gradients": of_grad,
    }
    for steps in ((), (2, 1)):

        def bind(f: Callable[..., Tensor], steps: tuple[int, ...] = steps) -> Callable[..., Tensor]:
            return lambda x, w, b: f(x, w, b, *([each] * ndim for each in steps))

        for name, way in ways.items():
            theirs = _flat(way(bind(THEIRS[ndim])))
            for _ in range(2):  # the second call knows its route
                for mine, their in zip(_flat(way(bind(function))), theirs, strict=True):
                    torch.testing.assert_close(mine, their, msg=lambda t, n=name: f"{n}: {t}")


def check_transforms(ndim: int, function: Callable[..., Tensor]) -> None:
    x, w, _ = tensors(ndim)
    groups_free = (*PARAMETERS[ndim][:3], 1, PARAMETERS[ndim][4])

    def bind(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: f(x, w, None, *groups_free)

    for name, transform in transforms(x, w).items():
        ours, theirs = transform(bind(function)), transform(bind(THEIRS[ndim]))
        for mine, their in zip(_flat(ours), _flat(theirs), strict=True):
            assert their.abs().max() > 0, name
            torch.testing.assert_close(mine, their, msg=lambda text, n=name: f"{n}: {text}")


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for part in value for t in _flat(part)]


def check_opcheck(ndim: int) -> None:
    x, w, b = tensors(ndim, torch.float32)
    op = operator(ndim)
    everything = (x, w, b, *PARAMETERS[ndim])
    torch.library.opcheck(op, everything)
    torch.library.opcheck(op, (x.detach()[0], w.detach(), None))
    rest = PARAMETERS[ndim]
    grad_output = torch.randn_like(op(*everything).detach()).requires_grad_()
    torch.library.opcheck(
        torch.ops.upconv.conv_transpose_grad_input, (grad_output, w, list(x.shape), *rest)
    )
    torch.library.opcheck(
        torch.ops.upconv.conv_transpose_grad_weight, (grad_output, x, list(w.shape), *rest)
    )


def main() -> None:
    assert os.environ["UPCONV_BACKEND"] == "aten"
    from upconv import ops

    for ndim in (1, 2, 3):
        check_gradients(ndim)
        check_transforms(ndim, public(ndim))
        check_transforms(ndim, operator(ndim))
        check_transforms_of_the_bias(ndim, public(ndim))
        check_transforms_of_the_bias(ndim, operator(ndim))
    check_opcheck(2)
    assert not ops.compiled("cpu")
    print("unbuilt: all well")


if __name__ == "__main__":
    main()
