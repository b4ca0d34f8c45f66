"""FedAvg: every worker trains the whole model, and the example-weighted mean of the results is the next version."""

from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, WorkerHalf

METHOD = Method(
    name="fedavg",
    settings=MethodSettings,
    coordinator=CoordinatorHalf[MethodSettings],
    worker=WorkerHalf[MethodSettings],
    source="McMahan et al., Communication-Efficient Learning of Deep Networks, arXiv 1602.05629, Algorithm 1",
)
