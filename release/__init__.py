"""The files of a release, and what they are made from; docs/releasing.md."""
