"""One process that compiles a block; the next one finds what was compiled.

    python warm_start.py plain     by torch.compile alone, then by zbpp
    python warm_start.py           by zbpp

Prints how many leaves wait for W, and what Inductor's cache was asked for.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime import SplitGraph


class Block(nn.Module):
    """Two products, and nothing that a kernel would have to be built for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def main() -> None:
    module = Block()
    if "plain" in sys.argv:
        x = torch.randn(4, 6, requires_grad=True)
        torch.compile(module)(x).sum().backward()
        torch._dynamo.reset()
    call: Any = torch.compile(module, backend="zbpp")
    x = torch.randn(4, 6, requires_grad=True)
    y = call(x)
    graph = SplitGraph([y], [x])
    waits = list(graph.report().values()).count("W")
    graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    found = torch._dynamo.utils.counters["inductor"]
    print(
        json.dumps(
            {
                "waits": waits,
                "hits": found["fxgraph_cache_hit"],
                "misses": found["fxgraph_cache_miss"],
            }
        )
    )


if __name__ == "__main__":
    main()
