"""Running statistics of batch normalisation, among the tensors of a model."""


def is_statistic(name: str) -> bool:
    """Return True if a tensor is a running mean or variance of batch normalisation.

    It is a state and no result of gradients. A mean of variances is a variance; with a longer step, a rounded one or
    noise, it can become negative.
    """
    return name.rpartition(".")[2] in {"running_mean", "running_var"}


def module_of(name: str) -> str:
    """Return the path of the module that a tensor belongs to."""
    return name.rpartition(".")[0]
