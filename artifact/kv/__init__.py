"""The serving side: requests, block allocators, continuous batching, and where the blocks land."""
