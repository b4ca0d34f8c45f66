"""What the coordinator, the workers and the command line agree on; it never imports torch.

The modules in this folder import nothing but each other; `tests/test_architecture.py` holds every package to what its
docstring says it imports.
"""
