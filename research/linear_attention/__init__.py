"""FedFrozen's own setting, small: one attention layer, linear or softmax, on clients whose data differ by a dial."""
