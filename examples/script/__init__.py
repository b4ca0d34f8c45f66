"""Training scripts of a site's own. Five lines make each a part of federated runs: see docs/own-script.md."""
