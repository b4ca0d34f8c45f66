"""The coordinator's live page: what the federation does, at a glance, and the few things that people do about it.

Rendered here, from what the API shows; nothing is decided twice. See docs/page.md.
"""
