"""The service that stores runs, rounds and the global state; it never builds a model and never imports torch.

`app` puts the HTTP side together, `services` what its handlers use.
"""
