"""Rows of an output as training code takes them: which columns, in what order, gathered into batches of tensors."""
