"""Readers of tables, texts, images and labels, which the kinds share. No kind is imported here."""
