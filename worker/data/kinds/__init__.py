"""The kinds of data sets, one file each, named for the kind. Adding a kind means adding a file with an `ADAPTER`."""
