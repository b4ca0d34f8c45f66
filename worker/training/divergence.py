"""The end of training that has no finite result."""


class TrainingDiverged(ArithmeticError):
    """A loss, a gradient or a weight that is not finite."""


class NoFiniteLoss(TrainingDiverged):
    """A loss that is not finite for another reason than the learning rate: the data, or the version."""
