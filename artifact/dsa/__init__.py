"""Selection methods of dynamic sparse attention: how a step scores the KV cache's blocks and which it attends to."""
