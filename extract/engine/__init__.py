"""Checkpoints, engines, runtimes: `build` makes an engine directory, `load_runtime` opens one that fits here."""
