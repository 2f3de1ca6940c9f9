"""Which dimensions of a call's tensor arguments count tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.errors import ConfigError, TokenDimError

# Where transformers' models count tokens, from the last dimension. The first one present leads.
_LEADERS = {"input_ids": -1, "inputs_embeds": -2}
_FOLLOWERS = {"position_ids": -1, "token_type_ids": -1, "cache_position": -1, "attention_mask": -1}


class TokenDims:
    """Finds token dimensions by what the user said, by known names, or in a lone one-dimensional tensor.

    Args:
        model: read for its signature, so that positional arguments have names.
        token_dim: argument name -> dimension, from the user.
    """

    def __init__(self, model: Callable[..., Any], token_dim: Mapping[str, int] | None) -> None:
        self._given = dict(token_dim or {})
        try:
            self._signature = inspect.signature(
                model.forward if isinstance(model, torch.nn.Module) else model
            )
        except ValueError as error:  # a function of C
            raise TokenDimError.no_argument_names(repr(model)[:80]) from error

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The call's direct tensor arguments by parameter name."""
        found: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                found |= {f"{name}[{index}]": item for index, item in enumerate(value)}
            else:
                found[name] = value
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def find(self, tensors: Mapping[str, Tensor], requests: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Argument name -> its token dimensions, the leading argument first.

        Arguments that the user did not name follow the leader: by name where transformers has one, else
        in every dimension of the same size (of at least 2: every batch dimension has size 1).

        Args:
            requests: argument name -> the dimension that counts requests, as the user said. A call may have
                as many of them as tokens.

        Raises:
            TokenDimError: nothing tells the token dimension, or the user named what is not there.
        """
        dims: dict[str, tuple[int, ...]] = {
            n: (_checked(n, d, tensors, "token_dim"),) for n, d in self._given.items()
        }
        dims = dims or _leader(tensors)
        leader = next(iter(dims))
        count = tensors[leader].shape[dims[leader][0]]
        for name, tensor in tensors.items():
            if name == "position_ids" and count and tensor.shape[-1] != count:
                # transformers would index a mask with it: an illegal address on a GPU
                raise TokenDimError.positions(tensor.shape[-1], leader, count)
            if name not in dims:
                following = _following(name, tensor, count, requests.get(name))
                if following:
                    dims[name] = following
        return dims


class BatchDims:
    """Finds the dimensions that count requests.

    Args:
        batch_dim: argument name -> dimension, from the user.
    """

    def __init__(self, batch_dim: Mapping[str, int]) -> None:
        if not batch_dim:
            raise ConfigError.bad_value("batch_dim", batch_dim)
        self._given = dict(batch_dim)

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """What the user said, each dimension counted from the first.

        Raises:
            TokenDimError: the user named what is not there.
        """
        return {name: _checked(name, dim, tensors, "batch_dim") for name, dim in self._given.items()}

    def find(
        self, tensors: Mapping[str, Tensor], tokens: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Argument name -> its batch dimension, where it has more than one request.

        Args:
            tokens: the token dimensions of the same call.

        Raises:
            TokenDimError: the user named what is not there, or a dimension behind the tokens.
        """
        dims = self.named(tensors)
        for name, dim in dims.items():
            if any(dim >= other for other in tokens.get(name, ())):
                raise TokenDimError.batch_behind_tokens(name, dim, tokens[name])
        leader, at = next(iter(dims.items()))
        rows = tensors[leader].shape[at]
        following = {n: at for n, t in tensors.items() if t.ndim > at and t.shape[at] == rows}
        return {name: (dim,) for name, dim in (following | dims).items() if rows > 1}


def _checked(name: str, dim: int, tensors: Mapping[str, Tensor], option: str) -> int:
    if name not in tensors:
        raise TokenDimError.no_such_input(option, name, list(tensors))
    shape = tensors[name].shape
    if not -len(shape) <= dim < len(shape):
        raise TokenDimError.no_such_dim(option, name, dim, shape)
    return dim % len(shape)


def _leader(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    for name, dim in _LEADERS.items():
        if name in tensors and tensors[name].ndim >= -dim:
            return {name: (tensors[name].ndim + dim,)}
    if len(tensors) == 1:
        (name, tensor) = next(iter(tensors.items()))
        if tensor.ndim == 1:
            return {name: (0,)}
    raise TokenDimError.ambiguous({name: tensor.shape for name, tensor in tensors.items()})


def _following(name: str, tensor: Tensor, count: int, requests: int | None) -> tuple[int, ...]:
    known = _FOLLOWERS.get(name, _LEADERS.get(name))
    if known is not None and tensor.ndim <= 3:
        dim = tensor.ndim + known
        return (dim,) if dim >= 0 and tensor.shape[dim] == count else ()
    equal = (dim for dim, size in enumerate(tensor.shape) if size == count and count > 1)
    return tuple(dim for dim in equal if dim != requests)
