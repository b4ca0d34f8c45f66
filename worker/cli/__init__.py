"""The worker's commands. Each is loaded only when it is called, because these import torch."""
