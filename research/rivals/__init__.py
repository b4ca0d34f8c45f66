"""Other systems at the same work. Each runs in an environment of its own, with the versions that are pinned here."""
