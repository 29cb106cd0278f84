"""What the owner of a card runs first: `make test-tensorrt`."""
