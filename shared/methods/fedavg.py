"""FedAvg: every worker trains the whole model, and the example-weighted mean of the results is the next version."""

from tessera.shared.methods.base import Method, MethodSettings

METHOD = Method[MethodSettings](
    name="fedavg",
    good_for="a first run, and the baseline of every comparison",
    sends="the whole model",
    is_preselected=True,
    source="McMahan et al., Communication-Efficient Learning of Deep Networks, arXiv 1602.05629, Algorithm 1",
)
