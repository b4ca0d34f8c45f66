"""One step of training: its optimizer, its precision, and the pieces of its batch."""
