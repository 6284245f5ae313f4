"""One module of each kind that a split backward must get right, by name."""

import torch
from moe_cases import PARTS
from torch import nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations
from zoo import (
    Case,
    Checkpointed,
    Fn,
    Square,
    block,
    branching,
    conv,
    frozen,
    hooked,
    image,
    in_place,
    lin,
    lora,
    mlp,
    normal,
    offloaded,
    partly_without,
    routed,
    selective,
    tied,
    tokens,
    twice,
    two,
)

MLP = "0.weight 3.weight"
CASES: dict[str, Case] = {
    "linear": Case(lin, "weight"),
    "linear, no bias": Case(lambda: lin(bias=False), "weight"),
    "linear, two axes": Case(lin, "weight", lambda i: (normal(i, 5, 6),)),
    "linear, four axes": Case(lin, "weight", image),
    "linear, one axis": Case(lin, "weight", lambda i: (normal(i, 6),)),
    "mlp": Case(mlp, MLP),
    "deep mlp": Case(lambda: nn.Sequential(*(mlp() for _ in range(3))),
                     " ".join(f"{i}.{j}.weight" for i in range(3) for j in (0, 3))),
    "transposed input": Case(
        lambda: Fn(lambda m, x: m.a(x.transpose(1, 2)), a=lin(4, 5)), "a.weight"),
    "broadcast input": Case(
        lambda: Fn(lambda m, x: m.a(x[:1].expand(3, 4, 6)), a=lin()), "a.weight"),
    # convolutions
    "conv1d": Case(lambda: nn.Conv1d(4, 5, 2), "weight bias"),
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
    "embedding": Case(lambda: nn.Embedding(7, 6), "", tokens),
    "embedding and head": Case(
        lambda: nn.Sequential(nn.Embedding(7, 6), lin()), "1.weight", tokens),
    "embedding tied to its head": Case(
        lambda: Fn(lambda m, x: f.linear(m.e(x), m.e.weight), e=nn.Embedding(7, 6)),
        "", tokens),
    "layer norm": Case(lambda: nn.LayerNorm(6), ""),
    "rms norm": Case(lambda: nn.Sequential(nn.RMSNorm(6), lin()), "1.weight"),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), "", image),
    "scale and shift": Case(lambda: Fn(lambda m, x: x * m.a + m.b, a=(6,), b=()), ""),
    # parameters used by functions
    "matmul": Case(lambda: Fn(lambda m, x: x @ m.w, w=(6, 5)), "w"),
    "matmul, transposed": Case(lambda: Fn(lambda m, x: x @ m.w.t(), w=(5, 6)), "w"),
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
    "baddbmm": Case(lambda: Fn(
        lambda m, x: torch.baddbmm(m.b, x, m.w, beta=0.3, alpha=0.7),
        w=(3, 6, 5), b=(3, 4, 5)), "w"),
    "bilinear": Case(
        lambda: Fn(lambda m, x: m.a(x[0], x[1]), a=nn.Bilinear(6, 6, 2)), "", two),
    "part of a weight": Case(lambda: Fn(lambda m, x: x @ m.w[:, :3], w=(6, 5)), "w"),
    "a weight in three parts": Case(
        lambda: Fn(lambda m, x: sum(x @ w for w in m.w.chunk(3, 1)), w=(6, 15)), "w"),
    **PARTS,
    "computed weight": Case(
        lambda: Fn(lambda m, x: x @ (m.w * m.s), w=(6, 5), s=()), ""),
    "weight norm": Case(lambda: parametrizations.weight_norm(lin()), ""),
    "a weight on both sides": Case(lambda: Fn(lambda m, x: x @ (m.a @ m.b),
                                              a=(6, 2), b=(2, 5)), "b"),
    # shared, frozen, unused
    "tied weights": Case(tied, ""),
    "one linear used twice": Case(lambda: Fn(twice(torch.relu), a=lin()), ""),
    "one linear used twice at once": Case(
        lambda: Fn(lambda m, x: m.a(x) * m.a(x + 1), a=lin()), ""),
    "a product and a penalty": Case(
        lambda: Fn(lambda m, x: (m.a(x), m.a.weight.square().sum()), a=lin()), ""),
    "one bias in two convolutions": Case(lambda: Fn(
        lambda m, x: f.conv2d(x, m.v, m.b) + f.conv2d(x, m.w, m.b),
        v=(2, 4, 3, 3), w=(2, 4, 3, 3), b=(2,)), "", image),
    "frozen weight": Case(lambda: frozen(mlp(), "0.weight"), "3.weight"),
    "frozen bias": Case(lambda: frozen(mlp(), "0.bias"), MLP),
    "wholly frozen": Case(lambda: frozen(mlp()), ""),
    "lora": Case(lambda: frozen(Fn(lora, base=lin(), down=(6, 2), up=(2, 6)),
                                "base.weight"), "down up"),
    "unused parameter": Case(
        lambda: Fn(lambda m, x: m.a(x), a=lin(), b=lin()), "a.weight"),
    # inputs and outputs
    "two inputs": Case(lambda: Fn(lambda m, x: m.a(x[0]) + m.b(x[1]),
                                  a=lin(), b=lin()), "a.weight b.weight", two),
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
    "partly without gradients": Case(
        lambda: Fn(partly_without, a=lin(), b=lin()), "a.weight"),
    "dropout": Case(lambda: nn.Sequential(lin(), nn.Dropout(0.4), lin()),
                    "0.weight 2.weight"),
    "attention": Case(block, "qkv.weight out.weight"),
    "multi-head attention": Case(
        lambda: Fn(lambda m, x: m.a(x, x, x)[0],
                   a=nn.MultiheadAttention(6, 2, batch_first=True)),
        "a.in_proj_weight a.out_proj.weight"),
    "encoder layer": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True),
        "self_attn.in_proj_weight self_attn.out_proj.weight "
        "linear1.weight linear2.weight"),
    "recurrent": Case(lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(6, 4)),
                      "a.weight_ih_l0"),
    "experts": Case(
        lambda: Fn(routed, router=lin(6, 3), experts=nn.ModuleList(
            nn.Sequential(lin(), nn.ReLU(), lin()) for _ in range(3))), "router.weight"
        + "".join(f" experts.{i}.{j}.weight" for i in range(3) for j in (0, 2))),
    "control flow": Case(lambda: Fn(branching, a=lin(), b=lin()), "a.weight b.weight"),
    "tensor hook": Case(lambda: hooked(post=False), MLP),
    "post-accumulate hook": Case(lambda: hooked(post=True), MLP),
    "offloaded": Case(lambda: Fn(offloaded, inner=mlp()), ""),
    # checkpoints
    "checkpoint": Case(lambda: Checkpointed(mlp()), "inner.0.weight inner.3.weight"),
    "checkpoint, reentrant": Case(lambda: Checkpointed(mlp(), reentrant=True), ""),
    "checkpointed attention": Case(
        lambda: Checkpointed(block()), "inner.qkv.weight inner.out.weight"),
    "checkpointed dropout": Case(
        lambda: Checkpointed(nn.Sequential(lin(), nn.Dropout(0.4), lin())),
        "inner.0.weight inner.2.weight"),
    "checkpointed convolution": Case(
        lambda: Checkpointed(conv()), "inner.weight inner.bias", image),
    "checkpointed einsum": Case(lambda: Checkpointed(Fn(
        lambda m, x: torch.einsum("bsi,ij->bsj", x, m.w).relu(), w=(6, 6))), "inner.w"),
    "checkpoint in a checkpoint": Case(
        lambda: Checkpointed(nn.Sequential(lin(), Checkpointed(mlp()), lin())),
        "inner.0.weight inner.1.inner.0.weight inner.1.inner.3.weight inner.2.weight"),
    "two checkpoints and a linear": Case(
        lambda: nn.Sequential(Checkpointed(mlp()), lin(), Checkpointed(mlp())),
        "0.inner.0.weight 0.inner.3.weight 1.weight 2.inner.0.weight 2.inner.3.weight"),
    "selective checkpoint": Case(
        lambda: Fn(selective, inner=mlp()), "inner.0.weight inner.3.weight"),
    "checkpointed tied weights": Case(lambda: Checkpointed(tied()), ""),
    # lower precision
    "autocast": Case(mlp, MLP, autocast=True),
    "autocast, used twice": Case(
        lambda: Fn(twice(torch.relu), a=lin()), "", autocast=True),
    "autocast attention": Case(block, "qkv.weight out.weight", autocast=True),
    "autocast in a checkpoint": Case(
        lambda: Checkpointed(mlp()), "inner.0.weight inner.3.weight", autocast=True),
    "autocast convolution": Case(conv, "weight bias", image, autocast=True),
}  # fmt: skip
