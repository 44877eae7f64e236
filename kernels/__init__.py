"""How one operator is computed on one device; nothing here knows a path, a policy or a claim."""
