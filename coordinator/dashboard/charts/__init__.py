"""Charts of runs, as SVG, and the page of several runs side by side."""
