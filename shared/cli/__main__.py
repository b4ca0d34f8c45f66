"""`python -m tessera.shared.cli`: the command `tessera` where scripts are not installed."""

from tessera.shared.cli.main import main

main()
