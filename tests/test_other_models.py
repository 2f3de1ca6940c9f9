"""Models that read no tokens: batches of images and of sounds are padded, with the results of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
COUNTS = 3, 1, 4, 2, 4, 3, 2
_ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_IMAGES = {"image_size": 16, "patch_size": 4}


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def small_images(count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16)


def sounds(count: int) -> Tensor:
    return torch.randn(count, 400)


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**_ENCODER, **_IMAGES))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetForImageClassification(config)


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    config = transformers.Wav2Vec2Config(**_ENCODER, **convolutions, num_conv_pos_embedding_groups=4)
    return transformers.Wav2Vec2Model(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "vit": (vit, small_images),
    "resnet": (resnet, images),
    "wav2vec2": (wav2vec2, sounds),
}


def rows(output: Any) -> Tensor:
    found = output[0]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_batches_are_padded_and_replayed(name: str, device: torch.device) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().eval().to(device)
    options = {"compiler": "eager", "capture_sizes": [2, 4], "max_tokens": 4}
    fast = torch.compile(model, backend="piecewise", options=options)
    for count in COUNTS:  # one request has a trace of its own
        fast(inputs(count).to(device))
    with pg.counters.expect(replays=len(COUNTS), fallbacks=0, unpadded_segments=0):
        for count in COUNTS:
            given = inputs(count).to(device)
            torch.testing.assert_close(rows(fast(given)), rows(model(given)), rtol=1e-4, atol=1e-4)
