"""Federated learning of transformers over REST: `coordinator`, `worker` and what both share.

The four packages lie beside this folder, which links to them, so that the wheel installs one name and type checkers
and editors find each file.
"""
