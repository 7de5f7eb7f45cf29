"""The commands of `gristmill` that need nothing but the dispatcher; each module has `configure` and `run`."""
