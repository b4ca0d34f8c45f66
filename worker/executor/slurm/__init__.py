"""Tasks as jobs of Slurm: the commands, a launcher and an executor that use them, and the job's own program."""
