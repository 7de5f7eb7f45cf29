"""The commands of `gristmill` that build."""
