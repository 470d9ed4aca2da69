"""`accelerate` and `restore` on models as people have them."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import upconv
from upconv.swap import Report


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(8, 8, 2, 2) for _ in range(2))
        self.seq = nn.Sequential(nn.ReLU(), nn.ConvTranspose1d(8, 4, 3))
        self.volume = nn.ConvTranspose3d(1, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for up in self.ups:
            x = up(x)
        y = self.seq(x.flatten(2))
        return self.volume(y[:, None, :, :, None])


def names(entries: list) -> list[str]:  # type: ignore[type-arg]
    return [entry.name for entry in entries]


def test_swaps_every_layer_and_restores_exactly() -> None:
    model = UNet().eval()
    x = torch.randn(1, 3, 4, 4)
    expected = model(x)
    identities = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    state = {m: dict(m.__dict__) for m in model.modules()}

    report = upconv.accelerate(model)
    assert names(report.swapped) == ["ups.0", "ups.1", "seq.1", "volume"]
    assert report.left == []
    assert type(model.ups[0]) is upconv.ConvTranspose2d
    assert type(model.seq[1]) is upconv.ConvTranspose1d
    assert type(model.volume) is upconv.ConvTranspose3d
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)

    again = upconv.accelerate(model)
    assert again.swapped == []
    assert {entry.reason for entry in again.left} == {"runs by upconv already"}

    undone = upconv.restore(model)
    assert names(undone.swapped) == names(report.swapped)
    assert [type(m) for m in model.modules()] == classes
    for module, before in state.items():
        assert module.__dict__.keys() == before.keys()
    assert torch.equal(model(x), expected)


def test_report_prints() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.LazyConvTranspose2d(4, 3))
    report = upconv.accelerate(model)
    assert isinstance(report, Report)
    text = str(report)
    assert "1 layer swapped, 1 left" in text
    assert "ConvTranspose2d(2, 3, kernel_size=(3, 3), stride=(1, 1))" in text
    assert "lazy" in text
    assert str(upconv.restore(model)).startswith("upconv: 1 layer restored, 0 left")
    assert "0 layers swapped, 0 left" in str(upconv.accelerate(nn.Linear(1, 1)))


def test_a_layer_that_cannot_be_printed_is_swapped_all_the_same() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 3), nn.ConvTranspose2d(2, 3, 3))
    model[0].output_padding = 0  # computes; its repr raises
    with pytest.raises(TypeError):
        repr(model[0])
    x = torch.randn(1, 2, 5, 5)
    expected = model(x)
    report = upconv.accelerate(model)
    assert names(report.swapped) == ["0", "1"]
    assert "ConvTranspose2d\n" in str(report)
    torch.testing.assert_close(model(x), expected)
    assert names(upconv.restore(model).swapped) == ["0", "1"]


def test_a_parametrized_layer_takes_one_line() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 3)))
    for report in (upconv.accelerate(model), upconv.accelerate(model), upconv.restore(model)):
        assert str(report).count("\n") == 1
        assert "ConvTranspose2d(2, 3, kernel_size=(3, 3), stride=(1, 1))" in str(report)


def test_a_layer_that_was_wrapped_since_it_was_swapped() -> None:
    """As by fully_shard of FSDP2, which gives every module a class made for it."""

    class Mixin:
        pass

    layer = nn.ConvTranspose2d(2, 3, 3)
    upconv.accelerate(layer)
    layer.__class__ = type("FSDPConvTranspose2d", (Mixin, upconv.ConvTranspose2d), {})
    (left,) = upconv.restore(layer).left
    assert "was swapped, and is a" in left.reason
    assert "FSDPConvTranspose2d since then" in left.reason
    assert "call restore before wrapping" in left.reason


def test_the_model_itself_may_be_the_layer() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3)
    assert names(upconv.accelerate(layer).swapped) == [""]
    assert type(layer) is upconv.ConvTranspose2d
    upconv.restore(layer)
    assert type(layer) is nn.ConvTranspose2d


def test_shared_layers_once() -> None:
    shared = nn.ConvTranspose2d(2, 2, 3)
    model = nn.Sequential(shared, nn.Sequential(shared), shared)
    assert names(upconv.accelerate(model).swapped) == ["0"]
    assert type(model[2]) is upconv.ConvTranspose2d


def test_what_is_left_and_why() -> None:
    class Custom(nn.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return super().forward(input, output_size) + 1

    bound = nn.ConvTranspose2d(2, 2, 3)
    bound.forward = lambda x: x  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.ConvTranspose2d(2, 2, 3))
        quantized = torch.ao.nn.quantized.ConvTranspose2d(2, 2, 3)
    model = nn.ModuleDict(
        {
            "custom": Custom(2, 2, 3),
            "lazy": nn.LazyConvTranspose3d(2, 3),
            "scripted": scripted,
            "quantized": quantized,
            "bound": bound,
            "ours": upconv.ConvTranspose2d(2, 2, 3),
        }
    )
    before = {name: type(module) for name, module in model.items()}
    report = upconv.accelerate(model)
    assert report.swapped == []
    reasons = {entry.name: entry.reason for entry in report.left}
    assert "class of its own" in reasons["custom"]
    assert "lazy" in reasons["lazy"]
    assert "TorchScript" in reasons["scripted"]
    assert "quantized" in reasons["quantized"]
    assert "forward of its own" in reasons["bound"]
    assert "already" in reasons["ours"]
    assert {name: type(module) for name, module in model.items()} == before
    # Layers built as ours are not accelerate's to undo.
    undone = upconv.restore(model)
    assert undone.swapped == []
    assert {e.name: e.reason for e in undone.left} == {"ours": "was not swapped by accelerate"}


def test_lazy_layer_after_its_first_call() -> None:
    model = nn.Sequential(nn.LazyConvTranspose2d(4, 3))
    model(torch.randn(1, 2, 5, 5))
    assert names(upconv.accelerate(model).swapped) == ["0"]


@pytest.mark.parametrize(
    "parametrization", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_parametrized_layers(parametrization) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(parametrization(nn.ConvTranspose2d(4, 6, 3, stride=2)))
    model.eval()
    x = torch.randn(1, 4, 5, 5)
    expected = model(x)
    before = type(model[0])
    assert names(upconv.accelerate(model).swapped) == ["0"]
    assert isinstance(model[0], upconv.ConvTranspose2d)
    assert parametrize.is_parametrized(model[0], "weight")
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), expected)

    upconv.restore(model)
    assert type(model[0]) is before
    assert torch.equal(model(x), expected)
    upconv.restore(copied)
    assert type(copied[0]) is before


def test_parametrizations_that_come_and_go_while_swapped() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    x = torch.randn(1, 4, 5, 5)
    layer = parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3))
    upconv.accelerate(layer)
    parametrize.register_parametrization(layer, "bias", Double())
    expected = layer(x)
    upconv.restore(layer)
    assert not isinstance(layer, upconv.ConvTranspose2d)
    torch.testing.assert_close(layer(x), expected)

    removed = parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3))
    upconv.accelerate(removed)
    expected = removed(x)
    parametrize.remove_parametrizations(removed, "weight")
    assert type(removed) is upconv.ConvTranspose2d
    torch.testing.assert_close(removed(x), expected)
    upconv.restore(removed)
    assert type(removed) is nn.ConvTranspose2d


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm_and_pruning() -> None:
    """There the weight is a plain tensor that a hook computes before every call."""
    x = torch.randn(1, 4, 5, 5)
    normed = weight_norm(nn.ConvTranspose2d(4, 6, 3))
    pruned = prune.random_unstructured(nn.ConvTranspose2d(4, 6, 3), "weight", amount=0.5)
    for layer in (normed, pruned):
        expected = layer(x)
        assert len(upconv.accelerate(layer).swapped) == 1
        torch.testing.assert_close(layer(x), expected)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(2)
        assert not torch.allclose(layer(x), expected)


def test_hooks_optimizers_copies_and_pickles_keep_working() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3))
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    upconv.accelerate(model)
    x = torch.randn(1, 4, 5, 5)
    before = model(x)
    before.square().sum().backward()
    optimizer.step()
    assert calls == ["forward"]
    assert not torch.allclose(model(x), before)
    copied = copy.deepcopy(model)
    model[0]._forward_hooks.clear()
    for other in (copied, pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is upconv.ConvTranspose2d
        assert torch.equal(other(x), model(x))
        upconv.restore(other)
        assert type(other[0]) is nn.ConvTranspose2d


def test_a_compiled_model_sees_the_swap() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU())
    counter = torch._dynamo.testing.EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(1, 4, 5, 5)
    expected = compiled(x)
    assert names(upconv.accelerate(compiled).swapped) == ["_orig_mod.0"]
    torch.testing.assert_close(compiled(x), expected)
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in counter.graphs]
    assert "upconv.conv_transpose2d.default" not in targets[0]
    assert "upconv.conv_transpose2d.default" in targets[-1]
    upconv.restore(compiled)
    torch.testing.assert_close(compiled(x), expected)
