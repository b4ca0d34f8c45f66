"""A rank: a process of a rank group. It executes the tasks that the agent hands over.

The arguments are the group's folder, the launcher's process id and the rank's number. A rank's loaders import this
module too, but not what it runs, which takes memory that they do not need.
"""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    import_module("tessera.worker.ranks.serving").serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
