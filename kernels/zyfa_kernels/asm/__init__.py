"""The generator of gfx950 assembly: registers, instructions, waits, hazards, and one file per kernel family."""
