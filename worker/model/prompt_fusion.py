"""Combinations of the federation's prompts, or of their text features, with a site's own."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from tessera.shared.model.spec import Fusion, Transport
from tessera.worker.errors import ConfigError

TINY = 1e-12
"""Keeps the gradient of a norm finite at zero, where the attention's output starts."""


class BoundedFusion(nn.Module):
    """Sum of the querying prompts a and a bounded function A of them and of the answering prompts b.

        X = f(N(a), N(b))
        Y = (X - m) + m |X - m| / sqrt(|X - m|^2 + |m|^2)
        A = Y |a| / sqrt(|a|^2 + |Y|^2)

    N is layer normalisation without gain or bias, m the mean of X over the querying tokens, repeated for each, and
    |.| the l2 norm over all tokens. So f does not depend on the prompts' size, A is smaller than a, and the part of A
    common to all tokens is smaller than the part that differs by token.
    """

    def __init__(self, fusion: Fusion) -> None:
        super().__init__()
        self.local_queries = fusion.asks == "local"

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        queries, answers = (local, shared) if self.local_queries else (shared, local)  # [tokens, width] each
        return queries + self._added(queries, answers).to(queries.dtype)

    def _added(self, queries: Tensor, answers: Tensor) -> Tensor:
        """Return A, [querying tokens, width]."""
        found = self._joined(_normalised(queries), _normalised(answers)).float()
        common = found.mean(dim=0, keepdim=True).expand_as(found)
        by_token = found - common
        return _shortened(by_token + _shortened(common, by_token), queries.float())

    @abstractmethod
    def _joined(self, querying: Tensor, answers: Tensor) -> Tensor:
        """Return X, [querying tokens, width]."""


class AttentionFusion(BoundedFusion):
    """Bounded multi-head cross-attention from the querying prompts a to the answering prompts b.

        f(a, b) = softmax(a Q (b K)^T / sqrt(d)) b V O

    d is the width of a head. O starts at zero, so that the sum starts bit-identical to a. As `random-attention` all
    four matrices are random, the same at all sites, and never train.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def __init__(self, fusion: Fusion, width: int) -> None:
        super().__init__(fusion)
        if width % fusion.heads:
            raise ConfigError(
                f"prompts of width {width} do not divide among {fusion.heads} heads: choose a number of heads that "
                f"divides {width}"
            )
        self.heads = fusion.heads
        trains = fusion.kind != "random-attention"
        dice = None if trains else torch.Generator().manual_seed(0)
        # Each maps inputs [tokens, width] by x W^T, as the weight of a linear layer does.
        for name in ("query", "key", "value", "output"):
            start = torch.zeros(width, width)
            if name != "output" or fusion.kind != "attention":
                nn.init.xavier_uniform_(start, generator=dice)
            if trains:
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.register_buffer(name, start, persistent=False)

    def _joined(self, querying: Tensor, answers: Tensor) -> Tensor:
        # [heads, tokens, width of a head] each
        queries, keys, values = (
            (inputs.to(weight.dtype) @ weight.T).view(len(inputs), self.heads, -1).transpose(0, 1)
            for inputs, weight in ((querying, self.query), (answers, self.key), (answers, self.value))
        )
        weights = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).softmax(dim=-1)
        joined: Tensor = (weights.to(values.dtype) @ values).transpose(0, 1).flatten(1)
        return joined @ self.output.T


class PlainFusion(AttentionFusion):
    """Cross-attention as pFedDC's paper has it: A = f(a, b), without normalisation and without bounds. All four
    matrices are random at first."""

    def _added(self, queries: Tensor, answers: Tensor) -> Tensor:
        return self._joined(queries, answers)


class MLPFusion(BoundedFusion):
    """A hidden layer that joins each querying token with the answering token at its place: a control for attention.

        f(a, b) = gelu([a b] H) O

    H is [2 width, h] and O [h, width]; with h = 4/3 width they have as many values as attention's four matrices. O
    starts at zero, as in attention.
    """

    def __init__(self, fusion: Fusion, width: int) -> None:
        super().__init__(fusion)
        hidden = 4 * width // 3
        self.hidden = nn.Parameter(nn.init.xavier_uniform_(torch.empty(hidden, 2 * width)))
        self.output = nn.Parameter(torch.zeros(width, hidden))

    def _joined(self, querying: Tensor, answers: Tensor) -> Tensor:
        both = torch.cat([querying, answers], dim=1).to(self.hidden.dtype)  # [tokens, 2 width]
        joined: Tensor = gelu(both @ self.hidden.T) @ self.output.T
        return joined


def _normalised(tokens: Tensor) -> Tensor:
    # Prompts are small: their variance is about 0.0004, so torch's default epsilon would not be negligible.
    return layer_norm(tokens.float(), tokens.shape[-1:], eps=TINY)


def _shortened(values: Tensor, reference: Tensor) -> Tensor:
    """Return the values scaled to a norm below that of `reference`; hardly changed where theirs is much smaller."""
    most = reference.square().sum() + TINY
    return values * (most / (most + values.square().sum())).sqrt()


class MeanFusion(nn.Module):
    """Mean of both prompts."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return (shared + local) / 2


class ConcatFusion(nn.Module):
    """Concatenation of both prompts, which doubles the number of tokens."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return torch.cat([shared, local])


class LowRankTerm(nn.Module):
    """A site's own term of prompts, P + U V with U [tokens, rank] and V [rank, width]. V starts at zero, so that the
    sum starts bit-identical to P."""

    def __init__(self, prompts: Tensor, rank: int, std: float) -> None:
        super().__init__()
        tokens, width = prompts.shape
        # Drawn on the CPU, so that a GPU starts from the same values.
        drawn = torch.empty(tokens, rank, dtype=prompts.dtype).normal_(std=std)
        self.u = nn.Parameter(drawn.to(prompts.device))
        self.v = nn.Parameter(prompts.new_zeros(rank, width))

    def forward(self, prompts: Tensor) -> Tensor:
        return prompts + self.u @ self.v


def fusion_module(fusion: Fusion, width: int) -> nn.Module:
    """Return the module that fuses shared and local prompts, [tokens, width] each.

    Raises ConfigError if the width does not divide among the heads.
    """
    if fusion.attends:
        return (PlainFusion if fusion.kind == "plain" else AttentionFusion)(fusion, width)
    if fusion.kind == "mlp":
        return MLPFusion(fusion, width)
    return MeanFusion() if fusion.kind == "mean" else ConcatFusion()


def transport_plan(costs: Tensor, transport: Transport) -> Tensor:
    """Return the plan of the least cost and entropy, [..., patches, prompts], as the costs.

    With V patches and N prompts each column adds up to mass / N, and no row to more than 1 / V, up to the solver's
    error (Li et al. 2024, arXiv 2403.00041, by Dykstra's projections). K = exp(-costs / regularization), and

        u = min(1, 1 / (V K v)),    v = mass / (N K^T u),    plan = diag(u) K diag(v)

    in logarithms, in which no small regularization underflows. The number of iterations is fixed: a test of their
    convergence would make an example's plan depend on the others of its batch.
    """
    patches, prompts = costs.shape[-2:]
    # [..., prompts, patches], so that the long sums run over neighbours in memory, which is faster.
    kernel = (-costs.transpose(-1, -2) / transport.regularization).contiguous()
    row, column = -math.log(patches), math.log(transport.mass / prompts)
    v = torch.zeros_like(kernel[..., 0])
    u = torch.zeros_like(kernel[..., 0, :])
    for _ in range(transport.iterations):
        u = (row - (kernel + v.unsqueeze(-1)).logsumexp(dim=-2)).clamp(max=0)
        v = column - (kernel + u.unsqueeze(-2)).logsumexp(dim=-1)
    return (u.unsqueeze(-2) + kernel + v.unsqueeze(-1)).exp().transpose(-1, -2)
