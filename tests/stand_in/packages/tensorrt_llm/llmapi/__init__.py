"""Where 1.2 keeps what used to be bound from C++."""
