"""`python -m tessera.shared.cli`: the same as `tessera`, for where no scripts are installed."""

from tessera.shared.cli.main import main

main()
