"""FedBN: normalization blocks stay with their site, all others are averaged, as in FedPer.

Li et al. 2021, Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623, Algorithm 1.
The paper's batch normalization includes running statistics; in a transformer the blocks are the layer norms' scales
and shifts.
"""

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
    good_for="images from different devices: each site keeps its own normalisation layers",
    sends="everything but the normalisation layers",
    settings=FedBnSettings,
    coordinator=FedPerCoordinator,
    worker=FedPerWorker,
    source="Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623",
)
