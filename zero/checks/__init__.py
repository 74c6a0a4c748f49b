"""What is refused, said once for all stages."""
