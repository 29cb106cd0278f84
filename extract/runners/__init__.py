"""Who runs which shard. Every runner calls the same pipeline; storage alone says what is done."""
