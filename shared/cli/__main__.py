"""The command `tessera`, also where scripts are not installed: `python -m tessera.shared.cli`."""

from tessera.shared.lazy_import import load


def main() -> None:
    """Import and run the command line."""
    load("tessera.shared.cli.main").main()


if __name__ == "__main__":
    main()
