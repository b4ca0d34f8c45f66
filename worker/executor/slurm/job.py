"""The program of a job of Slurm: it runs a task's ranks, or the site's own script, until they end.

Its arguments are the task's folder, and the number of ranks or `--` and the script's command. It needs no network,
and gets no token and no key. Imports no torch.
"""

import os
import sys
from pathlib import Path

from tessera.worker.executor.script_folder import TASK_VARIABLE
from tessera.worker.executor.script_supervisor import supervise as supervise_script
from tessera.worker.executor.supervisor import supervise


def main() -> int:
    """Run the task. Return the job's exit code."""
    folder, *command = Path(sys.argv[1]), *sys.argv[2:]
    home = folder.parent
    # Of two jobs for one folder, as after a submission that was not answered, only the first works. One that Slurm
    # started again ends, too: the files of its first run would mislead it.
    (home / "started").mkdir(mode=0o700)
    step = os.getppid()
    if command[0] == "--":
        os.environ[TASK_VARIABLE] = str(folder)
        return supervise_script(step, command[1:])
    return supervise(step, home, int(command[0]), folder)


if __name__ == "__main__":
    sys.exit(main())
