"""The commands of a worker and a site.

Imports `agent`, `data`, `deltas`, `doctor`, `enrolment`, `errors`, `executor`, `faults`, `governance`, `inventory`,
`model`, `privacy`, `settings`, `settings_reload`, `state`, `stores` and `task`.
"""

import os

# Before transformers is loaded: its warnings and bars are about its own workings. Who wants them sets these.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
