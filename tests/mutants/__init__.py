"""All planted faults, in one list: lines that a named test catches, and behaviour that the simulation finds."""
