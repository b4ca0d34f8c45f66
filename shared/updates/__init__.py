"""Files that hold tensors: updates with a codec for each block, and model folders. Imports `model` and `tensors`."""
