"""An engine against the unquantised model: states, next-token distributions, and how sure the figures are."""
