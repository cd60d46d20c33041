"""What this machine has to compute with: its memory, and that of its GPUs."""
