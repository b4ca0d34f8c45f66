"""`python -m shared.cli`: the same as `tessera`, for where no scripts are installed."""

from shared.cli.main import main

main()
