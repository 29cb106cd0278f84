"""Plugins of the network."""
