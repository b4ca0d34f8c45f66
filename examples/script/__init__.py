"""Training scripts of a site's own, of which five lines make them part of federated runs: see docs/own-script.md."""
