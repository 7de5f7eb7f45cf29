"""Readers of checkpoint formats; each yields layers as the file defines them, as `AffineWeight`s."""
