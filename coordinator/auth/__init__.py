"""Tokens, browser sessions and OpenID Connect: who calls, and what the caller may read.

Imports `db`, `domain` and `settings`.
"""
