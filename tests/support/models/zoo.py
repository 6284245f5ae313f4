"""Modules of every kind that a split backward must get right, by name: `CASES`.

Each takes one value, a tensor or a tuple of tensors, as layers of a pipeline do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def features(i: int) -> tuple[Tensor, ...]:
    """(3, 4, 6), another for each micro-batch."""
    return (normal(i, 3, 4, 6),)


def tokens(i: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(i)),)


def two(i: int) -> tuple[Tensor, ...]:
    return normal(i, 3, 4, 6), normal(i + 50, 3, 4, 6)


def image(i: int) -> tuple[Tensor, ...]:
    return (normal(i, 2, 4, 6, 6),)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A module, its inputs, and the parameters whose gradients must wait for W.

    Others may wait too; hooks append what they see to the module's ``seen``.
    """

    build: Callable[[], nn.Module]
    waits: str
    inputs: Callable[[int], tuple[Tensor, ...]] = features
    autocast: bool = False


def outputs_in(result: Any) -> tuple[Tensor, ...]:
    """The tensors that a module returns."""
    return result if isinstance(result, tuple) else (result,)


class Fn(nn.Module):
    """A function of (module, value), with parameters of the given shapes."""

    def __init__(self, function: Callable[[Any, Any], Any], **shapes: Any) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            if isinstance(shape, nn.Module):
                setattr(self, name, shape)
            else:
                setattr(self, name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, value: Any) -> Any:
        return checkpoint(self.inner, value, use_reentrant=self.reentrant)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[2].weight = module[0].weight
    return module


def rows_of_experts(i: int) -> tuple[Tensor, ...]:
    return (normal(i, 16, 8),)


class Seen(list[Any]):
    """What hooks see: names with the sums of gradients."""

    def note(self, name: str, *gradients: Tensor | None) -> None:
        self.append((name, [None if g is None else float(g.sum()) for g in gradients]))


def hooked(build: Callable[[], Any], hook: Callable[[Any, Seen], None]) -> Any:
    """A builder of modules on which a function has put hooks."""

    def made() -> nn.Module:
        module = build()
        module.seen = Seen()
        hook(module, module.seen)
        return module  # type: ignore[no-any-return]

    return made


def on_all_parameters(m: Any, seen: Seen) -> None:
    for name, p in m.named_parameters():
        p.register_hook(lambda g, name=name: seen.note(name, g))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.note(f"sum of {name}", p.grad)
        )


def on_modules(m: Any, seen: Seen) -> None:
    m[0].register_full_backward_hook(lambda m, dx, dy: seen.note("0", *dx, *dy))
    m[3].register_full_backward_pre_hook(lambda m, dy: tuple(d * 2 for d in dy))


def that_change(name: str) -> Callable[[Any, Seen], None]:
    """Multiply a parameter's gradient in one hook, add to its sum in another."""

    def hook(m: Any, seen: Seen) -> None:
        p = m.get_parameter(name)
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p: (p.grad.add_(1), None)[1])

    return hook


def hidden_hooks(m: Any, x: Tensor) -> Tensor:
    hidden = m.a(x)
    hidden.register_hook(lambda g: (m.seen.note("hidden", g), g * 2)[1])
    y = m.b(hidden.tanh())
    y.register_hook(lambda g: g * 5)
    return y


def hooks_of_the_forward(m: Any, x: Tensor) -> Tensor:
    """Hooks that the first forward puts on parameters."""
    y = m.a(x)
    if not m.a.weight._backward_hooks:
        on_all_parameters(m.a, m.seen)
    return y


def saved_hooks(m: Any, x: Tensor) -> Tensor:
    """Each saved tensor is unpacked once."""

    def unpack(x: Tensor) -> Tensor:
        m.seen.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        return m.a(x)


def wide_sums() -> nn.Module:
    """Gradients in 16 bits, added up in 32."""
    module = Fn(lambda m, x: m.inner(x.bfloat16()), inner=mlp().bfloat16())
    for p in module.parameters():
        p.grad_dtype = torch.float32
    return module


def unlike() -> nn.Module:
    """A parameter of a class that nobody knows."""

    class Other(nn.Parameter):
        pass

    module = lin()
    module.weight = Other(module.weight.detach())
    return nn.Sequential(module, lin())


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.norm(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + m.out(y.transpose(1, 2).flatten(2))


def block() -> nn.Module:
    return Fn(attention, qkv=nn.Linear(6, 12), out=nn.Linear(4, 6, bias=False),
              norm=nn.LayerNorm(6))  # fmt: skip


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.relu_()
    y = y + 1
    y[:, 0] = 0
    return m.b(y).add_(1)


def lora(m: Any, x: Tensor) -> Tensor:
    return f.linear(x, m.base.weight) + (x @ m.down) @ m.up


def offloaded(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.inner(x)


def selective(m: Any, x: Tensor) -> Tensor:
    """Recomputes all but the matrix products."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(kept)

    return checkpoint(m.inner, x, use_reentrant=False, context_fn=contexts)


def lin(n: int = 6, k: int = 6, **more: Any) -> nn.Linear:
    return nn.Linear(n, k, **more)


def conv(**more: Any) -> nn.Module:
    return nn.Conv2d(4, 4, 3, **more)


def grouped(function: Callable[[Any, Tensor], Tensor], *shape: int) -> Case:
    """Rows of four experts, of which one has none."""
    return Case(lambda: Fn(function, w=shape), "w", rows_of_experts)


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.a(function(m.a(x)))


IDS = torch.tensor([2, 0, 2])
ENDS = torch.tensor([3, 3, 7, 16], dtype=torch.int32)


def selected(m: Any, x: Tensor) -> Tensor:
    """Experts in one weight each for up and down; each row goes to the best one."""
    rows = x.flatten(0, 1)
    scores = (rows @ m.router).softmax(-1)
    best = scores.argmax(-1)
    out = torch.zeros_like(rows)
    for i in best.unique():
        chosen = (best == i).nonzero().flatten()
        hidden = f.linear(rows[chosen], m.up[i]).relu()
        part = f.linear(hidden, m.down[i]) * scores[chosen, i, None]
        out = out.index_add(0, chosen, part.to(out.dtype))
    return out.view_as(x)


def experts() -> nn.Module:
    return Fn(selected, router=(6, 4), up=(4, 8, 6), down=(4, 6, 8))


def over(parts: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """The sum of a value's products with parts of a weight."""
    return lambda: Fn(
        lambda m, x: sum((x @ w).relu().sum(-1) for w in parts(m.w)), w=(6, 9)
    )


def stacked(parts: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Fn(lambda m, x: sum((x @ w).relu() for w in parts(m.w)), w=(3, 6, 5))


MLP = "0.weight 3.weight"
CASES: dict[str, Case] = {
    "linear": Case(lin, "weight"),
    "linear, no bias": Case(lambda: lin(bias=False), "weight"),
    "linear, two axes": Case(lin, "weight", lambda i: (normal(i, 5, 6),)),
    "linear, one axis": Case(lin, "weight", lambda i: (normal(i, 6),)),
    "mlp": Case(mlp, MLP),
    "transposed input": Case(
        lambda: Fn(lambda m, x: m.a(x.transpose(1, 2)), a=lin(4, 5)), "a.weight"),
    "broadcast input": Case(
        lambda: Fn(lambda m, x: m.a(x[:1].expand(3, 4, 6)), a=lin()), "a.weight"),
    # convolutions
    "conv2d": Case(conv, "weight bias", image),
    "conv2d, no bias": Case(lambda: conv(bias=False), "weight", image),
    "conv2d, stride, padding, groups": Case(
        lambda: conv(stride=2, padding=1, groups=2, dilation=1), "weight bias", image),
    "conv transposed": Case(
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), "weight bias", image),
    "conv2d, frozen bias": Case(lambda: frozen(conv(), "bias"), "weight", image),
    "conv2d, frozen weight": Case(lambda: frozen(conv(), "weight"), "", image),
    "conv net": Case(lambda: nn.Sequential(
        conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 3)), "0.weight 0.bias 5.weight", image),
    # no products
    "embedding, sparse": Case(lambda: nn.Embedding(7, 6, sparse=True), "", tokens),
    "embedding, sparse, tied to its head": Case(
        lambda: Fn(lambda m, x: f.linear(m.e(x), m.e.weight),
                   e=nn.Embedding(7, 6, sparse=True)), "", tokens),
    "embedding and head": Case(
        lambda: nn.Sequential(nn.Embedding(7, 6), lin()), "1.weight", tokens),
    "embedding tied to its head": Case(
        lambda: Fn(lambda m, x: f.linear(m.e(x), m.e.weight), e=nn.Embedding(7, 6)),
        "", tokens),
    "rms norm": Case(lambda: nn.Sequential(nn.RMSNorm(6), lin()), "1.weight"),
    "scale and shift": Case(lambda: Fn(lambda m, x: x * m.a + m.b, a=(6,), b=()), ""),
    # parameters used by functions
    "matmul": Case(lambda: Fn(lambda m, x: x @ m.w, w=(6, 5)), "w"),
    "matmul from the left": Case(lambda: Fn(lambda m, x: m.w @ x, w=(5, 4)), "w"),
    "mm from the left": Case(
        lambda: Fn(lambda m, x: torch.mm(m.w, x.flatten(1)), w=(5, 3)), "w"),
    "matrix times vector": Case(lambda: Fn(lambda m, x: x @ m.w, w=(6,)), ""),
    "einsum": Case(
        lambda: Fn(lambda m, x: torch.einsum("bsi,ij->bsj", x, m.w), w=(6, 5)), "w"),
    "einsum over heads": Case(
        lambda: Fn(lambda m, x: torch.einsum("bsi,hij->bhsj", x, m.w), w=(2, 6, 5)),
        "w"),
    "bmm": Case(lambda: Fn(lambda m, x: torch.bmm(x, m.w), w=(3, 6, 5)), "w"),
    "bmm from the left": Case(
        lambda: Fn(lambda m, x: torch.bmm(m.w, x), w=(3, 2, 4)), "w"),
    "addmm": Case(lambda: Fn(
        lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w, beta=0.3, alpha=0.7),
        w=(6, 5), b=(5,)), "w"),
    "addmm of complex numbers": Case(lambda: Fn(
        lambda m, x: torch.addmm(
            m.b.cfloat(), x.flatten(0, 1) * (1 - 2j), m.w.cfloat(),
            beta=0.5 + 1j, alpha=0.3 - 0.7j).real, w=(6, 5), b=(5,)), "w"),
    "baddbmm": Case(lambda: Fn(
        lambda m, x: torch.baddbmm(m.b, x, m.w, beta=0.3, alpha=0.7),
        w=(3, 6, 5), b=(3, 4, 5)), "w"),
    "bilinear": Case(
        lambda: Fn(lambda m, x: m.a(x[0], x[1]), a=nn.Bilinear(6, 6, 2)), "", two),
    "a weight in three parts": Case(
        lambda: Fn(lambda m, x: sum(x @ w for w in m.w.chunk(3, 1)), w=(6, 15)), "w"),
    "experts selected": Case(experts, "router up down"),
    "experts selected, hooks": Case(
        hooked(experts, that_change("up")), "router up down"),
    "experts unbound": Case(stacked(lambda w: w.unbind()), "w"),
    "experts unbound, one not used": Case(stacked(lambda w: w.unbind()[1:]), "w"),
    "experts looked up": Case(lambda: Fn(
        lambda m, x: torch.bmm(x, m.w[IDS]), w=(3, 6, 5)), "w"),
    "experts looked up by index_select": Case(lambda: Fn(
        lambda m, x: torch.bmm(x, m.w.index_select(0, IDS)), w=(3, 6, 5)), "w"),
    "experts grouped": grouped(
        lambda m, x: f.grouped_mm(x, m.w, offs=ENDS), 4, 8, 16),
    "experts grouped, transposed": grouped(
        lambda m, x: f.grouped_mm(x, m.w.mT, offs=ENDS), 4, 16, 8),
    "experts grouped, from the left": grouped(
        lambda m, x: f.grouped_mm(m.w, x.t(), offs=ENDS), 4, 16, 8),
    "experts grouped, from the left, transposed": grouped(
        lambda m, x: f.grouped_mm(m.w.mT, x.t(), offs=ENDS), 4, 8, 16),
    "experts grouped, as batches": grouped(
        lambda m, x: f.grouped_mm(x.view(4, 4, 8), m.w), 4, 8, 16),
    "experts by einsum": Case(lambda: Fn(
        lambda m, x: torch.einsum("ecd,efd->ecf", x, m.w), w=(3, 5, 6)), "w"),
    "parts of other sizes": Case(over(lambda w: w.split([2, 3, 4], 1)), "w"),
    "parts of parts": Case(stacked(
        lambda w: (w[0][:, :2], w[0][:, 2:4], w[-1][:, -2:])), "w"),
    "parts of a transposed weight": Case(
        lambda: Fn(lambda m, x: sum((x @ w).sum(-1) for w in m.w.t().split(2, 1)),
                   w=(5, 6)), "w"),
    "parts that are linear": Case(lambda: Fn(
        lambda m, x: sum(f.linear(x, w, m.b) for w in m.w.chunk(2)),
        w=(10, 6), b=(5,)), "w"),
    "parts that overlap": Case(over(lambda w: (w[:, :5], w[:, 4:], w[:, 2:7])), "w"),
    "a part used thrice": Case(stacked(lambda w: (w[1], w[1], w[1])), "w"),
    "one chunk used twice": Case(
        over(lambda w: [*(chunks := w.chunk(3, 1)), chunks[0]]), "w"),
    # the order of additions would be another: in B
    "a part and the whole": Case(over(lambda w: (w, w[:, :3])), ""),
    "a transpose and a part of it": Case(lambda: Fn(
        lambda m, x: (x @ (t := m.w.t())).tanh() @ t[:5] + x @ t, w=(5, 6)), ""),
    "a part and its norm": Case(lambda: Fn(
        lambda m, x: x @ m.w[0] + m.w[1].sum(), w=(2, 6, 6)), ""),
    "weight norm": Case(lambda: parametrizations.weight_norm(lin()), ""),
    "a weight on both sides": Case(lambda: Fn(lambda m, x: x @ (m.a @ m.b),
                                              a=(6, 2), b=(2, 5)), "b"),
    # shared, frozen, unused
    "tied weights": Case(tied, "0.weight"),
    "one linear used twice": Case(lambda: Fn(twice(torch.relu), a=lin()), "a.weight"),
    "a product and a penalty": Case(
        lambda: Fn(lambda m, x: (m.a(x), m.a.weight.square().sum()), a=lin()), ""),
    "one bias in two convolutions": Case(lambda: Fn(
        lambda m, x: f.conv2d(x, m.v, m.b) + f.conv2d(x, m.w, m.b),
        v=(2, 4, 3, 3), w=(2, 4, 3, 3), b=(2,)), "v w b", image),
    "frozen weight": Case(lambda: frozen(mlp(), "0.weight"), "3.weight"),
    "frozen bias": Case(lambda: frozen(mlp(), "0.bias"), MLP),
    "wholly frozen": Case(lambda: frozen(mlp()), ""),
    "lora": Case(lambda: frozen(Fn(lora, base=lin(), down=(6, 2), up=(2, 6)),
                                "base.weight"), "down up"),
    # inputs and outputs
    "two outputs": Case(lambda: Fn(lambda m, x: (m.a(x), m.b(x).relu()),
                                   a=lin(), b=lin()), "a.weight b.weight"),
    "an output that needs no gradient": Case(
        lambda: Fn(lambda m, x: (m.a(x), x.detach() + 1), a=lin()), "a.weight"),
    "the input handed on": Case(
        lambda: Fn(lambda m, x: (x, m.a(x)), a=lin()), "a.weight"),
    "the same output twice": Case(
        lambda: Fn(lambda m, x: (y := m.a(x), y), a=lin()), "a.weight"),
    "an output that is a view": Case(
        lambda: Fn(lambda m, x: m.a(x).transpose(0, 1)[1:], a=lin()), "a.weight"),
    "an input that is not used": Case(
        lambda: Fn(lambda m, x: m.a(x[0]), a=lin()), "a.weight", two),
    # autograd's corners
    "custom function": Case(lambda: Fn(lambda m, x: m.b(Square.apply(m.a(x))),
                                       a=lin(), b=lin()), "a.weight b.weight"),
    "in place": Case(lambda: Fn(in_place, a=lin(), b=lin()), "a.weight b.weight"),
    "sums that are one tensor": Case(
        lambda: Fn(lambda m, x: m.c(x) + m.a + m.b, a=(3, 4, 6), b=(3, 4, 6), c=lin()),
        "c.weight"),
    "a parameter of another class": Case(unlike, "1.weight"),
    "attention": Case(block, "qkv.weight out.weight"),
    "encoder layer": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True),
        "self_attn.in_proj_weight self_attn.out_proj.weight "
        "linear1.weight linear2.weight"),
    "recurrent": Case(lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(6, 4)),
                      "a.weight_ih_l0 a.weight_hh_l0"),
    "one of two layers": Case(lambda: Fn(
        lambda m, x: (m.a if float(x.detach().sum()) > 0 else m.b)(x),
        a=lin(), b=lin()), "a.weight"),
    # hooks
    "hooks of parameters": Case(hooked(mlp, on_all_parameters), MLP),
    "hooks of parameters, recomputed": Case(hooked(
        lambda: Checkpointed(mlp()), on_all_parameters),
        "inner.0.weight inner.3.weight"),
    "hooks of a convolution": Case(
        hooked(conv, on_all_parameters), "weight bias", image),
    "hooks that change a gradient": Case(hooked(mlp, that_change("0.weight")), MLP),
    "hooks of modules": Case(hooked(mlp, on_modules), MLP),
    "hooks of what is hidden": Case(hooked(
        lambda: Fn(hidden_hooks, a=lin(), b=lin()), lambda *_: None),
        "a.weight b.weight"),
    "hooks of products": Case(hooked(  # on their nodes, with no view in between
        lambda: Fn(hidden_hooks, a=lin(), b=lin()), lambda *_: None),
        "a.weight b.weight", lambda i: (normal(i, 5, 6),)),
    "hooks of the first forward": Case(hooked(
        lambda: Fn(hooks_of_the_forward, a=lin()), lambda *_: None), "a.weight"),
    "hooks of saved tensors": Case(hooked(
        lambda: Fn(saved_hooks, a=lin()), lambda *_: None), ""),
    "offloaded": Case(lambda: Fn(offloaded, inner=mlp()), ""),
    # checkpoints
    "checkpoint": Case(lambda: Checkpointed(mlp()), "inner.0.weight inner.3.weight"),
    "checkpoint, reentrant": Case(lambda: Checkpointed(mlp(), reentrant=True), ""),
    "checkpointed attention": Case(
        lambda: Checkpointed(block()), "inner.qkv.weight inner.out.weight"),
    "checkpoint in a checkpoint": Case(
        lambda: Checkpointed(nn.Sequential(lin(), Checkpointed(mlp()), lin())),
        "inner.0.weight inner.1.inner.0.weight inner.1.inner.3.weight inner.2.weight"),
    "selective checkpoint": Case(
        lambda: Fn(selective, inner=mlp()), "inner.0.weight inner.3.weight"),
    # lower precision
    "bf16 with sums in fp32": Case(wide_sums, "inner.0.weight inner.3.weight"),
    "autocast": Case(mlp, MLP, autocast=True),
    "autocast, used twice": Case(
        lambda: Fn(twice(torch.relu), a=lin()), "a.weight", autocast=True),
    "autocast attention": Case(block, "qkv.weight out.weight", autocast=True),
    "autocast in a checkpoint": Case(
        lambda: Checkpointed(mlp()), "inner.0.weight inner.3.weight", autocast=True),
}  # fmt: skip
