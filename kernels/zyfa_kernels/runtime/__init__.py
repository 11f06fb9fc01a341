"""From a kernel's name to machine code: registry, assembler, cache, and launch through HIP."""
