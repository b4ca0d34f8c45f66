"""The service that stores runs, rounds and the global state; it never builds a model and never imports torch.

`app` assembles the HTTP side, `services` its parts.
"""
