"""Where people already train. Each file is imported only by who asks for it, and needs its library."""
