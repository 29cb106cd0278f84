"""A stand-in of the vendor packages `tensorrt_llm` and `tensorrt`, and of the card they need, for tests without either.

Our own code: it does what the vendor's documentation says, on a CPU, as strict as documented and no kinder; where
nothing is documented it chooses what would hurt a careless caller most. Below `packages/` lies what callers import,
under the vendor's names. It proves that our calls fit what is written about the vendor, never that the vendor does so.
"""
