"""One output file: its schema, how values are stored, how batches are written and read back."""
