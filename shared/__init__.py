"""Code that the coordinator, the workers and the command line share; it never imports torch.

Both sides use every package but these: `rounds` the coordinator and simulations; `client` workers, commands and the
Python API, except for its `notice_channels` and `tls_context`, which the coordinator uses too; `cli` commands;
`terminal` commands of both sides, the Python API and simulations.

The modules in this folder import nothing but each other; `tests/test_architecture.py` compares every package's
imports with its docstring.
"""
