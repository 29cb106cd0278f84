"""A crash campaign: random faults at random moments on tiny jobs, and what must hold after each of them."""
