"""The command `tessera`, also where scripts are not installed: `python -m tessera.shared.cli`."""

from tessera.shared import lazy_import


def main() -> None:
    """Import and run the command line."""
    lazy_import.frozen = True
    lazy_import.load("tessera.shared.cli.main").main()


if __name__ == "__main__":
    main()
