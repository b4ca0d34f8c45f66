"""Code that the coordinator, the workers and the command line share; it never imports torch.

The modules in this folder import nothing but each other; `tests/test_architecture.py` holds every package to what its
docstring says it imports.
"""
