"""In-memory attention's memory: geometry, address maps, and the bandwidth all-bank commands reach."""
