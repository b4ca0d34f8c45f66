"""The end of training that has no finite result."""


class TrainingDiverged(ArithmeticError):
    """A loss, a gradient or a weight that is not finite."""
