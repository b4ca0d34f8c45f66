"""The worker's commands. Each is loaded only when it is called, because these import torch."""

import os

# Before transformers is loaded: its warnings and bars are about its own workings. Who wants them sets these.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
