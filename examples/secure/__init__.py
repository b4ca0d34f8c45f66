"""The demo of secure sums, which `make demo-secure` runs."""
