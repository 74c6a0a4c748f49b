"""How all stages lay parameters out: flat buffers, sharded over ranks."""
