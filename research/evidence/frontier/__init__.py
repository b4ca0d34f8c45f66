"""Macro F1 by epsilon, for what SAFL and its controls train."""
