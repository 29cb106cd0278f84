"""Find the fastest settings of an engine on this device: measure, choose, write a recipe."""
