"""An emulator of RDNA machine code."""
