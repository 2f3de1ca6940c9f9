"""Random numbers that nobody reads are not drawn, as with torch's own compilers, and keep no graph away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import WIDTH, compiled, ops

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
UNREAD: dict[str, Callable[[Tensor], object]] = {
    "rand": lambda x: torch.rand([]),
    "randn": lambda x: torch.randn(x.shape[0]),
    "randint": lambda x: torch.randint(0, 5, (2,), device=x.device),
    "like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "permutation": lambda x: torch.randperm(3),
}


class Layers(nn.Module):
    """Skips layers in training, as encoders of speech in transformers do; `draw` says how they decide."""

    def __init__(self, draw: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            number = self.draw(x)
            if self.training and number < 0.1:
                continue
            x = ops.mix(layer(x))
        return x


@pytest.mark.parametrize("draw", UNREAD.values(), ids=UNREAD)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_calls_are_replayed(draw: Callable[[Tensor], object], compiler: str, device: torch.device) -> None:
    model = Layers(draw).to(device).eval()
    fast = compiled(model, compiler=compiler)
    with pg.counters.expect(replays=2, fallbacks=0):
        for count in (3, 5, 4, 3):  # two buckets are captured
            x = torch.randn(count, WIDTH, device=device)
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("reads", [False, True])
def test_numbers_are_those_of_torch_compile(reads: bool) -> None:
    def noisy(x: Tensor) -> Tensor:
        torch.rand(3)
        x = ops.mix(x)
        return x + torch.rand(WIDTH) if reads else x

    def result_and_state(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return run(torch.ones(3, WIDTH)), torch.get_rng_state()

    fast, plain = compiled(noisy, compiler="aot_eager"), torch.compile(noisy, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(result_and_state(fast), result_and_state(plain), rtol=0, atol=0)


def test_nothing_but_a_draw(device: torch.device) -> None:
    def idle(x: Tensor) -> Tensor:
        torch.rand(3)
        return x

    x = torch.ones(3, WIDTH, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(idle)(x), x)


def test_numbers_written_to_an_argument_are_drawn(device: torch.device) -> None:
    def drawn(x: Tensor) -> Tensor:
        noise = torch.zeros(WIDTH, device=x.device)
        torch.rand(WIDTH, device=x.device, out=noise)
        return ops.mix(x) + noise

    fast, x = compiled(drawn), torch.ones(3, WIDTH, device=device)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = drawn(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(fast(x), wanted)


@pytest.mark.parametrize("reader", [lambda x, n: x + n, lambda x, n: x.add_(n)], ids=["sum", "in place"])
def test_numbers_that_are_read_keep_the_reason(
    reader: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    fast = compiled(lambda x: reader(ops.mix(x * 2), torch.rand(WIDTH, device=x.device)))
    found = []
    with pg.counters.expect(replays=0, **{"fallbacks:random_numbers": 3}):
        for _ in range(3):
            found.append(fast(torch.ones(3, WIDTH, device=device)))
    assert not torch.equal(found[0], found[1])
