"""The serving side of the study: requests, block allocators and the engine that runs them."""
