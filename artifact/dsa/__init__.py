"""Selection methods of dynamic sparse attention: how a decode step scores the KV cache's blocks, and which it picks."""

from artifact.ops import topk as topk
