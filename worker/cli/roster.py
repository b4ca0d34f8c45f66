"""`tessera worker roster`: this site's fingerprint, and those of the other sites."""

from tessera.shared.terminal.output import AsJson, show, table
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, exits, fail
from tessera.worker.settings import SettingsError, read_settings
from tessera.worker.stores import sum_party_of


def roster(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show this site's fingerprint for secure sums, and those of the other sites in its settings.

    Send the fingerprint to the people of the other sites by a way that does not pass the coordinator, such as by
    telephone, and enter theirs in [secure_sums.roster]. The coordinator could otherwise invent sites.

    Exit code 0: all is well, 2: invalid settings.
    """
    with exits({BAD_SETTINGS: (SettingsError,)}):
        party = sum_party_of(read_settings(config))
    if party is None:
        fail(f"{config}: secure_sums is not set: add [secure_sums] with this site's name as site", BAD_SETTINGS)
    shown = {**party.roster, party.site: party.fingerprint}
    rows = [(site, known, "this site" if site == party.site else "") for site, known in sorted(shown.items())]
    show(shown, table(("site", "fingerprint", ""), rows), as_json=as_json)
