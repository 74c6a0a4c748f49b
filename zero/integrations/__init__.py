"""Where people already train. Each file here knows one other library and is imported only by who asks for it."""
