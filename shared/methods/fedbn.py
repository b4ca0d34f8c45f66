"""FedBN: normalization stays with its site, all else is averaged.

Li et al. 2021, Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623, Algorithm 1.
Written for batch normalization, whose running statistics stay as well; in a transformer it is the layer norms' scales
and shifts. What stays and what is averaged is done as in FedPer.
"""

from __future__ import annotations

from pydantic import Field

from tessera.shared.methods.base import Method
from tessera.shared.methods.fedper import FedPerCoordinator, FedPerSettings, FedPerWorker
from tessera.shared.model.selectors import Match, roles


class FedBnSettings(FedPerSettings):
    private: tuple[Match, ...] = Field(
        default=roles("norm").include, min_length=1, description="the blocks that stay with their site"
    )


METHOD = Method(
    name="fedbn",
    settings=FedBnSettings,
    coordinator=FedPerCoordinator,
    worker=FedPerWorker,
    source="Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623",
)
