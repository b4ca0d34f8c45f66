"""Labels that are not one class for each example: several labels, numbers, and entities in texts. No kind is imported
here."""
