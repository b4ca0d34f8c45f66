"""The model and its data: Z(H; Phi) V against Y, where Phi = (W_Q, W_K) makes the kernel and V reads it.

Un-normalized linear attention has Z = phi(H W_Q) phi(H W_K)^T H / (tokens * key width) with phi = elu + 1
(Katharopoulos et al. 2020); softmax attention has Z = softmax(H W_Q (H W_K)^T / sqrt(key width)) H. The objective of
client k is F_k = 1/2 E|Z V - Y|^2 + ridge/2 |V|^2 over its tokens, and F is the clients' mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

Array = np.ndarray
Kernel = Literal["linear", "softmax"]

CLIENTS, SEQUENCES, TOKENS, WIDTH, KEY_WIDTH, OUTPUTS = 8, 32, 6, 5, 3, 3
RIDGE, NOISE = 0.01, 0.1
START = {"linear": 0.15, "softmax": 0.45}
"""The standard deviation of the query and key matrices at the start. The value matrix starts at zero."""
RATES = {"linear": 0.05, "softmax": 0.2}
"""Step sizes of local gradient descent."""


class Weights(NamedTuple):
    """One model, or one for each client along a first axis."""

    query: Array  # [..., width, key width]
    key: Array  # [..., width, key width]
    value: Array  # [..., width, outputs]


@dataclass(frozen=True)
class Problem:
    kernel: Kernel
    inputs: Array  # H [clients, sequences, tokens, width]
    targets: Array  # Y [clients, sequences, tokens, outputs]
    start: Weights

    @property
    def clients(self) -> int:
        return len(self.inputs)

    def of(self, clients: Array) -> Problem:
        """The same with these clients only."""
        return replace(self, inputs=self.inputs[clients], targets=self.targets[clients])


def draw(kernel: Kernel, delta: float, seed: int) -> Problem:
    """A random teacher and clients that differ by `delta`: in the scale and mean of each feature, and in what they
    make of what they attend to (shifts of the teacher's value matrix that sum to zero over clients).
    """
    rng = np.random.default_rng([seed, 1])

    def teacher(*shape: int) -> Array:
        return rng.normal(scale=WIDTH**-0.5, size=shape)

    query, key, value = teacher(WIDTH, KEY_WIDTH), teacher(WIDTH, KEY_WIDTH), teacher(WIDTH, OUTPUTS)
    scales = np.exp(0.4 * delta * rng.normal(size=(CLIENTS, 1, 1, WIDTH)))
    means = 0.4 * delta * rng.normal(size=(CLIENTS, 1, 1, WIDTH))
    shifts = delta * teacher(CLIENTS, WIDTH, OUTPUTS)
    shifts -= shifts.mean(axis=0)
    inputs = rng.normal(size=(CLIENTS, SEQUENCES, TOKENS, WIDTH)) * scales + means
    features = attend(kernel, inputs, query, key)
    targets = features @ (value + shifts)[:, np.newaxis] + NOISE * rng.normal(size=(*inputs.shape[:-1], OUTPUTS))
    start = Weights(
        START[kernel] * rng.normal(size=query.shape),
        START[kernel] * rng.normal(size=key.shape),
        np.zeros((WIDTH, OUTPUTS)),
    )
    return Problem(kernel, inputs, targets, start)


# ---------------------------------------------------------------- attention


def attend(kernel: Kernel, inputs: Array, query: Array, key: Array) -> Array:
    """Z [clients, sequences, tokens, width]. The matrices are one for all, or one for each client."""
    asked, offered = inputs @ _per_client(query), inputs @ _per_client(key)
    if kernel == "linear":
        read: Array = _phi(asked) @ (_phi(offered).swapaxes(-1, -2) @ inputs)
        return read / (TOKENS * KEY_WIDTH)
    softened: Array = _softmax(asked @ offered.swapaxes(-1, -2) / np.sqrt(KEY_WIDTH)) @ inputs
    return softened


def gradients(problem: Problem, weights: Weights) -> Weights:
    """The gradient of each client's F_k at its own weights, each [clients, rows, columns]."""
    inputs, count = problem.inputs, SEQUENCES * TOKENS
    value = _per_client(weights.value)
    asked, offered = inputs @ _per_client(weights.query), inputs @ _per_client(weights.key)
    if problem.kernel == "linear":
        scale = 1 / (TOKENS * KEY_WIDTH)
        ours, theirs = _phi(asked), _phi(offered)
        held = theirs.swapaxes(-1, -2) @ inputs * scale
        features = ours @ held
        errors = (features @ value - problem.targets) / count
        backward = errors @ value.swapaxes(-1, -2)  # d F / d Z
        to_asked = backward @ held.swapaxes(-1, -2) * _slope(asked)
        to_offered = inputs @ (backward.swapaxes(-1, -2) @ ours) * scale * _slope(offered)
    else:
        kernel = _softmax(asked @ offered.swapaxes(-1, -2) / np.sqrt(KEY_WIDTH))
        features = kernel @ inputs
        errors = (features @ value - problem.targets) / count
        to_kernel = errors @ value.swapaxes(-1, -2) @ inputs.swapaxes(-1, -2)
        to_scores = kernel * (to_kernel - (to_kernel * kernel).sum(axis=-1, keepdims=True)) / np.sqrt(KEY_WIDTH)
        to_asked, to_offered = to_scores @ offered, to_scores.swapaxes(-1, -2) @ asked
    return Weights(
        _rows(inputs).swapaxes(-1, -2) @ _rows(to_asked),
        _rows(inputs).swapaxes(-1, -2) @ _rows(to_offered),
        _rows(features).swapaxes(-1, -2) @ _rows(errors) + RIDGE * weights.value,
    )


def _per_client(matrix: Array) -> Array:
    """With an axis for the sequences, if there is one for the clients."""
    return matrix[:, np.newaxis] if matrix.ndim == 3 else matrix


def _rows(values: Array) -> Array:
    """[clients, sequences, tokens, n] as [clients, sequences * tokens, n]."""
    return values.reshape(len(values), -1, values.shape[-1])


def _phi(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _slope(x: Array) -> Array:
    return np.where(x > 0, 1.0, np.exp(np.minimum(x, 0)))


def _softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    softened: Array = raised / raised.sum(axis=-1, keepdims=True)
    return softened


# ---------------------------------------------------------------- for a fixed kernel, all is quadratic in V


@dataclass(frozen=True)
class Moments:
    """F_k(V) = 1/2 (constant - 2 <b, V> + <V, A V>) for each client, under one kernel."""

    curvature: Array  # A_k = E Z^T Z + ridge I, [clients, width, width]
    slope: Array  # b_k = E Z^T Y, [clients, width, outputs]
    constant: Array  # E|Y|^2, [clients]

    def objective(self, value: Array) -> float:
        """F at this V."""
        curvature, slope, constant = self.curvature.mean(axis=0), self.slope.mean(axis=0), self.constant.mean()
        return float(0.5 * (constant - 2 * np.sum(slope * value) + np.sum(value * (curvature @ value))))

    def best_value(self) -> Array:
        """V* = (mean A)^-1 (mean b), which minimizes F."""
        return np.linalg.solve(self.curvature.mean(axis=0), self.slope.mean(axis=0))

    def profile(self) -> float:
        """G = min over V of F."""
        return self.objective(self.best_value())


def moments(problem: Problem, query: Array, key: Array) -> Moments:
    features, targets = _rows(attend(problem.kernel, problem.inputs, query, key)), _rows(problem.targets)
    count = SEQUENCES * TOKENS
    return Moments(
        features.swapaxes(-1, -2) @ features / count + RIDGE * np.eye(WIDTH),
        features.swapaxes(-1, -2) @ targets / count,
        np.sum(targets**2, axis=(1, 2)) / count,
    )


def profile_gradient(problem: Problem, query: Array, key: Array) -> Array:
    """The gradient of G, flat: by the envelope theorem that of F with V held at V*."""
    best = Weights(query, key, moments(problem, query, key).best_value())
    mine = gradients(problem, best)
    return flat(mine.query.mean(axis=0), mine.key.mean(axis=0))


def flat(query: Array, key: Array) -> Array:
    return np.concatenate([query.reshape(-1), key.reshape(-1)])
